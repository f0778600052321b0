"""Who may ask: API keys, allowed origins, certificates; and the cache namespace that belongs to a key.

Keys are kept as SHA-256 and compared in constant time, each time with all of them. Every route needs one but those under ``/health``.
What a key's requests leave in the prefix cache is found by that key alone: how fast an answer comes tells nobody what others asked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.frontends.fields import ApiError
from core.types import ConfigError

HASHED = "sha256:"
"""What a key begins with that is given as its SHA-256 in 64 hexadecimal digits."""
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 1024
_CACHE_OF = "quire.cache_of"  # in a scope: the namespace of the key that was given
_ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
    (b"access-control-max-age", b"600"),
]
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after, retry-after-ms")


class Keys:
    """The keys that are let in; with none at all everybody is.

    ``listed`` and the lines of ``file`` (empty lines and those that begin with # apart) are keys as they are sent, or
    ``sha256:`` and their hash. ``ConfigError`` names the place of a bad one, never the key.
    """

    def __init__(self, listed: Sequence[str] = (), file: str | None = None):
        named = [(f"frontend.api_keys[{index}]", key) for index, key in enumerate(listed)]
        if file is not None:
            named += _lines(file)
            if not named:
                raise ConfigError(f"frontend.api_keys_file={file} has no keys: that would let everybody in")
        self._hashes = [_hash_of(key, where) for where, key in named]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def accepts(self, key: str) -> str | None:
        """The hash of a key that is let in, in hexadecimal digits; None for any other."""
        given = _sha256(key)
        found = [hmac.compare_digest(given, known) for known in self._hashes]  # all of them, whichever it is
        return given if any(found) else None


def client_of(scope: Scope) -> str:
    """Who asks, for schedulers that share between clients: a name that belongs to the key of a request; "" without keys."""
    return scope.get(_CACHE_OF, "")


def salted(scope: Scope, salt: str) -> str:
    """The cache namespace of a request: its own salt, within what belongs to the key that it was sent with."""
    owner = scope.get(_CACHE_OF)
    if owner is None:
        return salt
    return f"{owner}:{_sha256(salt)}" if salt else owner


class Access:
    """Wraps an application: refuses what comes without a good key, and says to browsers which origins may read answers."""

    def __init__(self, app: ASGIApp, keys: Keys, origins: Sequence[str] = ()):
        self._app = app
        self._keys = keys
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and self._origins:
            send = _labelled(send, origin if origin in self._origins else None)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(send, origin in self._origins)
                return
        if self._keys and not _is_health(scope["path"]):
            owner = self._keys.accepts(_bearer(headers))
            if owner is None:
                await _refuse(send, given="authorization" in headers)
                return
            scope[_CACHE_OF] = owner[:32]
        await self._app(scope, receive, send)


def _is_health(path: str) -> bool:
    return path == "/health" or path.startswith("/health/")


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _refuse(send: Send, given: bool) -> None:
    what = "the API key is not one of this server's" if given else "an API key is needed: Authorization: Bearer KEY"
    error = ApiError(401, what, code="invalid_api_key")
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
        (b"connection", b"close"),  # the body, which nobody reads, may still be coming
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _preflight(send: Send, allowed: bool) -> None:
    headers = [*(_PREFLIGHT if allowed else ()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200 if allowed else 403, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _labelled(send: Send, origin: str | None) -> Send:
    async def labelled(message: Message) -> None:
        if message["type"] == "http.response.start":
            allowed = [] if origin is None else [(b"access-control-allow-origin", origin.encode("latin-1")), _EXPOSED]
            message = {**message, "headers": [*message["headers"], *allowed, (b"vary", b"Origin")]}
        await send(message)

    return labelled


# ------------------------------------------------------------------------------------------------ options


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _lines(file: str) -> list[tuple[str, str]]:
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"frontend.api_keys_file={file} cannot be read: {reason}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    return [(f"frontend.api_keys_file, line {number}", line) for number, line in numbered if line and line[0] != "#"]


def _hash_of(key: str, where: str) -> str:
    if key.startswith(HASHED):
        digest = key.removeprefix(HASHED).lower()
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ConfigError(f"{where}: after {HASHED} must come 64 hexadecimal digits")
        return digest
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{where}: a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable characters without spaces")
    return _sha256(key)


def check_origins(_: Any, field: Any, value: Sequence[str]) -> None:
    """A validator: whole origins, as browsers send them. No pattern and no ``*``: every page could read the answers."""
    for origin in value:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{field.name} must be a list of origins such as https://example.org, got {origin!r}")


def check_tls(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """A context of both files, None without; ``ConfigError`` unless both or neither are given and they fit together."""
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ConfigError("frontend.tls_certfile and frontend.tls_keyfile are given together or not at all")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or getattr(error, "reason", None) or "unreadable"
        raise ConfigError(
            f"frontend.tls_certfile={certfile} frontend.tls_keyfile={keyfile} cannot be used: {reason}"
        ) from error
    return context
