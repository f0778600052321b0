"""What a run cost and gave, summed while it runs: the numbers of ``result.json``.

One ``Metrics`` per engine; the engine passes every ``StepReport`` to ``update`` and anyone may ask for ``summary``.
Sums are kept, not steps, so memory does not grow with a run's length (``Series`` says how percentiles stay possible).

**Times** are seconds on the executor's clock, as the client sees them. Of a sequence with tokens at t_1 .. t_n::

    TTFT = t_1 - arrival                  a later preemption does not move it
         = scheduling + queueing + prefill
           scheduling  arrival to the start of the next step
           queueing    from there to the start of the first step that computes it
           prefill     from there to t_1
    TPOT = (t_n - t_1) / (n - 1)          one figure a sequence; outputs of one token have none
    ITL  = t_(i+1) - t_i                  every gap of every sequence, pooled: a long answer weighs by its gaps
    E2E  = t_n - arrival = TTFT + sum of its ITLs

They are taken over sequences that ended with ``stop`` or ``length``. Percentiles interpolate linearly between the two
nearest values (numpy's ``linear``). ``service`` (attainment and goodput by class and client) is core/service.py's. Means of the
three TTFT terms add up to the mean TTFT; percentiles do not add up.

**Counts.** A request counts once, by its parent branch: finished (stop, length), failed (error), refused or aborted.
``output_tokens`` are delivered tokens, also those of requests that were cut off; tokens computed again after a
preemption are not delivered again. ``steps`` are those that computed something.

**Means over time** run from the start of the first step that computed something (``duration_s`` = from there to the
end of the last step). A step's ``memory`` holds from its start to the start of the next step; its sequences (those
still running, and those that finished in it) from its start to its end, and in the gap that follows, those still
running.

**kv** is in fractions of the pool, but ``used_of_reserved`` (``used`` is ``written`` in both)::

    used_of_pool     = written / pool
    used_of_reserved = written / reserved; its mean is the ratio of the two means over time
    written + to_write + internal_waste = reserved

**forks**: branches that started from their parent's blocks (not those that queued as ordinary sequences), and the bytes that
copies of blocks moved for them, by copy on write or, where an allocator cannot share, of the whole prompt.
"""

from __future__ import annotations

from array import array
from operator import sub
from typing import Any

import numpy as np

from core.scratch import STAGES
from core.service import Service
from core.types import Finished, MemoryReport, StepReport

PREEMPTION_KINDS = ("swap", "recompute", "turned", "forced")
KV_TOKENS = ("written", "to_write", "internal_waste", "external_waste", "shared", "cached")
OUTCOME = {"stop": "finished", "length": "finished", "error": "failed", "refused": "refused", "abort": "aborted"}
"""What a request's finish reason counts as."""


class Series:
    """Values whose mean and percentiles are wanted: all of them, or past ``max_kept`` every second, fourth ... one.

    Count and total stay exact, so the mean does too. Percentiles are exact up to ``max_kept`` values (8 MiB) and then
    those of a systematic sample of at least half that many: the same for the same run, which a random sample would not
    be.
    """

    __slots__ = ("count", "total", "max_kept", "_kept", "_stride")

    def __init__(self, max_kept: int = 2**20):
        self.count = 0
        self.total = 0.0
        self.max_kept = max_kept
        self._kept = array("d")
        self._stride = 1

    def add(self, value: float) -> None:
        """Take one value."""
        if not self.count % self._stride:
            self._kept.append(value)
            if len(self._kept) > self.max_kept:
                self._thin()
        self.count += 1
        self.total += value

    def extend(self, values: list[float]) -> None:
        """Take values in order."""
        self._kept.extend(values[-self.count % self._stride :: self._stride] if self._stride > 1 else values)
        self.count += len(values)
        self.total += sum(values)
        while len(self._kept) > self.max_kept:
            self._thin()

    def _thin(self) -> None:
        self._kept = self._kept[::2]
        self._stride *= 2

    def spread(self) -> dict[str, float | None]:
        """mean, p50, p90 and p99 in the values' unit; all None without values."""
        if not self.count:
            return {"mean": None, "p50": None, "p90": None, "p99": None}
        kept = np.frombuffer(self._kept.tobytes())  # bytes: another thread may be adding
        p50, p90, p99 = np.percentile(kept, (50, 90, 99), method="linear").tolist()
        return {"mean": self.total / self.count, "p50": p50, "p90": p90, "p99": p99}


