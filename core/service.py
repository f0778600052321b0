"""Service levels as they were kept: attainment and goodput, of everybody, by class and by client.

A sequence **meets** its level when it ended by itself, its first token came when it was due, and its further tokens were fast
enough::

    met        = finished  and  t_1 <= deadline  and  TPOT <= tpot_s         (a target that is None is met)
    attainment = met / (finished + failed + refused)                         None when nobody had a target
    goodput    = met / duration_s,  and  output tokens of those met / duration_s

Refused requests count as missed: turning everyone away is no service. Aborted ones are left out: the client went away. TPOT is
the mean over an answer, (t_n - t_1) / (n - 1), so a stall in one gap is seen in the ITL figures, not here. The definition is
that of the serving benchmarks (requests per second that meet every target); "the highest rate at which 90 % do" is a sweep over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.types import Finished

MAX_GROUPS = 64
OTHERS = "(others)"
"""Where groups beyond ``MAX_GROUPS`` are counted together, so that a client that invents names cannot grow the record."""


class Group:
    """Sums of one class or client."""

    __slots__ = ("ttft", "tpot", "finished", "failed", "refused", "met", "met_tokens", "output_tokens", "targets")

    def __init__(self, series: Callable[[], Any]) -> None:
        self.ttft, self.tpot = series(), series()
        self.finished = self.failed = self.refused = 0
        self.met = self.met_tokens = self.output_tokens = self.targets = 0

    def add(self, record: Finished, outcome: str, ttft_s: float | None, tpot_s: float | None, met: bool) -> None:
        self.output_tokens += record.num_output_tokens
        self.targets += record.deadline_s is not None or record.tpot_s is not None
        if outcome == "finished":
            self.finished += 1
            self.ttft.add(ttft_s)
            if tpot_s is not None:
                self.tpot.add(tpot_s)
        elif outcome == "failed":
            self.failed += 1
        elif outcome == "refused":
            self.refused += 1
        if met:
            self.met += 1
            self.met_tokens += record.num_output_tokens

    def summary(self, seconds: float) -> dict[str, Any]:
        ended = self.finished + self.failed + self.refused
        return {
            "finished": self.finished,
            "failed": self.failed,
            "refused": self.refused,
            "output_tokens": self.output_tokens,
            "attainment": self.met / ended if ended and self.targets else None,
            "goodput_per_s": self.met / seconds if seconds else None,
            "goodput_tokens_per_s": self.met_tokens / seconds if seconds else None,
            "ttft_s": self.ttft.spread(),
            "tpot_s": self.tpot.spread(),
        }


class Service:
    """Everybody's sums, by class and by client. Counts sequences: a request with n branches is n answers."""

    def __init__(self, series: Callable[[], Any]) -> None:
        self._series = series
        self.all = Group(series)
        self.classes: dict[str, Group] = {}
        self.clients: dict[str, Group] = {}

    def _group(self, groups: dict[str, Group], name: str) -> Group | None:
        if not name:
            return None
        group = groups.get(name)
        if group is None:
            if len(groups) >= MAX_GROUPS:
                name = OTHERS
            group = groups.setdefault(name, Group(self._series))
        return group

    def _groups(self, service_class: str, client_id: str) -> list[Group]:
        named = (self._group(self.classes, service_class), self._group(self.clients, client_id))
        return [self.all, *(group for group in named if group is not None)]

    def add(self, record: Finished, outcome: str) -> None:
        """One sequence that ended. Costs about a microsecond."""
        ttft_s = tpot_s = None
        met = False
        times = record.token_times_s
        if outcome == "finished":
            ttft_s = times[0] - record.arrival_s
            if len(times) > 1:
                tpot_s = (times[-1] - times[0]) / (len(times) - 1)
            met = (record.deadline_s is None or times[0] <= record.deadline_s) and (
                record.tpot_s is None or tpot_s is None or tpot_s <= record.tpot_s
            )
        for group in self._groups(record.service_class, record.client_id):
            group.add(record, outcome, ttft_s, tpot_s, met)

    def count_refused(self, num: int, service_class: str, client_id: str) -> None:
        for group in self._groups(service_class, client_id):
            group.refused += num

    def summary(self, seconds: float) -> dict[str, Any]:
        everybody = self.all.summary(seconds)
        return {
            **{key: everybody[key] for key in ("attainment", "goodput_per_s", "goodput_tokens_per_s")},
            "classes": {name: group.summary(seconds) for name, group in sorted(self.classes.items())},
            "clients": {name: group.summary(seconds) for name, group in sorted(self.clients.items())},
        }
