"""Faults put in on purpose, one by one, under a server with open streams: each has the outcome that docs/operations.md names.

A fault of one request ends that request, and afterwards the engine holds nothing. A fault of the engine ends everything: every open
call gets an answer, /health says so, the server ends, its thread is gone and its port free.
"""

from __future__ import annotations

import json
import random
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from core.blocks import BlockPool
from core.config import compose
from core.frontends.http import HttpFrontend
from core.hookspecs import hookimpl
from core.results import RESULT_FILE, write_result
from core.start import start
from core.types import PolicyError
from plugins.allocators.paged import PagedAllocator
from plugins.preemption.swap import Swap
from tests.frontends import toys
from tests.frontends.toys import Server, SlowToy, serving, toy_engine
from tests.frontends.web import COMPLETION, Caller, Reply, counters, post, request_bytes, wait_for
from tests.toy import Work, make_engine, run

ROOT = Path(__file__).resolve().parents[2]
SWAPS = {"num_blocks": 24, "block_size": 4, "num_swap_blocks": 64, "max_model_len": 96, "max_num_seqs": 8}


def ends_with(server: Server, said: str, prompts: int = 3, **fields: Any) -> BaseException:
    """Send streams and calls, then the fault must end them all as it should; gives what stopped the server."""
    callers = [Caller(server, {**COMPLETION, "max_tokens": 60, **fields}, stream=i % 2 == 0) for i in range(prompts)]
    replies = [caller.reply() for caller in callers]
    failed = [reply for reply in replies if b'"error":{' in reply.data]
    assert failed
    assert all(
        reply.status == 200 and b'"finish_reason":"length"' in reply.data for reply in replies if reply not in failed
    )
    for reply in failed:
        assert reply.status in (200, 503)
        error = reply.events()[-1]["error"] if reply.status == 200 else reply.error()
        assert re.search(said, error["message"]), error
        assert error["type"] == "server_error"
    live = Reply(server, "GET", "/health/live")
    assert (live.status, live.error()["code"]) == (503, "engine_stopped")
    server.thread.join(5)
    assert not server.thread.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine" and thread.is_alive()]
    again = HttpFrontend(port=server.port)
    again.check()
    again._close()
    server.engine.close()
    assert server.error is not None
    return server.error


# ------------------------------------------------------------------------------------------------ faults of the engine


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), RuntimeError("at 0x7f00aa11bb22")]
)
def test_the_engines_thread_dies(error: BaseException) -> None:
    """Whatever kills it: nobody waits in vain, and what a client reads names the kind and no address."""
    server = Server(toy_engine(delay_s=0.002))
    threading.Timer(0.15, setattr, (server.engine.executor, "fail", error)).start()
    assert ends_with(server, f"the engine stopped: {type(error).__name__}", max_tokens=5000) is error


@attrs.define(eq=False)
class FailsOnce(SlowToy):
    """Its fifth step fails, all others work; or every one fails."""

    always: bool = False

    def execute(self, *args: Any) -> Any:
        if self.always or self.num_steps == 4:
            self.num_steps += 1
            raise RuntimeError("the kernel could not be launched")
        return super().execute(*args)


