"""The routes: HTTP in, ``EngineLoop`` in the middle, HTTP out. Plain ASGI, no middleware that buffers.

Errors are OpenAI's shape on every route. Long prompts are parsed and tokenised in a thread, so they do not hold up the streams. A
client that leaves, at any point, ends its generation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import core
from core.frontends.access import client_of, salted
from core.frontends.answers import Answer, ChatAnswer, CompletionAnswer, model_card, model_list, refuse_bad
from core.frontends.loop import SHUTTING_DOWN, EngineLoop, EngineUnavailable, Stream, public_reason
from core.frontends.openapi import document
from core.frontends.prepare import Asked, as_sent, detokenized, prepare, tokenized
from core.frontends.prometheus import CONTENT_TYPE, ServerMetrics
from core.frontends.protocol import ApiError, read_chat, read_completion, read_detokenize, read_tokenize
from core.frontends.streaming import ClientGone, EventStream, unless_gone
from core.text import TextError
from core.types import QueueFull, RequestError, Structure

log = logging.getLogger(__name__)

ANY_MODEL = "default"
"""A model name that every server answers to."""

COMPILE_SECONDS = 10.0
"""Longest wait for a grammar. What compiles it counts its own work too (core/structure.py), so no thread is left behind."""

MAX_COMPILING = 2
MAX_HELD_BODIES = 64
"""Bodies of the largest size that may be held at once, received in part or not yet understood; beyond it 503."""

_SMALL = 8192
"""Bytes of a body that is parsed and tokenised where it arrives, numbers of an answer that is written there: a thread would cost more."""


class Api:
    """The OpenAI-compatible routes over one engine."""

    def __init__(
        self,
        loop: EngineLoop,
        metrics: ServerMetrics,
        *,
        model_names: Sequence[str],
        max_body_bytes: int,
        accept_any_model: bool = False,
        hide_cached_tokens: bool = False,
        client_timeout_s: float | None = None,
    ):
        self._loop = loop
        self._metrics = metrics
        self._names = list(dict.fromkeys(model_names))  # the first is the one that answers carry
        self._any = accept_any_model
        self._max_body_bytes = max_body_bytes
        self._hide_cached_tokens = hide_cached_tokens
        self._client_timeout_s = client_timeout_s
        self._created = int(time.time())
        self._compiling = asyncio.Semaphore(MAX_COMPILING)
        self._compilers = ThreadPoolExecutor(
            MAX_COMPILING, "compile"
        )  # of their own: one that was given up still takes its thread
        self._held_bytes = 0  # of bodies
        self._document = orjson.dumps(document(core.__version__, loop.engine.model.vocab_size))

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/health", self.ready),
            Route("/health/ready", self.ready),
            Route("/health/live", self.live),
            Route("/version", self.version),
            Route("/load", self.load),
            Route("/openapi.json", self.openapi),
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
        return _json(model_list([self._card(name) for name in self._names]))

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        name = request.path_params["name"]
        self._check_model(name)
        return _json(self._card(name))

    async def live(self, _: Request) -> Response:
        """``GET /health/live``: 200 while the process can work, also while it drains; 503 once its engine stopped or hangs."""
        if self._loop.failure is None and not self._loop.hung:
            return _json({"status": "ok"})
        raise self._unavailable()

    async def version(self, _: Request) -> Response:
        """``GET /version``."""
        return _json({"version": core.__version__})

    async def load(self, _: Request) -> Response:
        """``GET /load``: requests that are being served or wait, each prompt counted."""
        return _json({"server_load": self._loop.num_open})

    async def openapi(self, _: Request) -> Response:
        """``GET /openapi.json``: what this file serves, made from the same classes."""
        return _json_bytes(self._document)

    async def ready(self, _: Request) -> Response:
        """``GET /health/ready``, ``GET /health``: 200 while requests are taken, 503 with the reason once they are not."""
        if self._loop.healthy:
            return _json({"status": "ok"})
        raise self._unavailable()

    def _unavailable(self) -> ApiError:
        loop = self._loop
        code = "engine_stopped" if loop.failure is not None else "engine_hangs" if loop.hung else "shutting_down"
        return ApiError(503, loop.reason or SHUTTING_DOWN, code=code)

    async def reset_prefix_cache(self, _: Request) -> Response:
        """``POST /reset_prefix_cache``: no request sent after the answer is served from prompts cached before.

        Allowed at any time: running requests keep the blocks they hold. 400 when the allocator caches nothing.
        """
        try:
            self._loop.reset_cache()
        except RequestError as error:
            raise ApiError(400, str(error)) from error
        except EngineUnavailable as error:
            raise ApiError(503, str(error)) from error
        return _json({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics`` for Prometheus."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._generate(request, read_completion, CompletionAnswer)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._generate(request, read_chat, ChatAnswer)

    async def _generate(self, http: Request, read: Callable[[bytes], Any], shape: type[Answer]) -> Response:
        try:
            async with self._body(http) as body:
                asked = await _near_or_far(len(body), self._understand, body, read)
            if asked.params.structure is not None:
                await unless_gone(http.receive, self._compile(asked.params.structure))
            asked.labels["cache_salt"] = salted(http.scope, asked.labels["cache_salt"])
            stream = self._loop.submit(asked.prompts, asked.params, client_id=client_of(http.scope), **asked.labels)
        except QueueFull as error:
            raise ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s) from error
        except RequestError as error:
            raise as_sent(error, asked.request) from error
        except EngineUnavailable as error:
            raise ApiError(503, str(error)) from error
        try:
            answer = shape(self._names[0], asked, self._loop.engine.tokenizer)
            answer.shows_cached = not self._hide_cached_tokens
            if not asked.request.stream:
                with stream:
                    return _json_bytes(await unless_gone(http.receive, self._collect(stream, answer)), answer.id)
            for output in await unless_gone(http.receive, stream.admitted()):
                self._refuse_bad(output)
            return EventStream(stream, answer, self._refuse_bad, self._client_timeout_s)
        except BaseException:
            stream.close()
            raise

    async def _compile(self, structure: Structure) -> None:
        """Compile a grammar beside the event loop; the engine then finds it in its cache."""
        grammars = self._loop.engine.edge.grammars
        try:
            async with self._compiling:
                compiling = asyncio.get_running_loop().run_in_executor(self._compilers, grammars.compile, structure)
                await asyncio.wait_for(compiling, COMPILE_SECONDS)
        except TimeoutError as error:
            message = f"{structure.kind} took more than {COMPILE_SECONDS} s to compile"
            raise RequestError(message, structure.kind) from error

    async def _collect(self, stream: Stream, answer: Answer) -> bytes:
        async for outputs in stream:
            for output in outputs:
                self._refuse_bad(output)
                answer.add(stream.choice(output), output)
        return await _near_or_far(answer.num_shown, answer.whole)

    def _understand(self, body: bytes, read: Callable[[bytes], Any]) -> Asked:
        """Parse, tokenise and check."""
        request = read(body)
        self._check_model(request.model)
        engine = self._loop.engine
        try:
            return prepare(request, engine.tokenizer, engine.model, engine.limits)
        except RequestError as error:
            raise as_sent(error, request) from error

    async def tokenize(self, http: Request) -> Response:
        """``POST /tokenize``: vLLM's."""
        async with self._body(http) as body:
            return _json_bytes(await _near_or_far(len(body), self._tokenize, body))

    async def detokenize(self, http: Request) -> Response:
        """``POST /detokenize``: vLLM's."""
        async with self._body(http) as body:
            return _json_bytes(await _near_or_far(len(body), self._detokenize, body))

    def _tokenize(self, body: bytes) -> bytes:
        request = read_tokenize(body)
        if request.model is not None:
            self._check_model(request.model)
        engine = self._loop.engine
        try:
            return tokenized(request, engine.tokenizer, engine.limits.max_model_len)
        except TextError as error:
            param = "prompt" if request.messages is None else "messages"
            raise ApiError(400, public_reason(str(error)), param=param) from error

    def _detokenize(self, body: bytes) -> bytes:
        request = read_detokenize(body)
        if request.model is not None:
            self._check_model(request.model)
        return detokenized(request, self._loop.engine.tokenizer, self._loop.engine.model.vocab_size)

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, held until it is understood: all that are held together have a bound too."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type must be application/json, got {repr(kind[:80]) if kind else 'none'}")
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise ApiError(415, f"Content-Encoding must be identity or left out, got {encoding[:80]!r}")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            await self._receive(request, body)
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(self._client_timeout_s):
                async for part in request.stream():
                    body += part
                    self._held_bytes += len(part)
                    if len(body) > self._max_body_bytes:
                        raise self._too_large()
                    if self._held_bytes > MAX_HELD_BODIES * self._max_body_bytes:
                        raise ApiError(
                            503, "too many large requests are being received; try again in 1 s", code="overloaded"
                        )
        except TimeoutError as error:
            message = f"the body did not arrive within {self._client_timeout_s:g} s (frontend.client_timeout_s)"
            raise ApiError(408, message) from error
        except ClientDisconnect as error:
            raise ClientGone from error

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes (frontend.max_body_bytes)")

    def _check_model(self, name: str) -> None:
        if name != ANY_MODEL and name not in self._names and not self._any:
            shown = name if len(name) <= 80 else name[:77] + "..."
            served = ", ".join(dict.fromkeys([*self._names[:8], ANY_MODEL]))
            message = f"the model {shown!r} is not served here; allowed: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _card(self, name: str) -> dict[str, Any]:
        return model_card(name, self._created, self._loop.engine.limits.max_model_len)

    def _refuse_bad(self, output: Any) -> None:
        refuse_bad(output, engine_stopped=self._loop.failure is not None)


async def _near_or_far(size: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args) if size <= _SMALL else await asyncio.to_thread(function, *args)


# ------------------------------------------------------------------------------------------------ answers


def _json(data: Any) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


def _json_bytes(body: bytes, request_id: str | None = None) -> Response:
    return Response(body, media_type="application/json", headers={"x-request-id": request_id} if request_id else None)


def _error(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    return Response(
        error.body(), error.status, headers={**error.headers, **(headers or {})}, media_type="application/json"
    )


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method[:16], request.scope["path"][:200]  # request.url would read the Host header too
    headers = dict(error.headers or {})
    near = [route.path for route in request.app.routes if route.path in (f"/v1{path}", path.rstrip("/"))]
    hint = f" (did you mean {near[0]}?)" if near else ""
    messages = {
        404: f"there is no route {path}{hint}; GET /openapi.json has them all",
        405: f"the route {path} does not take {method}; allowed: {headers.get('Allow', '')}",
    }
    return _error(ApiError(error.status_code, messages.get(error.status_code, str(error.detail))), headers)


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the number is what proxies log for this


async def _on_bug(_: Request, error: Exception) -> Response:
    log.error("a request failed inside the server: %s", type(error).__name__)
    return _error(ApiError(500, "internal error (see the server's log)"))
