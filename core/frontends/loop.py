"""One thread owns the engine; asyncio talks to it through mailboxes.

The engine thread steps while there is work and sleeps on a condition when there is none. What a step produced crosses to the
event loop in one call, however many streams are open. Everything about mailboxes happens on the event loop, so they need no lock.

A mailbox is bounded by what its requests may produce: a reader that falls behind gets its outputs merged, and the engine never waits
for it. Time-outs end requests that wait or run too long. A step that does not end is seen from outside (``hung``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from core.frontends.mailbox import Stream
from core.types import Output, QuireError, SamplingParams, StepReport

if TYPE_CHECKING:
    from core.engine import Engine

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"
WAITED_TOO_LONG = "the request waited longer than"
RAN_TOO_LONG = "the request took longer than"
_SLICE_S = 0.05  # longest real sleep before looking whether a waiting executor's clock moves by itself


class EngineUnavailable(QuireError):
    """The engine takes no requests: it stopped, or it is being shut down. The message is the reason."""


def public_reason(text: str) -> str:
    """One line that may be shown to a client: no folders, no memory addresses, no traceback."""
    lines = text.strip().splitlines()
    line = re.sub(r"(?<![\w.:/])(?:/[\w.@+~-]+){2,}", "<path>", lines[0] if lines else "no reason given")
    return re.sub(r"0x[0-9a-fA-F]{6,}", "<address>", line)


class EngineLoop:
    """Runs an engine in its own thread. All methods but the thread's own are for the event loop that called ``start``.

    ``queue_timeout_s`` bounds the wait for the first computation of a request, ``request_timeout_s`` the whole of it,
    ``step_timeout_s`` is how long a step may take before the engine counts as hung. Seconds; None: no bound.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepReport], None] | None = None,
        *,
        queue_timeout_s: float | None = None,
        request_timeout_s: float | None = None,
        step_timeout_s: float | None = None,
    ):
        self.engine = engine
        self._queue_timeout_s, self._request_timeout_s = queue_timeout_s, request_timeout_s
        self._step_timeout_s = step_timeout_s
        self._step_began: float | None = None  # while a step runs, on time.monotonic
        self._said_hung = False
        self.failure: BaseException | None = None  # what stopped the engine
        self.failed = asyncio.Event()
        self._on_step = on_step
        self._streams: dict[int, Stream] = {}
        self._unadmitted: deque[tuple[int, Stream]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refuse: str | None = None  # why new requests are refused
        self._tickets = 0  # submissions that the engine has been given
        self._wake = threading.Condition()
        self._stop_at: float | None = None
        self._aio: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # -------------------------------------------------------------------------------------------- for the event loop

    @property
    def healthy(self) -> bool:
        """Whether a request sent now would be served."""
        return self._refuse is None and self.failure is None and not self.hung

    @property
    def hung(self) -> bool:
        """Whether the step that runs has taken longer than a step may. It may still end, and then all is well again."""
        began = self._step_began
        if self._step_timeout_s is None or began is None:
            return False
        return time.monotonic() - began > self._step_timeout_s

    @property
    def reason(self) -> str | None:
        """Why not ``healthy``, in one line that may be shown."""
        if self.failure is None:
            if self._refuse is None and self.hung:
                return f"the engine hangs: its step has not ended within {self._step_timeout_s:g} s"
            return self._refuse
        if isinstance(self.failure, QuireError):
            return f"the engine stopped: {public_reason(str(self.failure))}"
        return f"the engine stopped: {type(self.failure).__name__} (see the server's log)"

    @property
    def num_open(self) -> int:
        """Requests that have a mailbox."""
        return len(self._streams)

    def start(self) -> None:
        """Start the engine thread; from now on the running event loop is the one that is served."""
        self._aio = asyncio.get_running_loop()
        self._thread.start()
        if self._step_timeout_s is not None:
            self._aio.call_later(self._step_timeout_s / 2, self._watch, self._step_timeout_s / 2)

    def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams, **labels: Any) -> Stream:
        """Send prompts to the engine; all of them or none.

        Raises ``RequestError`` for a request that cannot be served as asked, ``QueueFull`` (one of those) when too many wait,
        ``EngineUnavailable`` when nothing is served.
        """
        if not self.healthy:
            raise EngineUnavailable(self.reason or SHUTTING_DOWN)
        stream = Stream(self, params.n)
        try:
            for prompt in prompts:
                request_id = self.engine.submit(prompt, params, **labels)
                stream.ids.append(request_id)
                stream._open[request_id] = params.n
                self._streams[request_id] = stream
                self._tickets += 1
        except BaseException:
            stream.close()
            raise
        self._unadmitted.append((self._tickets, stream))
        self._idle.clear()
        self._set_timers(stream)
        self._notify()
        return stream

    def _set_timers(self, stream: Stream) -> None:
        for seconds, check in (
            (self._queue_timeout_s, self._end_waiting),
            (self._request_timeout_s, self._end_running),
        ):
            if seconds is not None:
                stream._timers.append(asyncio.get_running_loop().call_later(seconds, check, stream))

    def _end_waiting(self, stream: Stream) -> None:
        """Time-out: requests that no step has computed anything of."""
        message = f"{WAITED_TOO_LONG} {self._queue_timeout_s:g} s in the queue"
        for request_id in list(stream._open):
            if not self.engine.has_started(request_id, unknown=stream._admitted):
                self._cut(request_id, stream, message)

    def _end_running(self, stream: Stream) -> None:
        for request_id in list(stream._open):
            self._cut(request_id, stream, f"{RAN_TOO_LONG} {self._request_timeout_s:g} s")

    def _cut(self, request_id: int, stream: Stream, message: str) -> None:
        stream._end(request_id, _last_output(request_id, "abort", message))
        self.abort(request_id)

    def reset_cache(self) -> None:
        """Forget all cached prompt blocks before any request that is submitted after this call."""
        if not self.healthy:
            raise EngineUnavailable(self.reason or SHUTTING_DOWN)
        self.engine.reset_cache()
        self._notify()

    def abort(self, request_id: int) -> None:
        """End a request without an answer; unknown and finished ids are ignored."""
        stream = self._forget(request_id)
        if stream is None:
            return
        stream._end(request_id, None)
        if self.failure is None:
            self.engine.abort(request_id)
            self._notify()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let the open ones finish within the grace, then cut those that are left."""
        self._refuse = SHUTTING_DOWN
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        self.cut()

    def cut(self) -> None:
        """Refuse new requests and end every open one now; its consumer gets an output with finish_reason "abort"."""
        self._refuse = SHUTTING_DOWN
        for request_id, stream in list(self._streams.items()):
            self._cut(request_id, stream, SHUTTING_DOWN)

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Cut everything and end the thread; False if a step is still running after the timeout."""
        self.cut()
        with self._wake:
            self._stop_at = time.monotonic() + timeout_s / 2
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _forget(self, request_id: int) -> Stream | None:
        stream = self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()
        return stream

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _deliver(self, outputs: Sequence[Output], tickets: int) -> None:
        """What one step produced; ``tickets`` submissions had reached the engine when it began."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream._put(output):
                self._forget(output.request_id)
        while self._unadmitted and self._unadmitted[0][0] <= tickets:
            stream = self._unadmitted.popleft()[1]
            stream._admitted = True
            stream._changed.set()

    def _watch(self, period_s: float) -> None:
        """Say once that a step hangs, and where: nobody else can tell."""
        assert self._aio is not None
        if self.hung and not self._said_hung:
            frame = sys._current_frames().get(self._thread.ident or 0)
            log.error("%s\n%s", self.reason, "".join(traceback.format_stack(frame)))
        self._said_hung = self.hung
        if self._thread.is_alive():
            self._aio.call_later(period_s, self._watch, period_s)

    def _fail(self) -> None:
        message = self.reason
        for request_id, stream in list(self._streams.items()):
            stream._end(request_id, _last_output(request_id, "error", message))
            self._forget(request_id)
        self._unadmitted.clear()
        self.failed.set()

    # -------------------------------------------------------------------------------------------- the engine's thread

    def _main(self) -> None:
        told = 0
        try:
            while self._wait_for_work():
                tickets = self._tickets
                self._step_began = time.monotonic()
                report = self.engine.step()
                self._step_began = None
                if self._on_step is not None:
                    self._on_step(report)
                if report.outputs or tickets != told:
                    self._post(self._deliver, report.outputs, tickets)
                    told = tickets
                if report.idle and report.wait_until is not None:
                    self._pause(report.wait_until)
        except BaseException as error:  # whatever it was, the engine cannot go on, and nobody may wait for it in vain
            log.error("the engine stopped: %s", error, exc_info=not isinstance(error, QuireError))
            self.failure, self._step_began = error, None
            self._post(self._fail)

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; False when the thread should end."""
        with self._wake:
            while not self.engine.has_work():
                if self._stop_at is not None:
                    return False
                self._wake.wait()
        return self._stop_at is None or time.monotonic() < self._stop_at

    def _pause(self, until: float) -> None:
        """Wait for the executor's clock, ended early by a submit, an abort or a stop. A virtual clock is moved instead."""
        executor = self.engine.executor
        before = executor.now()
        with self._wake:
            while before < until and self._stop_at is None:
                if self._wake.wait(min(until - before, _SLICE_S)):
                    return
                now = executor.now()
                if now <= before:  # a clock that stands still is a virtual one
                    executor.wait_until(until)
                    return
                before = now

    def _post(self, function: Callable[..., None], *args: object) -> None:
        assert self._aio is not None
        try:
            self._aio.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed: nobody is left to tell
            log.debug("a step's outputs came after the event loop had closed")


def _last_output(request_id: int, reason: Any, message: str | None) -> Output:
    return Output(request_id, -1, 0, (), "", finish_reason=reason, error=message)