@pytest.mark.parametrize("always", [False, True])
def test_an_executor_that_fails(monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    """Once is enough: what the failed step left in the cache is not known, so no further step is run."""
    monkeypatch.setattr(toys, "SlowToy", FailsOnce)
    server = Server(toy_engine(delay_s=0.002, always=always))
    assert "launched" in str(ends_with(server, "the engine stopped: RuntimeError", prompts=1 if always else 3))
    assert server.engine.executor.num_steps == (1 if always else 5)
    with pytest.raises(RuntimeError, match="launched"):
        server.engine.step()


class GivesTwice(PagedAllocator):
    """Frees each block twice."""

    @hookimpl
    def release(self, releases: Any) -> None:
        pool: BlockPool = self._pool
        for release in releases:
            pool.give(release.block_ids)
            pool.give(release.block_ids)


class Raises(PagedAllocator):
    @hookimpl
    def reserve(self, plan: Any, sequences: Any) -> Any:
        if any(sequences[chunk.sequence].num_tokens > 20 for chunk in plan.chunks):
            raise KeyError("/srv/secret/place")
        return PagedAllocator.reserve(self, plan, sequences)


@pytest.mark.parametrize("allocator", [GivesTwice, Raises])
def test_an_allocator_that_misbehaves(allocator: type) -> None:
    """The plugin is named to the operator and to the client; the engine does not go on with a pool it cannot trust."""
    server = Server(toy_engine(allocator=allocator(), delay_s=0.002))
    error = ends_with(server, "allocator=test", prompts=1 if allocator is Raises else 2)
    assert isinstance(error, PolicyError)


@attrs.define(eq=False)
class LosesCopies(SlowToy):
    """Moves to or from the host fail."""

    kind: str = "swap_in"

    def _run_moves(self, moves: Any) -> None:
        if any(move.kind == self.kind for move in moves):
            raise OSError(5, "Input/output error")
        super()._run_moves(moves)


@pytest.mark.parametrize("kind", ["swap_in", "swap_out"])
def test_a_swap_copy_that_fails(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """KV that may be wrong is not used: the engine stops."""
    monkeypatch.setattr(toys, "SlowToy", LosesCopies)
    server = Server(toy_engine(**SWAPS, preemption=Swap(), kind=kind, delay_s=0.002))
    assert isinstance(ends_with(server, "the engine stopped: OSError", prompts=6), OSError)


# ------------------------------------------------------------------------------------------------ faults of one request


@pytest.fixture
def tiny() -> Iterator[Server]:
    """A small real model."""
    words = [
        "model=tiny",
        "num_threads=1",
        "kernel=torch",
        "linears=torch",
        "cache.num_blocks=128",
        "cache.swap_gb=0",
        "checks=full",
    ]
    with serving(start(compose(words), say=lambda _: None).engine) as server:
        yield server


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_nan_end_their_own_request(
    tiny: Server, monkeypatch: pytest.MonkeyPatch, temperature: int
) -> None:
    """500 with the reason; the requests in the same batch get the tokens that they get without it."""
    sampler = type(tiny.engine.executor._sampler)
    good = {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 20,
        "return_token_ids": True,
        "seed": 1,
        "temperature": temperature,
    }
    alone = post(tiny, "/v1/completions", good).json()["choices"][0]["token_ids"]
    sample = sampler.sample

    def poisoned(self: Any, logits: Any, sampling: Any) -> Any:
        for i, row in enumerate(sampling.rows):
            if sampling.params[i].seed == 666 and sampling.positions[i] > 8:
                logits[row] = float("nan")
        return sample(self, logits, sampling)

    monkeypatch.setattr(sampler, "sample", poisoned)
    callers = [Caller(tiny, good) for _ in range(2)]
    bad = [Caller(tiny, good, seed=666, stream=stream) for stream in (False, True)]
    replies = [caller.reply() for caller in callers]
    assert [reply.json()["choices"][0]["token_ids"] for reply in replies] == [alone, alone]
    call, stream = (caller.reply() for caller in bad)
    assert call.status == 500
    assert "no usable logits" in call.error()["message"]
    assert "no usable logits" in stream.events()[-1]["error"]["message"]
    tiny.wait_idle()
    assert Reply(tiny, "GET", "/health").status == 200


@attrs.define(eq=False)
class JumpyToy(SlowToy):
    """A clock that jumps back, stands still and jumps ahead by a day."""

    calls: int = 0

    def now(self) -> float:
        self.calls += 1
        return self.calls * 0.001 + random.Random(self.calls // 7).choice([0, -5000, 86_400])


def test_a_clock_that_jumps_changes_no_answer_and_no_time_goes_back() -> None:
    """Times of a request keep their order (the engine's full checks compare each of them), and steps theirs."""
    work = [Work(tuple(range(i, i + 9)), 20, 0.9, i, n=1 + i % 2, aborts=15 if i == 3 else None) for i in range(6)]
    sizes = {"num_blocks": 16, "block_size": 4, "max_num_batched_tokens": 9, "preemption": Swap()}
    jumpy = JumpyToy(vocab_size=320, max_position=4096)
    result, calm = run(make_engine(**sizes, executor=jumpy), work), run(make_engine(**sizes), work)
    assert result.reason == calm.reason
    for key in [key for key in calm.tokens if key[0] != 3]:  # the fourth is cut at a step, whatever it had by then
        assert result.tokens[key] == calm.tokens[key]
    times = [time for report in result.reports for time in (report.started_s, report.ended_s)]
    assert times == sorted(times)
    assert times[-1] - times[0] > 80_000


def test_a_disk_that_is_full_when_a_result_is_written(tmp_path: Path) -> None:
    """The result before it stays whole and nothing else is left. (A batch's output: test_batch.)"""
    write_result({"status": "ok"}, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_result({"status": "ok", "more": "x" * 5000}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == [RESULT_FILE]
    assert json.loads((tmp_path / RESULT_FILE).read_text()) == {"status": "ok"}


# ------------------------------------------------------------------------------------------------ clients that leave


def connect(server: Server, **fields: Any) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(request_bytes({**COMPLETION, **fields}))
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaves_while_its_request_is_swapped_out(stream: bool) -> None:
    """Its blocks on the host are free again too; the others finish as if it had never been."""
    engine = toy_engine(**SWAPS, preemption=Swap(), delay_s=0.004)
    with serving(engine) as server:
        others = [Caller(server, {**COMPLETION, "prompt": f"{i}" * 8, "max_tokens": 70, "seed": i}) for i in range(3)]
        wait_for(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 3)
        leaving = connect(server, prompt="x" * 8, max_tokens=80, stream=stream, n=1)
        wait_for(lambda: any(view.prompt_token_ids[-1] == ord("x") for view in _swapped(engine)))
        leaving.close()
        wait_for(lambda: not any(view.prompt_token_ids[-1] == ord("x") for view in _swapped(engine)), 1)
        assert [other.reply().json()["usage"]["completion_tokens"] for other in others] == [70] * 3
        server.wait_idle()
        assert engine.stats()["free_swap_blocks"] == engine.stats()["swap_blocks"]


def _swapped(engine: Any) -> list[Any]:
    return [seq.request for seq in list(engine.state.sequences.values()) if seq.host_blocks]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before they fork", "running", "some waiting"])
def test_a_client_of_several_answers_leaves(when: str, stream: bool) -> None:
    """All of its branches end, those that have not begun too."""
    engine = toy_engine(delay_s=0.003, max_num_seqs=4 if when == "some waiting" else 16, max_num_batched_tokens=16)
    with serving(engine) as server:
        prompt = "x" * 400 if when == "before they fork" else "hi"
        sock = connect(server, prompt=prompt, n=8, max_tokens=5000, stream=stream)
        running = {"before they fork": 1, "running": 8, "some waiting": 4}[when]
        wait_for(lambda: engine.stats()["running"] == running)
        if when == "some waiting":
            assert engine.stats()["waiting"] == 4
        sock.close()
        server.wait_idle(1.0)


def test_a_thousand_clients_leave_at_any_time() -> None:
    """Queued, in prefill, in decode, swapped, with several answers, streaming or not, twenty at once; then all is as before."""
    engine = toy_engine(
        **{**SWAPS, "max_num_seqs": 4}, preemption=Swap(), delay_s=0.001, max_num_batched_tokens=16, max_queue=40
    )
    draw = random.Random(7)
    steady = {**COMPLETION, "prompt": "ab", "max_tokens": 5, "seed": 3}
    with serving(engine) as server:
        expected = post(server, "/v1/completions", steady).json()["choices"][0]["text"]
        open_sockets: list[socket.socket] = []
        for i in range(1000):
            fields = {
                "prompt": "x" * draw.randint(1, 40),
                "max_tokens": draw.randint(1, 50),
                "n": draw.choice([1, 1, 3]),
            }
            open_sockets.append(connect(server, **fields, stream=draw.random() < 0.5))
            while len(open_sockets) > draw.randint(0, 20):
                open_sockets.pop(draw.randrange(len(open_sockets))).close()
            if i % 20 == 0:
                time.sleep(draw.random() * 0.05)
        for sock in open_sockets:
            sock.close()
        server.wait_idle(10)
        assert post(server, "/v1/completions", steady).json()["choices"][0]["text"] == expected
        assert Reply(server, "GET", "/load").json() == {"server_load": 0}
        state = server.frontend._session._server.server_state  # type: ignore[union-attr]
        wait_for(lambda: not state.connections and not state.tasks)
        found = counters(server)
        ended = sum(value for name, value in found.items() if name.startswith("vllm:request_success_total"))
        assert ended >= 100, "most were taken, and each that was has ended"


# ------------------------------------------------------------------------------------------------ the page


def test_every_test_that_the_page_names_is_there() -> None:
    """docs/operations.md: fault, outcome, test."""
    text = (ROOT / "docs/operations.md").read_text()
    named = re.findall(r"`(test_\w+)` in `(tests/[\w/]+\.py)`", text)
    assert len(named) >= 15
    for test, path in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (test, path)
