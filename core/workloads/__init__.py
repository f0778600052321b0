"""Workloads: what is asked of an engine, and when. The small interface that every ``workload=`` option has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import attrs

from core.types import SamplingParams


@attrs.frozen(slots=True, kw_only=True, eq=False)
class WorkloadRequest:
    """One request of a workload, before an engine has seen it."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float | None = None  # seconds after the workload's start; None: closed loop, sent when there is room
    recorded_output_tokens: int | None = None  # the output length the workload says
    priority: int = 0
    client_id: str = ""
    session_id: str = ""
    cache_salt: str = ""
    service_class: str = ""
    deadline_s: float | None = None  # seconds after its arrival
    tpot_s: float | None = None
    stall_s: float | None = None  # its session comes back so long after the end: the next turn of a tool call
    label: str = ""
    then: FollowUp | None = None  # the next request of its session; None: there is none


FollowUp = Callable[[tuple[int, ...]], "tuple[float, WorkloadRequest] | None"]
"""Called once, when a request has finished as asked (never after a refusal, a failure or an abort), with the output tokens of its
first branch: seconds from then to the next request of the session, and that request; None: the session is over."""


class Workload(Protocol):
    """A source of requests; the same for the same options."""

    concurrency: int | None
    """Closed loop: most requests in flight; None: no limit."""

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The requests in order of arrival, for a model with this vocabulary and this many tokens a sequence."""

    # A workload may also have:
    # num_requests: int | None            how many there are, for the progress bar
    # use_tokenizer(tokenizer) -> None    called before ``requests``: prompts that are text need the engine's tokenizer
    #                                     (``core.text.Tokenizer``, or None where the engine has none)
    # skipped: Mapping[str, int]          what was left out, by reason: it goes into the manifest
