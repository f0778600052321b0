"""What a port answers while the model loads: /health/live 200, anything else 503 with the time to come back.

A thread of its own, one connection at a time, each for a moment: whoever asks is a probe or comes back.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import threading
import time

from core.frontends.fields import ApiError

_CONNECTION_S = 0.5  # longest time for one connection
_LOOK_S = 0.05  # how often to see whether it is over
_MAX_HEAD_BYTES = 8192
LOADING = "the model is being loaded"


class Lobby:
    """Answers on a listening, non-blocking socket until ``close``, which leaves the socket as it is."""

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None = None):
        self._listener, self._tls = listener, tls
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lobby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; who has not been answered yet is left to the server. May be called twice."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            if not select.select([self._listener], [], [], _LOOK_S)[0]:
                continue
            with contextlib.suppress(
                OSError
            ):  # gone again before it was accepted, or while it was served: theirs to repeat
                connection, _ = self._listener.accept()
                connection.settimeout(_CONNECTION_S)
                with self._tls.wrap_socket(connection, server_side=True) if self._tls else connection as connection:
                    connection.sendall(_answer(_request(connection)))


def _request(connection: socket.socket) -> bytes:
    """Its head. The body is read too and thrown away: closed with something unread, the answer could be lost."""
    until = time.monotonic() + _CONNECTION_S
    data = b""
    while b"\r\n\r\n" not in data and len(data) < _MAX_HEAD_BYTES and time.monotonic() < until:
        part = connection.recv(4096)
        if not part:
            break
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d{1,9})", head)
    left = int(length[1]) - len(body) if length else 0
    while left > 0 and time.monotonic() < until:
        part = connection.recv(65_536)
        if not part:
            break
        left -= len(part)
    return head


def _answer(head: bytes) -> bytes:
    words = head.split(b" ", 2)
    if len(words) > 1 and words[0] == b"GET" and words[1].partition(b"?")[0] == b"/health/live":
        status, body, more = b"200 OK", b'{"status":"ok"}', b""
    else:
        error = ApiError(503, LOADING, code="loading")
        status, body, more = b"503 Service Unavailable", error.body(), b"retry-after: 1\r\n"
    start = b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return start + more + b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
