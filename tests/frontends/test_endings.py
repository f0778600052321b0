"""Clients that leave, engines that fail, servers that are told to stop: nothing hangs and nothing is left."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.frontends.http import HttpFrontend, _bind
from core.types import ConfigError, PolicyError
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import (
    COMPLETION,
    TEXT,
    Caller,
    Reply,
    counters,
    own_certificate,
    post,
    request_bytes,
    wait_for,
)

ROOT = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------------------------------------ clients that leave


def leave(server: Server, stream: bool, prompt: str = "hi", after_bytes: int = 0, wait_s: float = 0.0) -> None:
    """Ask for 5000 tokens and go."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(request_bytes({"model": "toy", "prompt": prompt, "max_tokens": 5000, "stream": stream}))
        sock.settimeout(10)
        got = 0
        while got < after_bytes:
            got += len(sock.recv(4096))
        time.sleep(wait_s)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["at once", "in prefill", "in decode"])
def test_a_client_that_leaves(slow: Server, when: str, stream: bool) -> None:
    """Its generation ends within a second, and no step is run for it afterwards."""
    if when == "in prefill":
        leave(slow, stream, prompt="x" * 3000, wait_s=0.1)
    elif when == "in decode":
        leave(slow, stream, after_bytes=3000 if stream else 0, wait_s=0.1)
    else:
        leave(slow, stream)
        time.sleep(0.1)  # it may not even have arrived
    slow.wait_idle(1.0)
    steps = slow.engine.executor.num_steps
    time.sleep(0.05)
    assert slow.engine.executor.num_steps == steps


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue(slow: Server, stream: bool) -> None:
    """The two requests ahead of it are not touched."""
    others = [Caller(slow, COMPLETION, max_tokens=250) for _ in range(2)]
    wait_for(lambda: slow.engine.stats()["running"] == 2)
    leave(slow, stream, wait_s=0.1)
    assert slow.engine.stats()["running"] == 2
    wait_for(lambda: slow.engine.stats()["waiting"] == 0, 1.0)
    assert [other.reply().json()["usage"]["completion_tokens"] for other in others] == [250, 250]
    slow.wait_idle(1.0)


def test_a_hundred_clients_that_leave(slow: Server) -> None:
    """Nothing adds up, and a normal request in between is served."""
    for i in range(100):
        leave(slow, stream=i % 2 == 0, prompt="x" * (i % 40 + 1), after_bytes=200 if i % 4 == 0 else 0)
        if i % 25 == 0:
            assert post(slow, "/v1/completions", COMPLETION, max_tokens=3).json()["usage"]["completion_tokens"] == 3
    slow.wait_idle(1.0)
    gauges = counters(slow)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert gauges[f'vllm:{name}{{model_name="toy"}}'] == 0


def test_a_client_that_leaves_in_the_middle_of_its_body(slow: Server) -> None:
    """Nothing is submitted."""
    with socket.create_connection(("127.0.0.1", slow.port)) as sock:
        sock.sendall(request_bytes({"model": "toy", "prompt": "x" * 500})[:-100])
        time.sleep(0.05)
    assert Reply(slow, "GET", "/health").status == 200
    assert not slow.engine.has_work()


def test_a_client_that_leaves_before_its_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in line for one of two compilers; once it is gone its grammar is not compiled, and others are."""
    compiled: list[str] = []
    hold = threading.Event()
    engine = toy_engine(eos_every=30)
    compile = engine.edge.grammars.compile

    def slowly(structure: Any) -> Any:
        compiled.append(structure.text)
        hold.wait(10)
        return compile(structure)

    monkeypatch.setattr(engine.edge.grammars, "compile", slowly)
    with serving(engine) as server:
        asked = {**COMPLETION, "max_tokens": 3}
        ahead = [Caller(server, asked, structured_outputs={"regex": f"a{i}"}) for i in range(2)]
        wait_for(lambda: len(compiled) == 2)
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request_bytes({**asked, "structured_outputs": {"regex": "left"}}))
            time.sleep(0.1)
        time.sleep(0.1)
        hold.set()
        assert [caller.reply().status for caller in ahead] == [200, 200]
        assert post(server, "/v1/completions", asked, structured_outputs={"regex": "after"}).status == 200
        assert "left" not in compiled and "after" in compiled
        server.wait_idle()


def test_grammars_that_were_given_up_do_not_hold_up_large_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers that go on for clients that have left take no thread from those that parse bodies."""
    hold, begun = threading.Event(), []
    engine = toy_engine(eos_every=30)
    monkeypatch.setattr(engine.edge.grammars, "compile", lambda structure: (begun.append(structure), hold.wait(10)))
    with serving(engine) as server:
        for i in range(12):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(request_bytes({**COMPLETION, "structured_outputs": {"regex": f"a{i}"}}))
                time.sleep(0.02)
        started = time.monotonic()
        assert post(server, "/v1/completions", COMPLETION, user="x" * 20_000, max_tokens=1).status == 200
        assert time.monotonic() - started < 5
        assert len(begun) == 2
        hold.set()


