"""What the engine gave a request and its reader has not taken yet. Everything here happens on the event loop.

It holds no more than its requests may produce: outputs that a slow reader leaves are merged, one for each branch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from core.types import Output

if TYPE_CHECKING:
    from core.frontends.loop import EngineLoop

MERGE_AT = 1024
"""Unread outputs of one choice after which they become one: a reader may fall behind by any number of steps."""


class Stream:
    """The outputs of one or more requests with the same parameters, for one consumer on the event loop.

    Iterate it for lists of ``Output``, each with what came since the last. Leave it through ``with`` (or ``close``): a consumer
    that leaves early aborts what is still running.
    """

    def __init__(self, loop: EngineLoop, num_branches: int):
        self.ids: list[int] = []
        self._loop = loop
        self._num_branches = num_branches
        self._open: dict[int, int] = {}  # request id -> branches that have not finished
        self._ready: list[Output] = []
        self._admitted = False
        self._changed = asyncio.Event()
        self._merge_at = MERGE_AT
        self._timers: list[asyncio.TimerHandle] = []

    def choice(self, output: Output) -> int:
        """Index of an output among the choices: by prompt, then by branch."""
        return self.ids.index(output.request_id) * self._num_branches + output.branch

    async def admitted(self) -> Sequence[Output]:
        """Wait until the engine took the requests in, or answered; gives what is there so far without taking it."""
        while not self._admitted and not self._ready and self._open:
            await self._wait()
        return self._ready

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        while not self._ready:
            if not self._open:
                raise StopAsyncIteration
            await self._wait()
        ready, self._ready = self._ready, []
        return ready

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave: unfinished requests are aborted. May be called twice."""
        for request_id in list(self._open):
            self._loop.abort(request_id)

    def _put(self, output: Output) -> bool:
        """Take one output; True when its request is over."""
        self._ready.append(output)
        self._changed.set()
        if len(self._ready) >= self._merge_at:
            self._ready = merged(self._ready)
            self._merge_at = len(self._ready) + MERGE_AT * self._num_branches
        if output.finish_reason is None:
            return False
        left = self._open[output.request_id] - 1
        if left > 0 and output.finish_reason != "refused":
            self._open[output.request_id] = left
            return False
        del self._open[output.request_id]
        self._quiet()
        return True

    def _quiet(self) -> None:
        """No time-out is needed once everything has ended."""
        if not self._open:
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()

    def _end(self, request_id: int, output: Output | None) -> None:
        """Forget a request that gets no more outputs, after this one if any."""
        if self._open.pop(request_id, None) is not None and output is not None:
            self._ready.append(output)
        self._quiet()
        self._changed.set()


def merged(outputs: Sequence[Output]) -> list[Output]:
    """The same text and tokens with one output for each branch of each request, in the order in which they began."""
    together: dict[tuple[int, int], list[Output]] = {}
    for output in outputs:
        together.setdefault((output.request_id, output.branch), []).append(output)
    return [_joined(group) for group in together.values()]


def _joined(outputs: list[Output]) -> Output:
    if len(outputs) == 1:
        return outputs[0]
    scores = next((output.prompt_logprobs for output in outputs if output.prompt_logprobs), ())
    return outputs[-1]._replace(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        logprobs=tuple(one for output in outputs for one in output.logprobs),
        prompt_logprobs=scores,
        num_cached_tokens=max(output.num_cached_tokens for output in outputs),
    )
