"""Malformed and hostile requests: none is the server's fault, and good streams beside them are not touched."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

import pytest

from core.executors.toy import ToyExecutor
from tests.frontends.hostile import request
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import Reply, post

NUM_GOOD = 8
AT_ONCE = 24


async def answer(port: int, data: bytes) -> bytes:
    """What comes back, at most its beginning; b"" for a connection that was dropped."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            while len(got) < 1_000_000 and (part := await reader.read(65_536)):
                got += part
    except ConnectionError:
        return got
    finally:
        writer.transport.abort()
    return got


async def storm(port: int, num: int) -> Counter[str]:
    """Statuses; a 5xx, a trace or a path fails with the request that got it."""
    found: Counter[str] = Counter()
    numbers = iter(range(num))

    async def sender() -> None:
        for number in numbers:
            data = request(random.Random(number))
            got = await answer(port, data)
            status = got[9:12].decode("latin-1")
            assert not status.startswith("5"), (number, data[:600], got[:600])
            assert b"Traceback" not in got and b".py" not in got.partition(b"\r\n\r\n")[2], (number, got[:600])
            assert b'"type":"server_error"' not in got, (number, data[:600], got[-600:])
            found[status or "none"] += 1

    await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
    return found


def streams(server: Server, stop: threading.Event, alone: list[str], wrong: list[str]) -> list[threading.Thread]:
    """Good clients, again and again until told to stop; each text must be what it was alone."""

    def client(i: int) -> None:
        while not stop.is_set():
            reply = post(server, "/v1/completions", good(i))
            if reply.status != 200 or text(reply) != alone[i]:
                wrong.append(f"{i}: {reply.status} {reply.data[-300:]!r}")

    threads = [threading.Thread(target=client, args=(i,)) for i in range(NUM_GOOD)]
    for thread in threads:
        thread.start()
    return threads


def good(i: int) -> dict[str, object]:
    return {"model": "toy", "prompt": "good" * (i + 1), "max_tokens": 60, "temperature": 1, "seed": i, "stream": True}


def text(reply: Reply) -> str:
    return "".join(choice["text"] for event in reply.events() for choice in event["choices"])


def run_storm(num: int) -> Counter[str]:
    engine = toy_engine(max_num_seqs=32, max_model_len=512, num_blocks=1024, checks="cheap")
    assert isinstance(engine.executor, ToyExecutor)
    with serving(engine, client_timeout_s=1, request_timeout_s=60) as server:
        alone = [text(post(server, "/v1/completions", good(i))) for i in range(NUM_GOOD)]
        stop, wrong = threading.Event(), []
        threads = streams(server, stop, alone, wrong)
        try:
            found = asyncio.run(storm(server.port, num))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        assert Reply(server, "GET", "/health").status == 200
        server.wait_idle(5)
    return found


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-30])
def test_tiny_temperatures_are_no_fault_of_the_servers(temperature: float) -> None:
    """The storm found it: with a bias the draw overflowed."""
    with serving(toy_engine()) as server:
        body = {
            "model": "toy",
            "prompt": "x",
            "max_tokens": 5,
            "temperature": temperature,
            "logit_bias": {"70": 1},
            "seed": 1,
        }
        drawn, best = post(server, "/v1/completions", body), post(server, "/v1/completions", {**body, "temperature": 0})
        assert drawn.json()["choices"][0]["text"] == best.json()["choices"][0]["text"]


def test_a_tiny_penalty_is_the_clients_fault() -> None:
    """The storm found it too: what was seen becomes infinitely likely."""
    with serving(toy_engine()) as server:
        body = {"model": "toy", "prompt": "x" * 40, "max_tokens": 50, "repetition_penalty": 1e-320}
        assert post(server, "/v1/completions", body).status == 400
        server.wait_idle()


def test_hostile_requests_harm_nobody() -> None:
    found = run_storm(300)
    print(dict(found))
    assert found["400"] > 100
    assert found["200"] > 5, "some of them are harmless"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_hostile_requests_harm_nobody() -> None:
    found = run_storm(10_000)
    print(dict(found))
    assert sum(found.values()) == 10_000
