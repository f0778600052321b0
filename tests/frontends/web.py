"""A plain HTTP client for the tests of the server, and what the scripted toy model should answer."""

from __future__ import annotations

import http.client
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.frontends.toys import Server

TEXT = "Hello 🙂 wörld, 你好! "
COMPLETION: dict[str, Any] = {"model": "toy", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


class Reply:
    """One HTTP answer, read to its end."""

    def __init__(self, server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        data = body if body is None or isinstance(body, (bytes, Iterator)) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} if headers is None else headers
        connection.request(method, path, body=data, headers=sent, encode_chunked=isinstance(body, Iterator))
        answer = connection.getresponse()
        self.status, self.headers, self.data = answer.status, answer.headers, answer.read()
        connection.close()

    def json(self) -> Any:
        return json.loads(self.data)

    def error(self) -> dict[str, Any]:
        """OpenAI's error shape, nothing more."""
        data = self.json()
        assert set(data) == {"error"}
        assert set(data["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in data["error"]["message"]
        return data["error"]

    def events(self) -> list[Any]:
        """Server-sent events; the last must be [DONE]."""
        parts = self.data.decode().split("\n\n")
        assert parts.pop() == ""
        assert parts.pop() == "data: [DONE]"
        assert all(part.startswith("data: ") and "\n" not in part for part in parts)
        return [json.loads(part.removeprefix("data: ")) for part in parts]


def post(server: Server, path: str, body: Any, **fields: Any) -> Reply:
    return Reply(server, "POST", path, {**body, **fields} if isinstance(body, dict) else body)


def spelled(num_tokens: int) -> str:
    script = TEXT.encode()
    return (script * (num_tokens // len(script) + 1))[:num_tokens].decode(errors="replace")


def counters(server: Server) -> dict[str, float]:
    lines = [line for line in Reply(server, "GET", "/metrics").data.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


class Caller:
    """A POST in a thread of its own."""

    def __init__(self, server: Server, body: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any):
        self._reply: list[Reply] = []
        asked = {**body, **fields}
        self._thread = threading.Thread(
            target=lambda: self._reply.append(Reply(server, "POST", "/v1/completions", asked, headers))
        )
        self._thread.start()

    def reply(self) -> Reply:
        self._thread.join(20)
        return self._reply[0]


def request_bytes(body: dict[str, Any]) -> bytes:
    """A completion request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(data)}\r\n\r\n".encode() + data


def own_certificate(folder: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that nobody else signed, and its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *subject]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
