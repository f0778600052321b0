"""An answer as server-sent events, and work that ends when its client leaves or does not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.frontends.answers import Answer, error_events
from core.frontends.fields import ApiError
from core.frontends.loop import Stream

log = logging.getLogger(__name__)

HANG_UP = "quire.hang_up"
"""The extension of a scope that drops its connection."""

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


class EventStream(Response):
    """Server-sent events for one answer; one write a step. Ends its stream however it is left."""

    def __init__(
        self, stream: Stream, answer: Answer, check: Callable[[Any], None], write_timeout_s: float | None = None
    ):
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-request-id": answer.id}
        )
        del self.headers["content-length"]
        self._stream = stream
        self._answer = answer
        self._check = check
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer ends or the client leaves."""
        with self._stream:
            try:
                await unless_gone(receive, self._send(send))
            except ClientGone:
                log.debug("%s: the client left", self._answer.id)
            except TimeoutError:
                log.info("%s: the client did not read for %s s", self._answer.id, self._write_timeout_s)
                await hang_up(scope)

    async def _send(self, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            if not data and more:
                return
            async with asyncio.timeout(self._write_timeout_s):  # what is written waits for the client to read
                await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await write(self._answer.opening())
            async for outputs in self._stream:
                good, error = self._good(outputs)
                await write(self._answer.events([(self._stream.choice(output), output) for output in good]))
                if error is not None:
                    raise error
            await write(self._answer.closing(), more=False)
        except ApiError as error:
            await write(error_events(error), more=False)

    def _good(self, outputs: Sequence[Any]) -> tuple[Sequence[Any], ApiError | None]:
        """Those before the first that carries an error, and that error: what was made in time is not lost."""
        for number, output in enumerate(outputs):
            try:
                self._check(output)
            except ApiError as error:
                return outputs[:number], error
        return outputs, None


async def hang_up(scope: Scope) -> None:
    """Drop the connection with whatever the client has not read: an orderly close would wait for it."""
    abort = scope.get("extensions", {}).get(HANG_UP)
    if abort is not None:  # another server than ours closes it by itself
        abort()
        await asyncio.sleep(0)  # the server hears of it before this answer is over


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled as soon as the client leaves (``ClientGone``)."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
