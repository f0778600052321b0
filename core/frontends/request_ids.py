"""``X-Request-Id``: a client's own comes back, any other answer gets one. It is a label for logs and nothing acts on it."""

from __future__ import annotations

import re
import uuid
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = b"x-request-id"
_GOOD = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Wraps an application. A client's id that is long or strange is replaced, not repeated."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call; plain pass-through but for the header of the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER and _GOOD.fullmatch(value)), None)

        async def labelled(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                own = next((value for name, value in headers if name == HEADER), None)
                label = given or own or uuid.uuid4().hex.encode()
                message["headers"] = [(name, value) for name, value in headers if name != HEADER] + [(HEADER, label)]
            await send(message)

        await self._app(scope, receive, labelled)
