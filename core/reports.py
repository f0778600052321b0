"""What a step and a sequence report when they are over: for streams, metrics and observers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import sub
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import attrs

if TYPE_CHECKING:
    from core.types import Plan, Request, TokenLogprobs

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


class Outputs(Sequence):
    """The outputs of one step, in order. A row with nothing to say but its token is made when somebody reads it.

    Core puts ``Output`` values in, and for most sequences of most steps only ``(its sequence, token)``: a simulation
    that reads none but endings saves a third of its time.
    """

    __slots__ = ("_rows", "_whole")

    def __init__(self, rows: list[Any]):
        self._rows = rows
        self._whole = False  # every row is an Output

    @property
    def ended(self) -> list[Output]:
        """Those with a ``finish_reason``."""
        return [row for row in self._rows if type(row) is not tuple and row.finish_reason is not None]

    def _read(self) -> list[Output]:
        if not self._whole:
            self._rows = [_plain_output(*row) if type(row) is tuple else row for row in self._rows]
            self._whole = True
        return self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __iter__(self) -> Iterator[Output]:
        return iter(self._read())

    def __repr__(self) -> str:
        return repr(self._read())


def _plain_output(seq: Any, token: int) -> Output:
    """A token of a sequence that goes on and wants no text; what is read here never changes during its life."""
    view = seq.view
    return Output(
        view.request_id,
        view.id,
        view.branch,
        (token,),
        "",
        num_prompt_tokens=view.num_prompt_tokens,
        num_cached_tokens=seq.num_cached_tokens,
    )


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
    service_class: str = ""
    deadline_s: float | None = None  # when its first token was due
    tpot_s: float | None = None  # its target for the mean time of a further token

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None


def check_record(finished: Finished) -> None:
    """Raise AssertionError, with the numbers, if a finished sequence's times contradict each other.

    Holds for every sequence, preempted or not: times run forwards; one time a delivered token; TTFT = scheduling +
    queueing + prefill; len(ITL) = tokens - 1; E2E = TTFT + sum(ITL), so a preemption's wait is in one gap and in E2E,
    and not in TTFT.
    """
    times = finished.token_times_s
    who = f"sequence {finished.sequence_id} of request {finished.request_id}"

    def must(holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(f"{who}: {what}: {finished}")

    must(len(times) == finished.num_output_tokens, f"{finished.num_output_tokens} output tokens, {len(times)} times")
    must(not times or finished.first_scheduled_s is not None, "delivered tokens, but never scheduled")
    must(finished.finish_reason != "refused" or not times, "refused, yet tokens were delivered")
    must(finished.finish_reason not in ("stop", "length") or bool(times), "finished without a token")
    seen, scheduled = finished.first_seen_s, finished.first_scheduled_s
    moments = [finished.arrival_s, seen, *([] if scheduled is None else [scheduled]), *times, finished.finished_s]
    must(all(map(math.isfinite, moments)), "a time is not finite")
    must(all(a <= b for a, b in itertools.pairwise(moments)), "times run backwards")
    if not times or scheduled is None:
        return
    ttft_s = times[0] - finished.arrival_s
    gaps = list(map(sub, times[1:], times))
    terms = (seen - finished.arrival_s, scheduled - seen, times[0] - scheduled)
    slack = 1e-9 * max(1.0, abs(times[-1]))  # differences of large clock values round
    must(len(gaps) == finished.num_output_tokens - 1, "gaps are not tokens - 1")
    must(abs(sum(terms) - ttft_s) <= slack, "TTFT is not the sum of its terms")
    e2e_s = times[-1] - finished.arrival_s
    must(abs(ttft_s + math.fsum(gaps) - e2e_s) <= slack, "E2E is not TTFT + sum(ITL)")


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
    outputs: Outputs
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
    refused: tuple[Request, ...] = ()  # at admission: they got no sequence, so they are not in ``finished``

    @property
    def idle(self) -> bool:
        """Nothing was computed: no work, or the plan waits for ``wait_until``."""
        return self.num_tokens == 0