class Metrics:
    """Running sums over the steps of one engine. ``update`` is for the engine's thread, ``summary`` for any."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, as after warm-up. Sequences in flight keep their own times and count when they finish."""
        self.requests = {"finished": 0, "failed": 0, "refused": 0, "aborted": 0}
        self.preemptions = dict.fromkeys(PREEMPTION_KINDS, 0)
        self.stage_seconds = dict.fromkeys(STAGES, 0.0)
        self.steps = 0
        self.output_tokens = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.forked_branches = 0
        self.copied_bytes = 0
        self.ttft, self.scheduling, self.queueing, self.prefill = Series(), Series(), Series(), Series()
        self.tpot, self.itl, self.e2e = Series(), Series(), Series()
        self.service = Service(Series)
        self._start_s: float | None = None  # start of the first step that computed something
        self._step_s = 0.0  # start of the newest step
        self._end_s = 0.0  # end of the newest step
        self._running = 0  # sequences after the newest step
        self._running_peak = 0
        self._running_seconds = 0.0
        self._kv = _KvSums()

    def count_refused(self, num_requests: int, service_class: str = "", client_id: str = "") -> None:
        """Count requests that ``Engine.submit`` refused; those that admission refused are in the step's report."""
        self.requests["refused"] += num_requests
        self.service.count_refused(num_requests, service_class, client_id)

    def update(self, report: StepReport) -> None:
        """Take one step. Cost: a few microseconds, and about two for each sequence that finished in it."""
        self.prefix_query_tokens += report.prefix_query_tokens
        self.prefix_hit_tokens += report.prefix_hit_tokens
        self.forked_branches += report.num_forked
        if report.memory is not None:
            self.copied_bytes += report.memory.copied_bytes
        totals = self.stage_seconds
        for stage, seconds in report.stage_seconds.items():
            totals[stage] += seconds
        for preempted in report.preempted:
            self.preemptions[preempted.kind] += 1
        for request in report.refused:
            self.count_refused(1, request.service_class, request.client_id)
        failed = False
        for finished in report.finished:
            self._finish(finished)
            failed = failed or finished.finish_reason == "error"
        # a sample that failed delivers nothing, so then the outputs are counted one by one
        self.output_tokens += sum(len(o.token_ids) for o in report.outputs) if failed else report.num_sampled
        if report.num_tokens:
            self.steps += 1
        if self._start_s is not None:
            self._running_seconds += self._running * (report.started_s - self._end_s)
            self._kv.hold(report.started_s - self._step_s)
        elif report.num_tokens:
            self._start_s = report.started_s
        else:
            return  # nothing has been computed yet: time has not begun
        self._advance(report)

    def _advance(self, report: StepReport) -> None:
        in_step = report.num_running
        if report.num_tokens:
            for finished in report.finished:
                in_step += finished.finish_reason in ("stop", "length", "error")
        if in_step > self._running_peak:
            self._running_peak = in_step
        self._running_seconds += in_step * (report.ended_s - report.started_s)
        self._running = report.num_running
        self._step_s = report.started_s
        self._end_s = report.ended_s
        self._kv.see(report.memory)

    def _finish(self, finished: Finished) -> None:
        outcome = OUTCOME[finished.finish_reason]
        if finished.branch == 0:
            self.requests[outcome] += 1
        times = finished.token_times_s
        scheduled = finished.first_scheduled_s
        self.service.add(finished, outcome)
        if outcome != "finished" or scheduled is None:
            return
        first, last, arrival = times[0], times[-1], finished.arrival_s
        self.ttft.add(first - arrival)
        self.e2e.add(last - arrival)
        self.scheduling.add(finished.first_seen_s - arrival)
        self.queueing.add(scheduled - finished.first_seen_s)
        self.prefill.add(first - scheduled)
        if len(times) > 1:
            self.tpot.add((last - first) / (len(times) - 1))
            self.itl.extend(list(map(sub, times[1:], times)))

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the first step that computed something to the end of the newest step."""
        return 0.0 if self._start_s is None else self._end_s - self._start_s

    def summary(self) -> dict[str, Any]:
        """The measured part of ``result.json``. A figure that no value stands behind is None, never NaN."""
        seconds = self.duration_s
        return {
            "requests": dict(self.requests),
            "steps": self.steps,
            "duration_s": seconds,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": _ratio(self.output_tokens, seconds),
            "ttft_s": self.ttft.spread(),
            "ttft_terms_s": {
                "scheduling": self.scheduling.spread(),
                "queueing": self.queueing.spread(),
                "prefill": self.prefill.spread(),
            },
            "tpot_s": self.tpot.spread(),
            "itl_s": self.itl.spread(),
            "e2e_s": self.e2e.spread(),
            "service": self.service.summary(seconds),
            "concurrency": {
                "mean": _ratio(self._running_seconds, seconds),
                "peak": self._running_peak if self._start_s is not None else None,
            },
            "kv": self._kv.summary(self._end_s - self._step_s),
            "preemptions": dict(self.preemptions),
            "prefix": {"query_tokens": self.prefix_query_tokens, "hit_tokens": self.prefix_hit_tokens},
            "forks": {
                "branches": self.forked_branches,
                "copied_bytes": self.copied_bytes,
                "copied_bytes_per_branch": _ratio(self.copied_bytes, self.forked_branches),
            },
            "stage_seconds": dict(self.stage_seconds),
        }


class _KvSums:
    """Token-seconds and peaks of a pool's parts, over the time in which a ``MemoryReport`` was there."""

    def __init__(self) -> None:
        self.pool = 0
        self.seconds = 0.0
        self.last: MemoryReport | None = None
        self.reserved = 0.0  # token-seconds
        self.sums = [0.0] * len(KV_TOKENS)  # token-seconds
        self.peaks = [0] * len(KV_TOKENS)  # tokens
        self.used_of_reserved_peak: float | None = None

    def hold(self, seconds: float) -> None:
        """The newest report was true for this long."""
        memory = self.last
        if memory is None:
            return
        self.seconds += seconds
        self.reserved += seconds * memory.reserved
        self.sums = [total + seconds * tokens for total, tokens in zip(self.sums, _tokens(memory), strict=True)]

    def see(self, memory: MemoryReport | None) -> None:
        """A step's report; None where the engine made none: that time is left out of the means."""
        self.last = memory
        if memory is None:
            return
        self.pool = memory.pool
        self.peaks = list(map(max, self.peaks, _tokens(memory)))
        if memory.reserved:
            used = memory.written / memory.reserved
            if self.used_of_reserved_peak is None or used > self.used_of_reserved_peak:
                self.used_of_reserved_peak = used

    def summary(self, tail_seconds: float) -> dict[str, dict[str, float | None]]:
        """Mean over time and peak of each part; the newest report held for ``tail_seconds`` that are not summed yet."""
        memory, sums, reserved, seconds = self.last, self.sums, self.reserved, self.seconds
        if memory is not None:
            sums = [total + tail_seconds * tokens for total, tokens in zip(sums, _tokens(memory), strict=True)]
            reserved, seconds = reserved + tail_seconds * memory.reserved, seconds + tail_seconds
        parts = {
            name: {"mean": _ratio(total, seconds * self.pool), "peak": _ratio(peak, self.pool)}
            for name, total, peak in zip(KV_TOKENS, sums, self.peaks, strict=True)
        }
        used_of_reserved = {"mean": _ratio(sums[0], reserved), "peak": self.used_of_reserved_peak}
        return {"used_of_pool": dict(parts["written"]), "used_of_reserved": used_of_reserved, **parts}


def _tokens(memory: MemoryReport) -> tuple[int, ...]:
    """A report's figures in the order of ``KV_TOKENS``."""
    return (
        memory.written,
        memory.to_write,
        memory.internal_waste,
        memory.external_waste,
        memory.shared,
        memory.cached,
    )


def _ratio(value: float, of: float) -> float | None:
    return value / of if of else None
