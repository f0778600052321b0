"""Bytes on a socket that are no HTTP, or too much of it: always 4xx as JSON or a dropped connection, never 5xx, never a hang."""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.frontends import connection as connection_module
from core.frontends.connection import MAX_AHEAD
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import COMPLETION, TEXT, Caller, Reply, own_certificate, post, request_bytes, spelled, wait_for

GOOD = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Little patience, so that nothing here takes long."""
    patched = pytest.MonkeyPatch()
    patched.setattr(connection_module, "HEAD_TIMEOUT_S", 0.5)
    with serving(toy_engine(text=TEXT, max_model_len=512), client_timeout_s=0.5) as running:
        yield running
        assert post(running, "/v1/completions", COMPLETION).json()["choices"][0]["text"] == spelled(16)
        running.wait_idle()
    patched.undo()


def talk(server: Server, data: bytes, close: bool = False, seconds: float = 5.0) -> bytes:
    """Everything that comes back until the server ends the connection, which must be soon."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as sock:
        got = b""
        try:
            sock.sendall(data)
            if close:
                sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65_536):
                got += part
        except ConnectionError:
            pass  # dropped: what had come is what counts
    return got


def answers(got: bytes) -> list[tuple[int, Any]]:
    """Statuses and JSON bodies of whole answers, one behind the other."""
    found = []
    while got:
        head, _, got = got.partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
        found.append((int(head[9:12]), json.loads(got[:length])))
        got = got[length:]
    return found


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\nhello\r\n\r\n", b"\x00\x01\x02\x03", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n", b"GET / HTTP/1.1\r\nA\x00: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"GET / HTTP/1.1\r\n: x\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n" + b"\x7f\x00", POST + b"Content-Length: -5\r\n\r\n", POST + b"Content-Length: 1e3\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", POST + b"Transfer-Encoding: gzip\r\n\r\nx",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX\r\n", POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"GET http://[::1 HTTP/1.1\r\n\r\n",
    ],
    ids=lambda data: repr(data[-24:]),
)  # fmt: skip
def test_what_is_no_http_is_400_as_json(server: Server, data: bytes) -> None:
    """OpenAI's shape, one answer, and the connection ends."""
    ((status, body),) = answers(talk(server, data))
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "invalid_http")
    assert "HTTP/1.1" in body["error"]["message"] and len(body["error"]["message"]) < 200


def test_the_same_behind_tls(tmp_path: Path) -> None:
    """Where half of a connection cannot be closed: one answer, and the end."""
    cert, key = own_certificate(tmp_path)
    context = ssl.create_default_context(cafile=cert)
    with serving(toy_engine(), tls_certfile=cert, tls_keyfile=key) as server:
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as sock:
            sock.sendall(b"\x00\x01\r\n\r\n" + b"x" * 100_000)
            got = b""
            try:
                while part := sock.recv(65_536):
                    got += part
            except (ConnectionError, ssl.SSLError):
                pass  # cut off, as it may be once the answer was given
    ((status, body),) = answers(got)
    assert (status, body["error"]["code"]) == (400, "invalid_http")


@pytest.mark.parametrize("host", [b"[", b"[::1", b"a b", b"http://x/y?z", b"\xff", b"", b"x:99999999", b"<script>"])
def test_strange_host_headers_change_nothing(server: Server, host: bytes) -> None:
    """A route is found by its path; one that is not there is 404 all the same."""
    head = b" HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n"
    assert [status for status, _ in answers(talk(server, b"GET /version" + head))] == [200]
    assert [status for status, _ in answers(talk(server, b"GET /nothing" + head))] == [404]
    assert [status for status, _ in answers(talk(server, b"PUT /version" + head))] == [405]


@pytest.mark.parametrize("field", [b"X-A: ", b""], ids=["header", "url"])
def test_a_head_that_is_too_large_is_431_as_json(server: Server, field: bytes) -> None:
    """In pieces, and the rest of it does not take the answer away."""
    start = b"GET /version HTTP/1.1\r\n" + field if field else b"GET /"
    ((status, body),) = answers(talk(server, start + b"a" * 3_000_000))
    assert status == 431
    assert "65536" in body["error"]["message"]


def test_no_value_of_a_header_comes_back_but_a_plain_request_id(server: Server) -> None:
    """Nothing that a client sends begins a header of the answer."""
    for value in (b"a\tb", b"a\x80", b"x" * 129, b"a;b", b"<x>", b'"', b"a b"):
        got = talk(server, b"GET /version HTTP/1.1\r\nConnection: close\r\nX-Request-Id: " + value + b"\r\n\r\n")
        head = got.partition(b"\r\n\r\n")[0]
        assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}(\r\n|$)", head), head
        assert value not in head
    got = talk(server, b"GET /version HTTP/1.1\r\nConnection: close\r\nX-Request-Id: my:id-1\r\n\r\n")
    assert b"\r\nx-request-id: my:id-1" in got


