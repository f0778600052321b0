"""The routes: HTTP in, ``EngineLoop`` in the middle, HTTP out. Plain ASGI, no middleware that buffers.

Errors are OpenAI's shape on every route. Long prompts are parsed and tokenised in a thread, so they do not hold up the streams. A
client that leaves, at any point, ends its generation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from core.frontends.answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    error_events,
    model_card,
    model_list,
    refuse_bad,
)
from core.frontends.loop import SHUTTING_DOWN, EngineLoop, EngineUnavailable, Stream, public_reason
from core.frontends.prometheus import CONTENT_TYPE, ServerMetrics
from core.frontends.protocol import ApiError, ChatRequest, CompletionRequest, read_chat, read_completion
from core.params import check_request
from core.text import TextError
from core.types import RequestError

log = logging.getLogger(__name__)

ANY_MODEL = "default"
"""A model name that every server answers to."""

_SMALL_BYTES = 8192  # bodies up to this are parsed and tokenised where they arrive: a thread would cost more

Generation = CompletionRequest | ChatRequest
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


class Api:
    """The OpenAI-compatible routes over one engine."""

    def __init__(self, loop: EngineLoop, metrics: ServerMetrics, *, model_name: str, max_body_bytes: int):
        self._loop = loop
        self._metrics = metrics
        self._model_name = model_name
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={
                ApiError: _on_api_error,
                HTTPException: _on_http_error,
                ClientGone: _on_gone,
                Exception: _on_bug,
            },
        )
        app.router.redirect_slashes = False
        return app

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``."""
        return _json(model_list([self._card(self._model_name)]))

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        name = request.path_params["name"]
        self._check_model(name)
        return _json(self._card(name))

    async def health(self, _: Request) -> Response:
        """``GET /health``: 200 while requests are served, 503 with the reason once they are not."""
        if self._loop.healthy:
            return _json({"status": "ok"})
        reason = self._loop.reason or SHUTTING_DOWN
        raise ApiError(503, reason, code="shutting_down" if self._loop.failure is None else "engine_stopped")

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics`` for Prometheus."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._generate(request, read_completion, CompletionAnswer)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._generate(request, read_chat, ChatAnswer)

    async def _generate(self, http: Request, read: Callable[[bytes], Generation], shape: type[Answer]) -> Response:
        body = await self._body(http)
        try:
            request, prompts = await _near_or_far(len(body), self._understand, body, read)
            stream = self._loop.submit(prompts, request.params())
        except RequestError as error:
            names = {"prompt": "messages"} if shape is ChatAnswer else {}
            raise ApiError(400, str(error), param=names.get(error.param or "", error.param)) from error
        except EngineUnavailable as error:
            raise ApiError(503, str(error)) from error
        answer = shape(self._model_name, sum(map(len, prompts)), len(prompts), request.include_usage)
        try:
            if not request.stream:
                with stream:
                    return _json_bytes(await _unless_gone(http.receive, self._collect(stream, answer)), answer.id)
            for output in await _unless_gone(http.receive, stream.admitted()):
                self._refuse_bad(output)
            return EventStream(stream, answer, self._refuse_bad)
        except BaseException:
            stream.close()
            raise

    async def _collect(self, stream: Stream, answer: Answer) -> bytes:
        async for outputs in stream:
            for output in outputs:
                self._refuse_bad(output)
                answer.add(stream.choice(output), output)
        return answer.whole()

    def _understand(self, body: bytes, read: Callable[[bytes], Generation]) -> tuple[Generation, list[list[int]]]:
        """Parse, tokenise and check. Runs in a thread for large bodies, so it touches nothing that changes."""
        request = read(body)
        self._check_model(request.model)
        engine = self._loop.engine
        tokenizer = engine.tokenizer
        try:
            if isinstance(request, ChatRequest):
                text = tokenizer.chat([message.rendered() for message in request.messages])
                prompts = [tokenizer.encode(text, add_special_tokens=False)]
            else:
                prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]
        except TextError as error:
            raise RequestError(public_reason(str(error)), "prompt") from error
        for prompt in prompts:  # ``submit`` checks again, on the event loop: by then a prompt is at most max_model_len
            check_request(prompt, request.params(), engine.model, engine.limits)
        return request, prompts

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type must be application/json, got {kind[:80] or 'none'!r}")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > self._max_body_bytes:
                    raise self._too_large()
        except ClientDisconnect as error:
            raise ClientGone from error
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes (frontend.max_body_bytes)")

    def _check_model(self, name: str) -> None:
        if name not in (self._model_name, ANY_MODEL):
            shown = name if len(name) <= 80 else name[:77] + "..."
            raise ApiError(404, f"the model {shown!r} is not served here", param="model", code="model_not_found")

    def _card(self, name: str) -> dict[str, Any]:
        return model_card(name, self._created, self._loop.engine.limits.max_model_len)

    def _refuse_bad(self, output: Any) -> None:
        refuse_bad(output, engine_stopped=self._loop.failure is not None)


class EventStream(Response):
    """Server-sent events for one answer; one write a step. Ends its stream however it is left."""

    def __init__(self, stream: Stream, answer: Answer, check: Callable[[Any], None]):
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-request-id": answer.id}
        )
        del self.headers["content-length"]
        self._stream = stream
        self._answer = answer
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer ends or the client leaves."""
        with self._stream:
            try:
                await _unless_gone(receive, self._send(send))
            except ClientGone:
                log.debug("%s: the client left", self._answer.id)

    async def _send(self, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await write(self._answer.opening())
            async for outputs in self._stream:
                for output in outputs:
                    self._check(output)
                await write(self._answer.events([(self._stream.choice(output), output) for output in outputs]))
            await write(self._answer.closing(), more=False)
        except ApiError as error:
            await write(error_events(error), more=False)


async def _near_or_far(size: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args) if size <= _SMALL_BYTES else await asyncio.to_thread(function, *args)


async def _unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
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


# ------------------------------------------------------------------------------------------------ answers


def _json(data: Any) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


def _json_bytes(body: bytes, request_id: str) -> Response:
    return Response(body, media_type="application/json", headers={"x-request-id": request_id})


def _error(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    return Response(
        error.body(), error.status, headers={**error.headers, **(headers or {})}, media_type="application/json"
    )


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method[:16]} {request.url.path[:200]}"
    messages = {404: f"there is no route {where}", 405: f"the route does not take {where}"}
    return _error(
        ApiError(error.status_code, messages.get(error.status_code, str(error.detail))), dict(error.headers or {})
    )


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the number is what proxies log for this


async def _on_bug(_: Request, error: Exception) -> Response:
    log.error("a request failed inside the server: %s", type(error).__name__)
    return _error(ApiError(500, "internal error (see the server's log)"))