# ------------------------------------------------------------------------------------------------ engines that fail


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails(stream: bool) -> None:
    """An open stream gets an error event and ends, an open call 503; /health says why; ``run`` raises what it was."""
    server = Server(toy_engine(delay_s=0.002))
    caller = Caller(server, COMPLETION, max_tokens=5000, stream=stream)
    wait_for(lambda: server.engine.executor.num_steps > 20)
    assert Reply(server, "GET", "/health").status == 200
    server.engine.executor.fail = PolicyError("x 1: allocator=mine reserve: bad /srv/secret/place")
    reply = caller.reply()
    health = Reply(server, "GET", "/health")
    assert (health.status, health.error()["code"]) == (503, "engine_stopped")
    assert "allocator=mine" in health.error()["message"]
    assert "secret" not in health.error()["message"]
    refused = post(server, "/v1/completions", COMPLETION)
    assert refused.status == 503
    assert refused.headers["retry-after"]
    assert Reply(server, "GET", "/metrics").status == 200
    if stream:
        assert reply.events()[-1]["error"]["type"] == "server_error"
    else:
        assert reply.status == 503
    server.thread.join(5)
    assert not server.thread.is_alive()
    assert server.error is server.engine.executor.fail


# ------------------------------------------------------------------------------------------------ servers that stop


def test_open_streams_finish_within_the_grace() -> None:
    """The first signal: the stream ends as usual, a new request gets 503, the server ends."""
    server = Server(toy_engine(text=TEXT, delay_s=0.005), grace_s=10)
    caller = Caller(server, COMPLETION, max_tokens=100, stream=True)
    wait_for(lambda: server.engine.executor.num_steps > 5)
    server.frontend.shutdown()
    time.sleep(0.05)
    health = Reply(server, "GET", "/health")
    assert (health.status, health.error()["code"]) == (503, "shutting_down")
    assert post(server, "/v1/completions", COMPLETION).status == 503
    assert caller.reply().events()[-1]["choices"][0]["finish_reason"] == "length"
    server.thread.join(5)
    assert not server.thread.is_alive()
    assert server.error is None
    server.engine.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlives_the_grace_ends_with_an_error(stream: bool) -> None:
    """A stream: text, an error event, [DONE]. A call: 503."""
    server = Server(toy_engine(text=TEXT, delay_s=0.005), grace_s=0.2)
    caller = Caller(server, COMPLETION, max_tokens=5000, stream=stream)
    wait_for(lambda: server.engine.executor.num_steps > 5)
    started = time.monotonic()
    server.frontend.shutdown()
    reply = caller.reply()
    server.thread.join(5)
    assert time.monotonic() - started < 2
    assert not server.thread.is_alive()
    error = reply.events()[-1]["error"] if stream else reply.error()
    assert "shutting down" in error["message"]
    assert reply.status == (200 if stream else 503)
    server.engine.assert_idle()


def test_a_client_that_does_not_read_cannot_hold_up_the_end() -> None:
    """A stream that nobody reads is given up after the flush time."""
    engine = toy_engine(text=TEXT, max_model_len=200_000, num_blocks=13_000, checks="cheap")
    server = Server(engine, grace_s=0.1)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request_bytes({**COMPLETION, "max_tokens": 150_000, "stream": True}))
        wait_for(lambda: engine.executor.num_steps > 3000, 10)
        server.frontend.shutdown()
        server.thread.join(6)
        assert not server.thread.is_alive()
    engine.assert_idle()


class Process:
    """A server of its own, with its first line read."""

    def __init__(self, **options: Any):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.frontends.serve_toy", "0", json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        assert line.startswith("serving toy on http://127.0.0.1:"), self.process.stderr.read()
        self.port = int(line.rsplit(":", 1)[1])

    def end(self, *signals: int, seconds: float, pause_s: float = 0.1) -> str:
        """Send signals, wait for the end (not longer than so many seconds), give what stderr said."""
        started = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(pause_s)
        _, said = self.process.communicate(timeout=20)
        assert time.monotonic() - started < seconds
        return said


