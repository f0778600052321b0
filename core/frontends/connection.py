"""A connection: uvicorn's HTTP/1.1 with an end to everything that a client may send or leave unread, and errors in OpenAI's shape.

* A head has a size (431) and a time, and so have the trailers of a chunked body, which are thrown away.
* What a client has not read of an answer, or still sends after it, has a time.
* Bytes that are no HTTP get 400 as JSON. Where an answer is under way the connection is dropped instead: it could not be told apart.
* Requests may be sent ahead on one connection, ``MAX_AHEAD`` of them.
* ``Upgrade`` is ignored, as a server may. The parser would take the body behind it for another protocol and lose it.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from core.frontends.fields import ApiError
from core.frontends.streaming import HANG_UP

MAX_HEAD_BYTES = 65_536
"""Of a request line and headers, checked as they come."""
MAX_AHEAD = 16
"""Requests that may wait on a connection for the answer to the one before."""
HEAD_TIMEOUT_S = 30.0
"""How long a connection may take from its beginning, or a request from its first byte, until its headers are complete."""
LINGER_S = 1.0
"""How long a refused connection stays open, unheard: closed at once, with something unread, its answer would be lost."""


class Connection(HttpToolsProtocol):
    """One connection. ``client_timeout_s`` bounds how long it may be held after an answer by a body or by what is not read."""

    def __init__(self, *args: Any, client_timeout_s: float | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._client_timeout_s = client_timeout_s
        self._head_bytes: int | None = 0  # received of a head that is not complete; None: it is, and its body comes
        self._trailer_bytes = 0  # received of a body since a part of it ended
        self._body_moves = False
        self._deaf = False  # refused: what comes is thrown away
        self._upgrading = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------------------- what comes

    def connection_made(self, transport: Any) -> None:
        """A connection on which no head comes is given up."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone: nothing is waited for."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse what is no HTTP or has no end."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        self._body_moves = False
        self._feed(data)
        if self._head_bytes is None and not self._deaf:
            self._trailer_bytes = 0 if self._body_moves else self._trailer_bytes + len(data)
            if self._trailer_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, f"what follows a chunked body is larger than {MAX_HEAD_BYTES} bytes"))
        elif self._head_bytes and not self._deaf:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"))
            elif self._head_timer is None:  # empty lines, which begin no request
                self._wait_for_head()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not isinstance(cause, ApiError):
                cause = ApiError(400, f"this is no HTTP/1.1 request: {error}", code="invalid_http")
            self._refuse(cause)

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """The same request once more without its wish, with what has come behind its head."""
        self._upgrading = False
        kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in kept)
        line = self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(line + b"\r\n" + head + b"\r\n" + rest)

    # -------------------------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        """What an application needs to drop a connection whose client does not read."""
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self.transport.abort}  # type: ignore[dict-item]
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        """The body has limits of its own."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrading = True
            return
        if len(self.pipeline) >= MAX_AHEAD:
            raise ApiError(
                400, f"more than {MAX_AHEAD} requests were sent ahead on one connection", code="invalid_http"
            )
        self._head_bytes, self._trailer_bytes = None, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the head; what comes behind a chunked body is thrown away."""
        if self._head_bytes is not None:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        """Another part of a chunked body."""
        self._body_moves = True

    def on_body(self, body: bytes) -> None:
        """Of a request that was begun."""
        self._body_moves = True
        if not self._upgrading:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next is another head."""
        if not self._upgrading:
            self._head_bytes = 0
            super().on_message_complete()

    # -------------------------------------------------------------------------------------------- ends

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._no_head)

    def _no_head(self) -> None:
        self._head_timer = None
        if self._answering:  # the next request may take as long as this one
            self._wait_for_head()
        elif self._head_bytes is not None:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """An answer was handed over; the client may still be sending, or not be reading."""
        super().on_response_complete()
        self._watch(-1)

    def _watch(self, unread_before: int) -> None:
        """Look again after ``client_timeout_s``, and drop a client that got no further."""
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        unread = self.transport.get_write_buffer_size()
        sending = self._head_bytes is None and not self._answering
        if unread_before >= 0 and (sending or (unread and unread == unread_before)):
            self.transport.abort()
        elif self._client_timeout_s is not None and (sending or unread):
            self._end_timer = self.loop.call_later(self._client_timeout_s, self._watch, unread)

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._end_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._end_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Say what is wrong and hear nothing more. What belongs to the connection's other requests ends with it."""
        self._deaf = True
        self._stop_timers()
        if self._answering:
            if self.cycle.response_started or self.pipeline or self._head_bytes is not None:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = error.body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", uuid.uuid4().hex.encode()),
        ]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._end_timer = self.loop.call_later(LINGER_S, self.transport.abort)
