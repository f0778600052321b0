"""``frontend=http``: an OpenAI-compatible server over one engine.

``check`` takes the port before the model loads, so that a second server on a port fails at once, and has it answer that the model
loads; ``run`` serves until a signal.

* First SIGTERM or SIGINT: new requests get 503, open ones finish within ``grace_s``, what is left ends with an error event, exit 0.
* Second: everything ends now.
* Keys, origins and TLS: core/frontends/access.py. Time-outs are seconds, null is none.
* An engine that fails ends every open stream with an error event, turns ``/health`` to 503 and ends the server; ``run`` raises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import uvicorn
import uvloop

from core.accounting import memory_report
from core.frontends.access import Access, Keys, check_origins, check_tls
from core.frontends.app import Api
from core.frontends.connection import Connection
from core.frontends.lobby import Lobby
from core.frontends.loop import EngineLoop
from core.frontends.prometheus import ServerMetrics
from core.frontends.request_ids import RequestIds
from core.types import ConfigError

if TYPE_CHECKING:
    from core.engine import Engine

log = logging.getLogger(__name__)

_BACKLOG = 2048  # connections that may wait to be accepted
_LINGER_S = 1.0  # how long /health says why, after the engine stopped
_FLUSH_S = 2.0  # how long clients may take to read what was written for them at the end
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _whole(low: int, high: int) -> Callable[[Any, Any, Any], None]:
    def check(_: Any, field: Any, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{field.name} must be a whole number from {low} to {high}, got {value!r}")

    return check


_seconds: Any = attrs.validators.optional(attrs.validators.and_(attrs.validators.gt(0), attrs.validators.lt(1e9)))


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _path() -> Any:
    return attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.instance_of(str)))


def _names(_: Any, field: Any, value: Any) -> None:
    if not all(isinstance(name, str) and name for name in value):
        raise ValueError(f"{field.name} must be a list of names, got {value!r}")


@attrs.define(eq=False)
class HttpFrontend:
    """The HTTP server. ``port=0`` takes a free one, which is printed. ``served_model_name=null`` is the model's own name.

    ``aliases`` are further names of it; with ``accept_any_model`` every name is. ``max_queue`` is what the root's ``auto`` means here.
    """

    max_queue: ClassVar[int] = 256
    host: str = attrs.field(default="127.0.0.1", validator=attrs.validators.instance_of(str))
    port: int = attrs.field(default=8000, validator=_whole(0, 65535))
    served_model_name: str | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(
            attrs.validators.and_(attrs.validators.instance_of(str), attrs.validators.min_len(1))
        ),
    )
    aliases: list[str] = attrs.field(factory=list, converter=list, validator=_names)
    accept_any_model: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    max_body_bytes: int = attrs.field(default=4_000_000, validator=_whole(1024, 2**31))
    grace_s: float = attrs.field(
        default=30.0, converter=float, validator=[attrs.validators.ge(0), attrs.validators.lt(1e9)]
    )
    queue_timeout_s: float | None = attrs.field(default=None, converter=_float, validator=_seconds)
    request_timeout_s: float | None = attrs.field(default=None, converter=_float, validator=_seconds)
    client_timeout_s: float | None = attrs.field(default=60.0, converter=_float, validator=_seconds)
    step_timeout_s: float | None = attrs.field(default=120.0, converter=_float, validator=_seconds)
    api_keys: list[str] = attrs.field(factory=list, converter=list, validator=_names)
    api_keys_file: str | None = _path()
    hide_cached_tokens: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    cors_origins: list[str] = attrs.field(factory=list, converter=list, validator=[_names, check_origins])
    tls_certfile: str | None = _path()
    tls_keyfile: str | None = _path()
    address: str | None = attrs.field(default=None, init=False)
    ready: threading.Event = attrs.field(factory=threading.Event, init=False)  # set while requests are taken
    _socket: socket.socket | None = attrs.field(default=None, init=False)
    _session: _Session | None = attrs.field(default=None, init=False)
    _keys: Keys = attrs.field(default=None, init=False)
    _lobby: Lobby | None = attrs.field(default=None, init=False)

    def check(self) -> None:
        """Read keys and certificates and take the port, before anything expensive; ``ConfigError`` if they cannot be had.

        May be called twice.
        """
        if self._socket is None:
            self._keys = Keys(self.api_keys, self.api_keys_file)
            tls = check_tls(self.tls_certfile, self.tls_keyfile)
            self._socket = _bind(self.host, self.port)
            host = f"[{self.host}]" if ":" in self.host else self.host
            scheme = "https" if self.tls_certfile else "http"
            self.address = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
            self._listen()
            self._lobby = Lobby(self._socket, tls)

    def run(self, started: Any) -> None:
        """Serve ``started.engine`` until a signal or ``shutdown``; raises what stopped the engine."""
        self.check()
        try:
            self._close_lobby()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(started.engine))
        finally:
            self._close()

    def shutdown(self) -> None:
        """What a signal does, from any thread, once ``run`` has begun: the first call drains, a second one cuts."""
        session = self._session
        if session is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has closed: it is down already
                session.aio.call_soon_threadsafe(session.on_signal)

    def _listen(self) -> None:
        """Here and not in the event loop, which keeps it to itself when another server was faster between bind and listen."""
        assert self._socket is not None
        try:
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._close()
            raise ConfigError(_cannot_listen(self.host, self.port, error)) from error

    def _close_lobby(self) -> None:
        if self._lobby is not None:
            self._lobby.close()
            self._lobby = None

    def _close(self) -> None:
        self.ready.clear()
        self._close_lobby()
        self._session = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _serve(self, engine: Engine) -> None:
        assert self._socket is not None
        name = self.served_model_name or engine.model.name
        metrics = ServerMetrics(
            name,
            engine.limits.max_model_len,
            engine.stats,
            lambda: engine.metrics.service,
            list(engine.edge.levels.classes),
            held=lambda: memory_report(engine.state, 0),
        )
        loop = EngineLoop(
            engine,
            on_step=metrics.on_step,
            queue_timeout_s=self.queue_timeout_s,
            request_timeout_s=self.request_timeout_s,
            step_timeout_s=self.step_timeout_s,
        )
        api = Api(
            loop,
            metrics,
            model_names=[name, *self.aliases],
            accept_any_model=self.accept_any_model,
            max_body_bytes=self.max_body_bytes,
            hide_cached_tokens=self.hide_cached_tokens,
            client_timeout_s=self.client_timeout_s,
        )
        config = uvicorn.Config(
            RequestIds(Access(api.app(), self._keys, self.cors_origins)),
            ssl_certfile=self.tls_certfile,
            ssl_keyfile=self.tls_keyfile,
            http=partial(Connection, client_timeout_s=self.client_timeout_s),  # type: ignore[arg-type]
            ws="none",
            backlog=_BACKLOG,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_S,  # type: ignore[arg-type]
        )
        server = _Server(config, banner=f"serving {name} on {self.address}", ready=self.ready)
        self._session = _Session(loop, server, self.grace_s)
        await self._session.serve(self._socket)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handling, which kills streams where ours lets them end."""

    def __init__(self, config: uvicorn.Config, banner: str, ready: threading.Event):
        super().__init__(config)
        self._banner = banner
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, then say so."""
        await super().startup(sockets)
        print(self._banner, flush=True)
        self._ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to ``_Session``."""
        yield


