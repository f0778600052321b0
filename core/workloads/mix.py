"""``workload=mix``: several workloads at once, each with the labels of its requests: clients, classes, priorities, deadlines.

    parts:
      chat:  {workload: {_target_: core.workloads.synthetic.Synthetic, ...}, service_class: chat, client_id: ann}
      batch: {workload: {...}, priority: 2, client_id: bob, start_s: 10}

Requests are merged by arrival; a part without arrival times (closed loop) is refused, since nobody would know when its requests
come.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from core.types import ConfigError
from core.workloads import Workload, WorkloadRequest

LABELS = ("client_id", "service_class", "priority", "deadline_s", "tpot_s", "cache_salt", "label")


def _parts(value: Any) -> dict[str, dict[str, Any]]:
    return {str(name): dict(part) if isinstance(part, Mapping) else part for name, part in dict(value).items()}


def _check(instance: object, attribute: attrs.Attribute, parts: dict[str, dict[str, Any]]) -> None:
    for name, part in parts.items():
        if not isinstance(part, dict) or not hasattr(part.get("workload"), "requests"):
            raise ConfigError(f"workload.parts.{name}: it needs workload, a node with _target_")
        unknown = sorted(set(part) - {"workload", "start_s", *LABELS})
        if unknown:
            raise ConfigError(
                f"workload.parts.{name}.{unknown[0]}: no such field; allowed: workload, start_s, {', '.join(LABELS)}"
            )


@attrs.define(eq=False, kw_only=True)
class Mix:
    """Parts by name; ``start_s`` shifts a part. Each part draws its own random numbers from its own ``seed``."""

    parts: dict = attrs.field(factory=dict, converter=_parts, validator=_check)
    concurrency: None = attrs.field(default=None, init=False)

    @property
    def num_requests(self) -> int | None:
        counts: list[Any] = [getattr(part["workload"], "num_requests", None) for part in self.parts.values()]
        return None if None in counts else sum(counts)

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """All parts' requests in order of arrival."""
        if not self.parts:
            raise ConfigError(
                "workload.parts is empty: give it name -> {workload, labels}, as the files in conf/experiment do"
            )
        streams = [self._part(name, part, vocab_size, max_model_len) for name, part in self.parts.items()]
        return heapq.merge(*streams, key=lambda request: request.arrival_s or 0.0)

    @staticmethod
    def _part(name: str, part: dict[str, Any], vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        workload: Workload = part["workload"]
        labels = {key: part[key] for key in LABELS if part.get(key) is not None}
        labels.setdefault("label", name)
        for request in workload.requests(vocab_size, max_model_len):
            if request.arrival_s is None:
                raise ConfigError(
                    f"workload.parts.{name}: its requests have no arrival times; use poisson, gamma or burst arrivals"
                )
            yield attrs.evolve(request, arrival_s=request.arrival_s + part.get("start_s", 0.0), **labels)
