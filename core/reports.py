"""What a step and a sequence report when they are over: for streams, metrics and observers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import attrs

if TYPE_CHECKING:
    from core.types import Plan, TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error", "refused"]


class Output(NamedTuple):
    """What one sequence got in one step: the delta for its stream. A tuple, because a step makes one for each token."""

    request_id: int
    sequence_id: int
    branch: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that matched
    error: str | None = None  # with finish_reason "error" or "refused"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with a branch's first token: of each prompt token but the first


@attrs.frozen(slots=True)
class Preempted:
    """A preemption by what happened: swap, recompute, turned (swap became recompute) or forced (core's own choice)."""

    sequence: int
    kind: Literal["swap", "recompute", "turned", "forced"]
    num_computed_tokens: int
    num_blocks: int


@attrs.frozen(slots=True)
class Finished:
    """One finished sequence with its times, in seconds on the executor's clock. TTFT = scheduling + queueing + prefill."""

    request_id: int
    sequence_id: int
    branch: int
    client_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason
    arrival_s: float
    first_seen_s: float  # start of the first step after arrival
    first_scheduled_s: float | None  # start of the first step that computed it
    token_times_s: tuple[float, ...]  # when each output token was delivered
    finished_s: float
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None


@attrs.frozen(slots=True)
class MemoryReport:
    """Where the pool's tokens are, in tokens (fractions are over ``pool``). Reserved = written + to_write + internal_waste.

    ``written`` holds KV; ``to_write`` is reserved and will be written before the request's declared limit; ``internal_waste`` is
    reserved and never written (a paged tail, a slot longer than the request); ``external_waste`` is free but fits no waiting
    request's next reservation; ``shared`` is what sharing saves: tokens held more than once, counted each time but the first;
    ``cached`` is unreferenced content that may be hit again.
    """

    pool: int
    reserved: int
    written: int
    to_write: int
    internal_waste: int
    external_waste: int
    shared: int
    cached: int
    copied_bytes: int = 0  # by copy on write, in this step


@attrs.frozen(slots=True, eq=False)
class StepReport:
    """One step, after commit: for streams and observers."""

    step: int
    started_s: float
    ended_s: float
    plan: Plan
    outputs: tuple[Output, ...]
    preempted: tuple[Preempted, ...]
    finished: tuple[Finished, ...]
    num_tokens: int
    num_sampled: int
    num_running: int
    num_waiting: int
    stage_seconds: Mapping[str, float]
    memory: MemoryReport | None = None
    wait_until: float | None = None
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_forked: int = 0  # branches that started from their parent's blocks

    @property
    def idle(self) -> bool:
        """Nothing was computed: no work, or the plan waits for ``wait_until``."""
        return self.num_tokens == 0