class _Session:
    """One run of the server: from the first request to the last, and how it ends."""

    def __init__(self, loop: EngineLoop, server: _Server, grace_s: float):
        self.aio = asyncio.get_running_loop()
        self._loop = loop
        self._server = server
        self._grace_s = grace_s
        self._asked = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until a signal or until the engine fails, which is raised."""
        with self._signals():
            self._loop.start()
            ending = asyncio.create_task(self._end())
            try:
                await self._server.serve(sockets=[listener])
            finally:
                ending.cancel()
                if not await self._loop.stop(timeout_s=1.0 if self._server.force_exit else 10.0):
                    log.warning("the engine's last step has not ended; leaving it behind")
        if self._loop.failure is not None:
            raise self._loop.failure

    def on_signal(self) -> None:
        """The first one drains, the second one cuts, a third one does what it does to any program."""
        if not self._asked.is_set():
            self._asked.set()
            return
        self._loop.cut()
        self._server.config.timeout_graceful_shutdown = 0.2  # type: ignore[assignment]
        self._server.should_exit = True
        self.aio.call_later(0.2, setattr, self._server, "force_exit", True)
        self._remove_signals()

    async def _end(self) -> None:
        asked = asyncio.create_task(self._asked.wait())
        failed = asyncio.create_task(self._loop.failed.wait())
        await asyncio.wait((asked, failed), return_when=asyncio.FIRST_COMPLETED)
        if self._loop.failure is not None:
            await asyncio.sleep(_LINGER_S)
        else:
            draining = asyncio.create_task(self._loop.drain(self._grace_s))
            await asyncio.wait((draining, failed), return_when=asyncio.FIRST_COMPLETED)
        self._server.should_exit = True

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signal handlers while serving; only the main thread may have them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in _SIGNALS:
            self.aio.add_signal_handler(number, self.on_signal)
        try:
            yield
        finally:
            self._remove_signals()

    def _remove_signals(self) -> None:
        for number in _SIGNALS:
            with contextlib.suppress(RuntimeError, ValueError):  # not the main thread: there were none
                self.aio.remove_signal_handler(number)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"frontend.host={host} is not an address of this machine: {error.strerror or error}"
        ) from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(_cannot_listen(host, port, error)) from error
    sock.setblocking(False)
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    return f"cannot listen on frontend.host={host} frontend.port={port}: {error.strerror or error}"