# ------------------------------------------------------------------------------------------------ several on one connection


def test_bytes_behind_a_good_request_do_not_mix_with_its_answer(server: Server) -> None:
    """An answer that had ended is whole; one that is under way is cut off rather than followed by another's error."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(GOOD)
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"\x00\x00")
        assert sock.recv(65_536).startswith(b"HTTP/1.1 400 ")
        assert sock.recv(100) == b""
    streaming = request_bytes({**COMPLETION, "stream": True, "max_tokens": 400})
    got = talk(server, streaming + b"\x00 nonsense \x00\r\n\r\n")
    assert b"HTTP/1.1 400" not in got and not got.endswith(b"0\r\n\r\n")
    server.wait_idle()


def test_requests_sent_ahead_are_answered_in_order_up_to_a_number(server: Server) -> None:
    """A connection holds no more than ``MAX_AHEAD`` of them, however small they are."""
    paths = [b"/version", b"/load", b"/v1/models/toy", b"/nothing"] * 4
    ahead = b"".join(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n" for path in paths)
    statuses = [status for status, _ in answers(talk(server, ahead + LAST))]
    assert statuses == [200, 200, 200, 404] * 4 + [200]
    assert len(paths) == MAX_AHEAD
    assert talk(server, GOOD * 10_000 + LAST).count(b"HTTP/1.1 ") <= MAX_AHEAD + 1
    assert Reply(server, "GET", "/version").status == 200


@pytest.mark.parametrize("wish", [b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n",
                                  b"Upgrade: websocket\r\nConnection: Upgrade\r\n"])  # fmt: skip
def test_a_wish_for_another_protocol_is_ignored(server: Server, wish: bytes) -> None:
    """As by clients that try HTTP/2 first: body and all, also in pieces, and what comes behind it is served too."""
    body = json.dumps({**COMPLETION, "max_tokens": 3}).encode()
    whole = POST + wish + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    (status, said), (after, _) = answers(talk(server, whole + LAST))
    assert (status, after, said["choices"][0]["text"]) == (200, 200, spelled(3))
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        for at in range(0, len(whole), 40):
            sock.sendall(whole[at : at + 40])
            time.sleep(0.002)
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")
    ahead = (b"GET /version HTTP/1.1\r\n" + wish + b"\r\n") * 5000
    assert talk(server, ahead + LAST).count(b"HTTP/1.1 ") <= MAX_AHEAD + 1


# ------------------------------------------------------------------------------------------------ clients that hold on


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nothing"])
def test_a_body_that_goes_on_after_its_refusal_ends(server: Server, path: bytes) -> None:
    """The answer is not lost; a client that keeps sending, or stops in the middle, does not keep its connection."""
    head = (
        b"POST "
        + path
        + b" HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(head)
        assert sock.recv(65_536)[9:12] in (b"415", b"404")
        started = time.monotonic()
        sock.sendall(b"5\r\nhel")
        assert ended(sock)
        assert time.monotonic() - started < 3


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(100) == b""
    except ConnectionError:
        return True


def test_empty_lines_do_not_keep_a_connection(server: Server) -> None:
    """They are no request, and there is no answer to wait for."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(GOOD)
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"\r\n")
        assert ended(sock)


def test_empty_lines_behind_a_body_do_not_end_its_answer() -> None:
    """Some clients send one."""
    patched = pytest.MonkeyPatch()
    patched.setattr(connection_module, "HEAD_TIMEOUT_S", 0.1)
    with serving(toy_engine(text="x", delay_s=0.002)) as slow:
        with socket.create_connection(("127.0.0.1", slow.port), timeout=10) as sock:
            sock.sendall(request_bytes({**COMPLETION, "max_tokens": 200}))
            time.sleep(0.05)
            sock.sendall(b"\r\n")
            assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")
        slow.wait_idle()
    patched.undo()


