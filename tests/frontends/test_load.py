"""More than can be served: what is turned away and how, what waits or runs too long, readers that fall behind, steps that hang."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from typing import Any

import openai
import pytest

from core.frontends import connection as connection_module
from core.frontends.loop import EngineLoop
from core.frontends.mailbox import MERGE_AT, merged
from core.types import Output, SamplingParams
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import CHAT, COMPLETION, TEXT, Caller, Reply, post, request_bytes, spelled, wait_for


def full_server(**options: Any) -> Server:
    """One request runs, one may wait."""
    return Server(toy_engine(delay_s=0.005, max_num_seqs=1, max_queue=1), **options)


# ------------------------------------------------------------------------------------------------ too many


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_the_time_to_come_back(stream: bool) -> None:
    """OpenAI's shape, both headers; those that run and wait are not touched, and afterwards there is room again."""
    server = full_server()
    running = Caller(server, COMPLETION, max_tokens=150)
    wait_for(lambda: server.engine.stats()["running"] == 1)
    waiting = Caller(server, COMPLETION, max_tokens=3)
    wait_for(lambda: server.engine.stats()["waiting"] == 1)
    refused = post(server, "/v1/completions", COMPLETION, stream=stream)
    assert refused.status == 429
    assert refused.error()["code"] == "rate_limit_exceeded"
    assert refused.error()["type"] == "requests"
    assert int(refused.headers["retry-after"]) >= 1
    assert int(refused.headers["retry-after-ms"]) >= 1000
    assert post(server, "/v1/completions", {**COMPLETION, "prompt": ["a", "b"]}).status == 429
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**CHAT)
    assert Reply(server, "GET", "/health").status == 200
    assert running.reply().json()["usage"]["completion_tokens"] == 150
    assert waiting.reply().json()["usage"]["completion_tokens"] == 3
    assert post(server, "/v1/completions", COMPLETION, max_tokens=2).status == 200
    server.wait_idle()
    server.stop()


def test_openais_client_comes_back_by_itself_until_there_is_room() -> None:
    """Its retries wait for what the headers say."""
    server = full_server()
    callers = [Caller(server, COMPLETION, max_tokens=60)]
    wait_for(lambda: server.engine.stats()["running"] == 1)
    callers.append(Caller(server, COMPLETION, max_tokens=3))
    wait_for(lambda: server.engine.stats()["waiting"] == 1)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=5, timeout=20) as client:
        assert client.completions.create(model="toy", prompt="hi", max_tokens=2).usage.completion_tokens == 2
    assert all(caller.reply().status == 200 for caller in callers)
    server.stop()


def test_several_prompts_are_taken_all_or_none() -> None:
    """The second of two does not fit into the queue: the first is not computed either."""
    server = full_server()
    running = Caller(server, COMPLETION, max_tokens=100)
    wait_for(lambda: server.engine.stats()["running"] == 1)
    assert post(server, "/v1/completions", {**COMPLETION, "prompt": ["a", "b", "c"]}).status == 429
    wait_for(lambda: server.engine.stats()["waiting"] == 0)
    assert running.reply().status == 200
    server.wait_idle()
    server.stop()


# ------------------------------------------------------------------------------------------------ too long


@pytest.mark.parametrize("stream", [False, True])
def test_what_waits_too_long_is_told_to_come_back(stream: bool) -> None:
    """503 with Retry-After, or an error event; what runs goes on."""
    server = Server(toy_engine(delay_s=0.005, max_num_seqs=1), queue_timeout_s=0.15)
    running = Caller(server, COMPLETION, max_tokens=150)
    wait_for(lambda: server.engine.stats()["running"] == 1)
    reply = post(server, "/v1/completions", COMPLETION, stream=stream)
    error = reply.events()[-1]["error"] if stream else reply.error()
    assert error["message"] == "the request waited longer than 0.15 s in the queue"
    assert stream or (reply.status == 503 and reply.headers["retry-after"])
    assert running.reply().json()["usage"]["completion_tokens"] == 150
    server.wait_idle()
    server.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_too_long_is_cut(stream: bool) -> None:
    """504, or text, an error event and the end; a short request beside it is not touched."""
    with serving(toy_engine(text=TEXT, delay_s=0.003), request_timeout_s=0.4) as server:
        started = time.monotonic()
        long = Caller(server, COMPLETION, max_tokens=5000, stream=stream)
        assert post(server, "/v1/completions", COMPLETION, max_tokens=3).status == 200
        reply = long.reply()
        assert 0.35 < time.monotonic() - started < 3
        error = reply.events()[-1]["error"] if stream else reply.error()
        assert error["message"] == "the request took longer than 0.4 s"
        assert reply.status == (200 if stream else 504)
        server.wait_idle()


def test_finished_requests_leave_no_timers() -> None:
    """A time-out of an hour does not keep a request for an hour."""

    async def body() -> None:
        loop = EngineLoop(toy_engine(), queue_timeout_s=3600, request_timeout_s=3600)
        loop.start()
        stream = loop.submit([[1, 2], [3]], SamplingParams(max_tokens=3, temperature=0))
        assert len(stream._timers) == 2
        assert sum([len(outputs) async for outputs in stream]) == 6
        assert stream._timers == []
        left = loop.submit([[1, 2]], SamplingParams(max_tokens=500, temperature=0))
        left.close()
        assert left._timers == []
        assert await loop.stop()

    asyncio.run(body())