@contextmanager
def process(**options: Any) -> Iterator[Process]:
    """Killed at the end, whatever happened."""
    it = Process(**options)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server(number: int) -> None:
    """Within two seconds, with code 0, without a word, also when a connection is kept open; its port is free at once."""
    with process() as it, socket.create_connection(("127.0.0.1", it.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        sock.recv(4096)
        assert it.end(number, seconds=2) == ""
        assert it.process.returncode == 0
        frontend = HttpFrontend(port=it.port)
        frontend.check()
        frontend._close()


def test_a_signal_lets_a_busy_server_finish() -> None:
    """The open stream ends as it should, then the process does."""
    with process(delay_s=0.005, text=TEXT, grace_s=10) as it:
        caller = Caller(it, COMPLETION, max_tokens=100, stream=True)
        time.sleep(0.2)
        assert it.end(signal.SIGTERM, seconds=4) == ""
        assert it.process.returncode == 0
        assert caller.reply().events()[-1]["choices"][0]["finish_reason"] == "length"


def test_a_second_signal_ends_it_now() -> None:
    """The stream ends with an error event, the process within a second of the signal."""
    with process(delay_s=0.005, text=TEXT, grace_s=60) as it:
        caller = Caller(it, COMPLETION, max_tokens=5000, stream=True)
        time.sleep(0.2)
        assert it.end(signal.SIGTERM, signal.SIGTERM, seconds=2) == ""
        assert it.process.returncode == 0
        assert "shutting down" in caller.reply().events()[-1]["error"]["message"]


def test_a_fatal_policy_error_ends_the_process() -> None:
    """Exit code 1; the open stream got an error event; what the operator reads names the plugin."""
    with process(fail_after=10) as it:
        caller = Caller(it, COMPLETION, max_tokens=5000, stream=True)
        said = it.end(seconds=5)
        assert it.process.returncode == 1
        assert "allocator=test reserve" in said
        assert "error" in caller.reply().events()[-1]


def test_a_port_that_is_taken(slow: Server) -> None:
    """One line, before anything is loaded."""
    with pytest.raises(ConfigError, match=rf"frontend.port={slow.port}: Address already in use"):
        HttpFrontend(port=slow.port).check()
    with pytest.raises(ConfigError, match=r"frontend.host=203.0.113.9"):
        HttpFrontend(host="203.0.113.9").check()
    with pytest.raises(ConfigError, match="not an address"):
        HttpFrontend(host="no such host").check()


def test_a_port_that_is_taken_while_the_model_loads() -> None:
    """The second server says so at once, also when it found the port free a moment before."""
    first = HttpFrontend(port=0)
    first.check()
    port = int(first.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="Address already in use"):
        HttpFrontend(port=port).check()
    first._close()
    late, early = HttpFrontend(port=port), HttpFrontend(port=port)
    late._socket = _bind(late.host, port)
    early.check()
    with pytest.raises(ConfigError, match="Address already in use"):
        late._listen()
    early._close()


@pytest.mark.parametrize("tls", [False, True])
def test_while_the_model_loads_the_port_says_so(tls: bool, tmp_path: Path) -> None:
    """Live, not ready; a request is told to come back; connections that say nothing hold nobody up; then the server answers."""
    options, context = {}, None
    if tls:
        cert, key = own_certificate(tmp_path)
        options, context = {"tls_certfile": cert, "tls_keyfile": key}, ssl.create_default_context(cafile=cert)
    frontend = HttpFrontend(port=0, **options)
    frontend.check()
    port = int(frontend.address.rsplit(":", 1)[1])

    def ask(method: str, path: str, body: Any = None) -> tuple[int, Any, str | None]:
        kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        connection = kind("127.0.0.1", port, timeout=10, **({"context": context} if tls else {}))
        connection.request(
            method, path, None if body is None else json.dumps(body), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        said = answer.status, json.loads(answer.read()), answer.headers["retry-after"]
        connection.close()
        return said

    with socket.create_connection(("127.0.0.1", port)):
        assert ask("GET", "/health/live") == (200, {"status": "ok"}, None)
    for call in (
        ("GET", "/health"),
        ("GET", "/health/ready"),
        ("POST", "/v1/completions", {**COMPLETION, "prompt": "x" * 50_000}),
    ):
        status, said, retry_after = ask(*call)
        assert (status, said["error"]["code"], retry_after) == (503, "loading", "1")
    engine = toy_engine()
    thread = threading.Thread(target=frontend.run, args=(SimpleNamespace(engine=engine),))
    thread.start()
    assert frontend.ready.wait(10)
    assert ask("GET", "/health/ready")[0] == 200
    assert ask("POST", "/v1/completions", COMPLETION)[0] == 200
    frontend.shutdown()
    thread.join(10)
    assert not thread.is_alive()
    assert not [each for each in threading.enumerate() if each.name == "lobby"]


def test_the_port_is_free_again_at_once() -> None:
    """Three servers in a row on one port, each with a client."""
    port = 0
    for _ in range(3):
        with serving(toy_engine(text=TEXT), port=port) as server:
            assert post(server, "/v1/completions", COMPLETION).status == 200
            port = server.port


@pytest.mark.parametrize(
    "options",
    [
        {"port": "80"},
        {"port": 70000},
        {"port": -1},
        {"port": True},
        {"host": 5},
        {"max_body_bytes": 5},
        {"grace_s": -1},
        {"grace_s": float("nan")},
        {"served_model_name": ""},
    ],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    """Refused when built."""
    with pytest.raises((ValueError, TypeError)):
        HttpFrontend(**options)