def test_a_whole_answer_that_is_not_read_is_dropped() -> None:
    """As a stream's is: megabytes for a client that does not read are not kept for ever."""
    engine = toy_engine(text="x", num_blocks=17_000, checks="cheap")
    with serving(engine, client_timeout_s=0.4) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.settimeout(10)
        body = {**COMPLETION, "max_tokens": 1000, "n": 64, "logprobs": 20, "temperature": 1, "seed": 1}
        sock.sendall(request_bytes(body))
        wait_for(lambda: engine.stats()["running"] == 64)
        wait_for(lambda: not engine.has_work(), 60)
        connections = server.frontend._session._server.server_state.connections  # type: ignore[union-attr]
        wait_for(lambda: not connections, 20)
        got = 0
        try:
            while part := sock.recv(1 << 20):
                got += len(part)
        except ConnectionError:
            pass
        assert got < 3_000_000, "it is larger than what the kernel keeps, and was not sent"


@pytest.mark.parametrize("kind", ["many", "one"])
def test_trailers_without_end_are_431_and_are_not_kept(server: Server, kind: str) -> None:
    """What follows a chunked body is no header of its request, and has a size."""
    body = json.dumps({**COMPLETION, "max_tokens": 2}).encode()
    chunked = (
        POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    )
    got = talk(server, chunked + b"X-Request-Id: from-a-trailer\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200 ") and b"from-a-trailer" not in got
    endless = b"A: b\r\n" * 200_000 if kind == "many" else b"A: " + b"b" * 1_000_000
    ((status, said),) = answers(talk(server, chunked + endless))
    assert status == 431 and "65536" in said["error"]["message"]
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in body + b" " * 100_000)
    assert talk(server, chunked.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + small + b"0\r\n\r\n").startswith(
        b"HTTP/1.1 200 "
    )


def test_bodies_in_the_making_have_a_bound_together() -> None:
    """Many clients, each within its own limit: 503 with Retry-After, those before it are served, and there is room again."""
    with serving(toy_engine(text=TEXT), max_body_bytes=1024, client_timeout_s=20) as server:
        body = json.dumps({**COMPLETION, "max_tokens": 2, "user": "x" * 940}).encode()
        head = POST + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n"
        socks = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(90)]
        for sock in socks:
            sock.sendall(head + body[:-1])
        statuses = []
        for sock in reversed(socks):
            sock.sendall(body[-1:])
            statuses.append(sock.recv(65_536)[:12])
            sock.close()
        assert 10 < statuses.count(b"HTTP/1.1 503") < 45
        assert statuses.count(b"HTTP/1.1 200") + statuses.count(b"HTTP/1.1 503") == 90
        assert post(server, "/v1/completions", COMPLETION).status == 200
        server.wait_idle()


def test_an_answer_that_is_not_read_holds_no_second_one() -> None:
    """Requests sent ahead by a client that reads nothing wait for nothing either: the connection is dropped."""
    engine = toy_engine(text="x", num_blocks=17_000, checks="cheap")
    with serving(engine, client_timeout_s=0.4) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        body = {**COMPLETION, "max_tokens": 500, "n": 64, "logprobs": 20, "temperature": 1, "seed": 1}
        sock.sendall(request_bytes(body) + request_bytes(COMPLETION))
        wait_for(lambda: engine.stats()["running"] == 64)
        connections = server.frontend._session._server.server_state.connections  # type: ignore[union-attr]
        wait_for(lambda: not connections, 60)
        server.wait_idle(5)


# ------------------------------------------------------------------------------------------------ at random

PIECES = st.sampled_from(
    [b"GET ", b"POST ", b"/v1/completions", b"/version", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\n", b"\r", b"\0", b": ",
     b"Host: x", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Content-Type: application/json", b"Expect: 100-continue", b"hello",
     b"0\r\n\r\n", b"5\r\nhello\r\n", b"Connection: close", b"Connection: Upgrade", b"Upgrade: x", b"\xff", b"%00", b"?",
     b"X-Request-Id: a"]
)  # fmt: skip
WIRE = st.lists(PIECES | st.binary(max_size=6), max_size=14).map(b"".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=WIRE)
def test_no_bytes_are_the_servers_fault(server: Server, data: bytes) -> None:
    """Whatever comes, then nothing more: 4xx, 200 or silence, and the end."""
    got = talk(server, data, close=True)
    for status in re.findall(rb"(?:^|\r\n|\})HTTP/1\.1 (\d\d\d)", got):
        assert status[:1] in b"124", got


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_bytes_of_a_thousand_tries_are_the_servers_fault(server: Server) -> None:
    """Two good streams beside them are what they were alone."""
    callers = [Caller(server, COMPLETION, max_tokens=400, stream=True) for _ in range(2)]
    tries = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
    tries(given(data=WIRE)(lambda data: test_no_bytes_are_the_servers_fault.hypothesis.inner_test(server, data)))()
    for caller in callers:
        assert "".join(event["choices"][0]["text"] for event in caller.reply().events()) == spelled(400)
