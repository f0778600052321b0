"""Every status that the OpenAPI document promises of an operation is really given by it, in the documented shape, with its headers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from typing import Any

import jsonschema_rs
import pytest

from core.frontends.http import HttpFrontend
from core.frontends.openapi import document
from plugins.allocators.prefix import PrefixAllocator
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import CHAT, COMPLETION, Caller, Reply, wait_for

KEY = "a-key-of-the-tests"
DOCUMENT = document("x", 320)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": {"model": "toy", "prompt": "hi"},
    "/detokenize": {"model": "toy", "tokens": [104]},
}
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
}
PROMISES = [(name, int(status)) for name, operation in OPERATIONS.items() for status in operation["responses"]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One request runs at a time; a key; little patience."""
    engine = toy_engine(delay_s=0.002, max_num_seqs=1, allocator=PrefixAllocator(), break_at=13)
    with serving(engine, api_keys=[KEY], client_timeout_s=0.3, request_timeout_s=0.4) as running:
        yield running


def send(server: Any, name: str, body: Any = None, key: str | None = KEY, **fields: Any) -> Reply:
    method, path = name.split()
    if body is None and path in BODIES:
        body = {**BODIES[path], **fields}
    headers = {"content-type": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}
    return Reply(server, method, path.replace("{model}", fields.get("model", "toy")), body, headers)


def good(server: Server, name: str) -> Reply:
    return send(server, name, max_tokens=1) if name.endswith("completions") else send(server, name)


def bad(server: Server, name: str) -> Reply:
    if name != "POST /reset_prefix_cache":
        return send(server, name, b"{")
    with serving(toy_engine()) as other:  # whose allocator caches nothing
        return send(other, name)


def late(server: Server, name: str) -> Reply:
    """A body that does not come."""
    head = f"{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode())
        sock.settimeout(10)
        answer = HTTPResponse(sock)
        answer.begin()
        reply = Reply.__new__(Reply)
        reply.status, reply.headers, reply.data = answer.status, answer.headers, answer.read()
        answer.close()
    return reply


def other_type(server: Server, name: str) -> Reply:
    method, path = name.split()
    return Reply(server, method, path, b"hi", {"content-type": "text/plain", "authorization": f"Bearer {KEY}"})


def crowded(_: Server, name: str) -> Reply:
    """On a server of its own, whose requests may take as long as they do on a busy machine."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    with serving(toy_engine(delay_s=0.002, max_num_seqs=1, max_queue=1), api_keys=[KEY]) as server:
        callers = [Caller(server, COMPLETION, headers, max_tokens=100)]
        wait_for(lambda: server.engine.stats()["running"] == 1)
        callers.append(Caller(server, COMPLETION, headers, max_tokens=1))
        wait_for(lambda: server.engine.stats()["waiting"] == 1)
        reply = send(server, name)
        assert all(caller.reply().status == 200 for caller in callers)
    return reply


def out_of_service(server: Server, name: str) -> Reply:
    """While the model loads; of /health/live when a step hangs."""
    if name != "GET /health/live":
        frontend = HttpFrontend(port=0)
        frontend.check()
        try:
            loading = type("Loading", (), {"port": int(frontend.address.rsplit(":", 1)[1])})
            return send(loading, name)
        finally:
            frontend._close()
    engine = toy_engine()
    with serving(engine, step_timeout_s=0.1) as other:
        engine.executor.hold = hold = threading.Event()
        caller = Caller(other, COMPLETION)
        wait_for(lambda: Reply(other, "GET", "/health/live").status == 503)
        reply = send(other, name)
        hold.set()
        assert caller.reply().status == 200
    return reply


PRODUCE: dict[int, Callable[[Server, str], Reply]] = {
    200: good,
    400: bad,
    401: lambda server, name: send(server, name, key=None),
    404: lambda server, name: send(server, name, model="nobody"),
    408: late,
    413: lambda server, name: send(server, name, b'"' + b"x" * 4_000_001 + b'"'),
    415: other_type,
    429: crowded,
    500: lambda server, name: send(server, name, max_tokens=13),
    503: out_of_service,
    504: lambda server, name: send(server, name, max_tokens=4000),
}


@pytest.mark.parametrize(("name", "status"), PROMISES)
def test_what_is_documented_is_given(server: Server, name: str, status: int) -> None:
    """The status, a body of the documented schema, every documented header, a request id."""
    reply = PRODUCE[status](server, name)
    assert reply.status == status, reply.data
    promised = OPERATIONS[name]["responses"][str(status)]
    kind = reply.headers["content-type"].partition(";")[0]
    schema = promised["content"][kind].get("schema", {})
    if kind == "application/json":
        told = {**schema, "components": DOCUMENT["components"]}
        assert jsonschema_rs.is_valid(told, json.loads(reply.data)), (told, reply.data[:500])
    for header, about in promised.get("headers", {}).items():
        assert reply.headers[header], header
        if about["schema"].get("type") == "integer":
            assert int(reply.headers[header]) >= about["schema"]["minimum"]
        else:
            assert reply.headers[header] == about["schema"]["const"]
    if status >= 400:
        assert schema == {"$ref": "#/components/schemas/Error"}
        assert reply.error()["type"] == (
            "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
        )
        seen = {"Retry-After", "retry-after-ms", "WWW-Authenticate"} & {
            h for h in ("Retry-After", "retry-after-ms", "WWW-Authenticate") if reply.headers[h]
        }
        assert seen == set(promised.get("headers", {})), "no header that the document does not name"


def test_every_status_that_an_error_can_have_is_promised_somewhere() -> None:
    """So that none is added to the code and forgotten in the document. (404, 405 and 431 of any route are in its words.)"""
    assert {status for _, status in PROMISES} == set(PRODUCE)
    assert all(str(status) in DOCUMENT["info"]["description"] for status in (400, 404, 405, 431))


def test_a_finished_time_out_leaves_the_server_as_it_was(server: Server) -> None:
    """After all of the above."""
    time.sleep(0.01)
    server.wait_idle(5)
    assert good(server, "POST /v1/completions").status == 200