# ------------------------------------------------------------------------------------------------ slow readers


def output(request_id: int, branch: int, token: int, **fields: Any) -> Output:
    return Output(request_id, request_id, branch, (token,), chr(token), **fields)


def test_merged_outputs_say_the_same() -> None:
    """Text, tokens and the end of each branch of each request."""
    outputs = [output(i % 2, i // 2 % 2, 65 + i) for i in range(8)] + [output(0, 1, 90, finish_reason="length")]
    assert [(one.request_id, one.branch, one.text, one.token_ids, one.finish_reason) for one in merged(outputs)] == [
        (0, 0, "AE", (65, 69), None),
        (1, 0, "BF", (66, 70), None),
        (0, 1, "CGZ", (67, 71, 90), "length"),
        (1, 1, "DH", (68, 72), None),
    ]


def test_a_reader_that_falls_behind_costs_bounded_memory_and_loses_nothing() -> None:
    """Thousands of tokens unread are at most a few thousand outputs, and all of the text."""

    async def body() -> None:
        engine = toy_engine(text=TEXT, checks="cheap")
        loop = EngineLoop(engine)
        loop.start()
        stream = loop.submit([[1, 2]], SamplingParams(max_tokens=4000, temperature=0, n=2))
        most = 0
        while stream._open:
            await asyncio.sleep(0.01)
            most = max(most, len(stream._ready))
        assert most <= 2 * (MERGE_AT + 2)
        texts = ["", ""]
        async for outputs in stream:
            for one in outputs:
                texts[one.branch] += one.text
        assert texts == [spelled(4000)] * 2
        assert await loop.stop()
        engine.assert_idle()

    asyncio.run(body())


def test_a_client_that_does_not_read_is_dropped_and_its_blocks_are_free(caplog: pytest.LogCaptureFixture) -> None:
    """While others are served; the connection ends, not only the request."""
    caplog.set_level("WARNING")  # another test of this process may have turned INFO on
    engine = toy_engine(text=TEXT, num_blocks=17_000, checks="cheap")
    with serving(engine, client_timeout_s=0.5) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(request_bytes({**COMPLETION, "max_tokens": 8000, "n": 32, "stream": True}))
        wait_for(lambda: engine.stats()["running"] == 32)
        assert post(server, "/v1/completions", COMPLETION, max_tokens=3).json()["usage"]["completion_tokens"] == 3
        wait_for(lambda: not engine.has_work(), 30)
        assert engine.executor.num_steps < 8000, "it was cut, it did not finish"
        engine.assert_idle()
        sock.settimeout(10)
        last = got = sock.recv(1 << 20)
        while got:
            last, got = got, sock.recv(1 << 20)
        assert not last.endswith(b"0\r\n\r\n"), "the answer has no end"
    assert not caplog.records


def test_a_body_that_does_not_come_is_408() -> None:
    """A client may not hold a connection open by sending nothing."""
    with serving(toy_engine(), client_timeout_s=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request_bytes(COMPLETION)[:-3])
            sock.settimeout(10)
            answer = sock.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"client_timeout_s" in answer
        assert not server.engine.has_work()


def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from a connection without a word nor from one that says a word now and then."""
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.3)
    with serving(toy_engine()) as server:
        for begin in (b"", b"POST /v1/completions HT"):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(begin)
                sock.settimeout(5)
                started = time.monotonic()
                try:
                    assert sock.recv(10) == b"", "no answer"
                except ConnectionResetError:
                    assert begin, "reset: something was unread"
                assert time.monotonic() - started < 4
        assert post(server, "/v1/completions", COMPLETION, max_tokens=1).status == 200


# ------------------------------------------------------------------------------------------------ a step that hangs


def test_a_hung_step_is_seen_from_outside_and_may_recover(caplog: pytest.LogCaptureFixture) -> None:
    """/health/live and /health/ready turn 503 and say so, new requests are refused, the log shows where; then all is well."""
    caplog.set_level("WARNING")  # another test of this process may have turned INFO on
    engine = toy_engine()
    with serving(engine, step_timeout_s=0.2) as server:
        engine.executor.hold = hold = threading.Event()
        held = Caller(server, COMPLETION, max_tokens=3)
        with caplog.at_level(logging.ERROR):
            wait_for(lambda: Reply(server, "GET", "/health/live").status == 503)
            wait_for(lambda: caplog.records)
        for path in ("/health", "/health/ready", "/health/live"):
            reply = Reply(server, "GET", path)
            assert (reply.status, reply.error()["code"]) == (503, "engine_hangs")
        assert post(server, "/v1/completions", COMPLETION).status == 503
        assert "has not ended within 0.2 s" in caplog.text
        assert "self.hold.wait()" in caplog.text, "the stack of the engine's thread"
        engine.executor.hold = None
        hold.set()
        assert json.loads(held.reply().data)["usage"]["completion_tokens"] == 3
        assert Reply(server, "GET", "/health/live").status == 200
        assert post(server, "/v1/completions", COMPLETION, max_tokens=1).status == 200
        assert len(caplog.records) == 1, "said once"
