"""``frontend=replay``: serves a workload from beginning to end and gives the record of the run.

Open loop (requests that have an arrival time): a request is submitted when it is due and counts from the moment it was
due, also when the engine was busy then, so a slow engine cannot hide its queue. Closed loop (requests without):
``workload.concurrency`` are kept in flight, and one counts from the moment it is sent. Time is the executor's: with a
virtual clock nothing sleeps, and the same run gives the same record.

A request may be followed by another of its session (``WorkloadRequest.then``), due so many seconds after it finished. A
session that waits for its next request counts as one in flight, so ``workload.concurrency`` bounds the open sessions.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from core.results import table
from core.types import ConfigError, PolicyError, RequestError, StepReport
from core.workloads import Workload, WorkloadRequest

if TYPE_CHECKING:
    from core.engine import Engine

log = logging.getLogger(__name__)

PLAIN_SECONDS = 10.0
"""Time between two progress lines where there is no terminal."""
MAX_EMPTY_STEPS = 100
"""Steps in a row that compute nothing and name no time to wait for, before the run is given up."""


class Started(Protocol):
    """What ``run`` needs of a started engine."""

    engine: Engine
    manifest: dict[str, Any]


def _at_least_0(instance: object, attribute: attrs.Attribute, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"frontend.{attribute.name} must be an integer of at least 0, got {value!r}")


@attrs.define(eq=False)
class ReplayFrontend:
    """Serve ``workload`` once. ``warmup_requests`` of it are served first and left out of the figures."""

    workload: Workload
    progress: bool = True
    warmup_requests: int = attrs.field(default=0, validator=_at_least_0)

    def run(self, started: Started) -> dict[str, Any]:
        """Serve everything, print the table, give the record: ``status`` first, the measured figures, ``manifest``
        last.

        ``status`` is ``ok``, also when single requests were refused or failed (they are counted); ``aborted`` after
        Ctrl-C, with what was measured so far; ``failed``, with ``error``, when the engine stopped or no request was
        served. Does not close the engine.
        """
        engine = started.engine
        if hasattr(self.workload, "use_tokenizer"):
            self.workload.use_tokenizer(engine.tokenizer)
        requests = iter(self.workload.requests(engine.model.vocab_size, engine.limits.max_model_len))
        status, error = "ok", None
        shown = Shown(self.progress, getattr(self.workload, "num_requests", None), self.warmup_requests)
        replay = _Replay(engine, self.workload.concurrency, shown)
        try:
            with shown, replay.interruptible():
                if self.warmup_requests:
                    replay.serve(_take(requests, self.warmup_requests), paced=False)
                    replay.reset()
                replay.serve(requests)
        except KeyboardInterrupt:
            status = "aborted"
            replay.cut_off()
        except PolicyError as failure:
            log.exception("the engine stopped")
            status, error = "failed", str(failure)
            engine.metrics.requests["failed"] += replay.num_open
        except ConfigError as failure:  # a bad row of a file: what was measured before it is not lost
            if not engine.metrics.requests["finished"]:
                raise
            status, error = "failed", str(failure)
            replay.cut_off()
        summary = engine.metrics.summary()
        replay.leave()
        if status == "ok" and not summary["requests"]["finished"]:
            status, error = "failed", f"no request was served: {replay.first_error or 'the workload is empty'}"
        elif replay.first_error:
            log.warning("not all requests were served; the first: %s", replay.first_error)
        if hasattr(engine.executor, "simulated"):
            summary["simulated_s"] = engine.executor.simulated()  # virtual seconds by phase, warm-up included
        skipped = getattr(self.workload, "skipped", None)
        manifest = {**started.manifest, **({"workload_skipped": dict(skipped)} if skipped else {})}
        record = {"status": status, **({"error": error} if error else {}), **summary, "manifest": manifest}
        shown.table(record)
        return record


class _Replay:
    """One workload on one engine: what is due, what is in flight."""

    def __init__(self, engine: Engine, concurrency: int | None, shown: Shown):
        self.engine = engine
        self.concurrency = concurrency
        self.shown = shown
        self.first_error: str | None = None
        self._open: dict[int, int] = {}  # request id -> branches that have not ended
        self._sessions: dict[
            int, tuple[WorkloadRequest, list[int]]
        ] = {}  # request id -> it and branch 0's tokens so far
        self._later: list[tuple[float, int, WorkloadRequest]] = []  # heap of (due, order, request) that follow another
        self._order = itertools.count()
        self._empty_steps = 0
        self._stopping = self._waiting = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C ends the run between two steps, so that the engine stays whole; a second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to the main thread
            return
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, *_: object) -> None:
        if self._waiting or self._stopping:
            raise KeyboardInterrupt
        self._stopping = True

    def reset(self) -> None:
        """The end of warm-up: figures start here."""
        self.engine.metrics.reset()
        self.first_error = None
        self.shown.restart()

    def serve(self, requests: Iterator[WorkloadRequest], paced: bool = True) -> None:
        """Submit each request when it is due and step until all have ended; ``paced=False`` ignores arrival times."""
        executor = self.engine.executor
        next_one = next(requests, None)
        zero_s = executor.now()
        if next_one is not None:
            zero_s -= next_one.arrival_s or 0.0  # the requests before it were warm-up
        while next_one is not None or self._later or self.engine.has_work():
            self._submit_followers(paced)
            due_s = None
            while next_one is not None:
                arrives = next_one.arrival_s if paced else None
                due_s = None if arrives is None else zero_s + arrives
                if (due_s is not None and due_s > executor.now()) or (due_s is None and not self._has_room()):
                    break
                self._submit(next_one, due_s)
                next_one = next(requests, None)
            coming = [due_s] if next_one is not None and due_s is not None else []
            coming += [self._later[0][0]] if self._later else []
            self._advance(min(coming, default=None))

    def _submit_followers(self, paced: bool) -> None:
        """Next requests of sessions whose time has come; ``paced=False`` does not wait for it."""
        while self._later and (not paced or self._later[0][0] <= self.engine.executor.now()):
            due_s, _, request = heapq.heappop(self._later)
            self._submit(request, due_s if paced else None)

    def _has_room(self) -> bool:
        return self.concurrency is None or len(self._open) + len(self._later) < self.concurrency

    def _submit(self, request: WorkloadRequest, due_s: float | None) -> None:
        arrival_s = self.engine.executor.now() if due_s is None else due_s
        try:
            id = self.engine.submit(
                request.prompt_token_ids,
                request.params,
                arrival_s=arrival_s,
                priority=request.priority,
                client_id=request.client_id,
                session_id=request.session_id,
                cache_salt=request.cache_salt,
                service_class=request.service_class,
                tpot_s=request.tpot_s,
                stall_s=request.stall_s,
                deadline_s=None if request.deadline_s is None else arrival_s + request.deadline_s,
                recorded_output_tokens=request.recorded_output_tokens,
                label=request.label,
            )
        except RequestError as error:
            self.engine.metrics.count_refused(1, request.service_class, request.client_id)
            self.first_error = self.first_error or f"refused: {error}"
            self.shown.ended()
        else:
            self._open[id] = request.params.n
            if request.then is not None:
                self._sessions[id] = (request, [])

    def _advance(self, due_s: float | None) -> None:
        """One step; if it had nothing to do, wait for the next request or for the time the scheduler named."""
        engine = self.engine
        if self._stopping:
            raise KeyboardInterrupt
        if not engine.has_work():
            self._open.clear()  # whatever was left ended without a word for each branch
            self._sessions.clear()
            if due_s is not None:
                self._wait(due_s)
            return
        report = engine.step()
        self._note(report)
        if not report.idle:
            self._empty_steps = 0
            return
        wait_until = min((t for t in (due_s, report.wait_until) if t is not None), default=None)
        if wait_until is not None and wait_until > engine.executor.now():
            self._wait(wait_until)
        elif not report.outputs:
            self._empty_steps += 1
            if self._empty_steps >= MAX_EMPTY_STEPS:
                raise PolicyError(f"{MAX_EMPTY_STEPS} steps in a row computed nothing; engine: {engine.stats()}")

    def _wait(self, until_s: float) -> None:
        self._waiting = True  # nothing is half done: Ctrl-C need not wait
        try:
            self.engine.executor.wait_until(until_s)
        finally:
            self._waiting = False

    def _note(self, report: StepReport) -> None:
        if self._sessions:  # else no row is made that only has a token
            for output in report.outputs:
                if output.branch == 0 and output.request_id in self._sessions:
                    self._sessions[output.request_id][1].extend(output.token_ids)
        for output in report.outputs.ended:
            if output.error:
                self.first_error = self.first_error or f"{output.finish_reason}: {output.error}"
            left = self._open.get(output.request_id, 1) - 1
            if left <= 0 or output.finish_reason == "refused":
                self._open.pop(output.request_id, None)
                self._follow(output.request_id, output.finish_reason in ("stop", "length"), report.ended_s)
                self.shown.ended()
            else:
                self._open[output.request_id] = left
        self.shown.tokens(report.num_sampled)

    def _follow(self, request_id: int, served: bool, ended_s: float) -> None:
        """A request has ended: put the next one of its session in line."""
        request, tokens = self._sessions.pop(request_id, (None, []))
        if request is None or request.then is None or not served:
            return
        following = request.then(tuple(tokens))
        if following is not None:
            delay_s, next_one = following
            heapq.heappush(self._later, (ended_s + delay_s, next(self._order), next_one))

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._open)

    def leave(self) -> None:
        """The run is over and no session comes back: what the engine keeps for them is given back, after the figures were taken."""
        if self.engine.failure is None and self.engine.stats()["idle_sessions"]:
            self.engine.end_sessions()
            self.engine.step()

    def cut_off(self) -> None:
        """Abort what is in flight, so that the engine ends empty and every request is counted."""
        for id in self._open:
            self.engine.abort(id)
        if self.engine.failure is None and self.engine.has_work():
            self.engine.step()  # intake ends them all
        else:
            self.engine.metrics.requests["aborted"] += self.num_open
        self._open.clear()
        self._sessions.clear()
        self._later.clear()


def _take(requests: Iterator[WorkloadRequest], num: int) -> Iterator[WorkloadRequest]:
    for _, request in zip(range(num), requests, strict=False):  # range first: zip must not take one too many
        yield request


class Shown:
    """What the screen shows: a bar on a terminal, else a plain line now and then (on stderr); at the end a table."""

    def __init__(self, on: bool, total: int | None, num_warmup: int):
        self.on = on
        self.console = Console(stderr=True)
        self._total = None if total is None else max(0, total - num_warmup)
        self._num_ended = self._num_tokens = 0
        self._started = self._last = time.monotonic()
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Shown:
        if self.on and self.console.is_terminal:
            said = TextColumn("requests, {task.fields[tokens]} tokens,")
            columns = (TextColumn("serving"), BarColumn(bar_width=20), MofNCompleteColumn(), said, TimeElapsedColumn())
            # refreshed by hand: a thread would take time from the run it shows
            self._bar = Progress(*columns, console=self.console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task("", total=self._total, tokens=0)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def restart(self) -> None:
        """Count from 0: warm-up is over."""
        self._num_ended = self._num_tokens = 0

    def ended(self) -> None:
        self._num_ended += 1

    def tokens(self, num: int) -> None:
        """Tokens of one step; shows the state when it is time to."""
        self._num_tokens += num
        if not self.on:
            return
        now = time.monotonic()
        if now - self._last < (0.2 if self._bar is not None else PLAIN_SECONDS):
            return
        self._last = now
        if self._bar is not None:
            self._bar.update(self._task, completed=self._num_ended, tokens=self._num_tokens, refresh=True)
        else:
            of = "" if self._total is None else f" of {self._total}"
            text = f"{now - self._started:.0f} s: {self._num_ended}{of} requests ended, {self._num_tokens} tokens"
            self.console.print(text, highlight=False)

    def table(self, record: dict[str, Any]) -> None:
        """The figures, on stdout."""
        Console().print(table(record), highlight=False)
