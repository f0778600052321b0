"""The engine's thread and its mailboxes: routing, leaving, failing, ending."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from core.frontends.loop import EngineLoop, EngineUnavailable, Stream, public_reason
from core.types import Output, Plan, PolicyError, RequestError, SamplingParams, StepReport
from tests.frontends.toys import toy_engine


def run(body: Callable[[], Awaitable[None]]) -> None:
    """One async test, which must end by itself."""

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


async def collect(stream: Stream) -> list[Output]:
    return [output async for outputs in stream for output in outputs]


def report(outputs: Sequence[Output] = (), **fields: Any) -> StepReport:
    zero = dict.fromkeys(("started_s", "ended_s", "num_tokens", "num_sampled", "num_running", "num_waiting"), 0)
    fields = {**zero, "plan": Plan(), "preempted": (), "finished": (), "stage_seconds": {}, "step": 0, **fields}
    return StepReport(outputs=tuple(outputs), **fields)


class ScriptedEngine:
    """Plays step reports in turn, on a clock that a test holds."""

    def __init__(self, reports: Sequence[StepReport], now: Callable[[], float] = time.monotonic):
        self.reports = deque(reports)
        self.waited: list[float] = []
        self.executor = SimpleNamespace(now=now, wait_until=self.waited.append)
        self.aborted: list[int] = []
        self.submitted = 0

    def submit(self, prompt: Sequence[int], params: SamplingParams, **labels: Any) -> int:
        self.submitted += 1
        return self.submitted - 1

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self.submitted and self.reports)

    def step(self) -> StepReport:
        return self.reports.popleft()


class running:
    """A loop that is stopped at the end, with nothing left in it."""

    def __init__(self, engine: Any, **options: Any):
        self.loop = EngineLoop(engine, **options)

    async def __aenter__(self) -> EngineLoop:
        self.loop.start()
        return self.loop

    async def __aexit__(self, *exc: object) -> None:
        assert await self.loop.stop()
        assert self.loop.num_open == 0


def test_every_stream_gets_its_own_outputs_in_order() -> None:
    """Sixteen requests at once: each gets as many tokens as it asked for, and the text it gets alone."""

    async def body() -> None:
        engine = toy_engine()
        alone = toy_engine()
        async with running(engine) as loop:
            streams = [loop.submit([[65 + i] * (i + 1)], params(5 + i)) for i in range(16)]
            answers = await asyncio.gather(*map(collect, streams))
            assert loop.num_open == 0
        for i, outputs in enumerate(answers):
            assert {output.request_id for output in outputs} == {streams[i].ids[0]}
            alone.submit([65 + i] * (i + 1), params(5 + i))
            expected = [
                token for _ in iter(alone.has_work, False) for out in alone.step().outputs for token in out.token_ids
            ]
            assert expected == [token for output in outputs for token in output.token_ids]
            assert [output.finish_reason for output in outputs if output.finish_reason] == ["length"]
        engine.assert_idle()

    run(body)


def test_one_call_to_the_event_loop_a_step() -> None:
    """However many streams are open, a step crosses to asyncio once."""

    async def body() -> None:
        engine = toy_engine()
        async with running(engine) as loop:
            calls = []
            post = loop._post
            loop._post = lambda *args: (calls.append(args), post(*args))  # type: ignore[method-assign]
            streams = [loop.submit([[65]], params(20)) for _ in range(32)]
            await asyncio.gather(*map(collect, streams))
        assert len(calls) <= engine.stats()["steps"]

    run(body)


def test_an_idle_loop_sleeps() -> None:
    """Without work no step runs; a submit wakes the thread at once."""

    async def body() -> None:
        engine = toy_engine()
        async with running(engine) as loop:
            await collect(loop.submit([[65]], params(3)))
            steps, cpu = engine.stats()["steps"], time.process_time()
            await asyncio.sleep(0.3)
            assert engine.stats()["steps"] == steps
            assert time.process_time() - cpu < 0.1
            started = time.monotonic()
            await collect(loop.submit([[65]], params(1)))
            assert time.monotonic() - started < 0.5

    run(body)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_consumer_that_leaves_aborts(after: int) -> None:
    """Before the first token, after one batch, after three: the engine forgets the request and runs no step for it."""

    async def body() -> None:
        engine = toy_engine(delay_s=0.002)
        async with running(engine) as loop:
            with loop.submit([[65] * 40, [66]], params(5000)) as stream:
                for _ in range(after):
                    await anext(stream)
            assert loop.num_open == 0
            until = time.monotonic() + 1
            while engine.has_work():
                assert time.monotonic() < until
                await asyncio.sleep(0.005)
            engine.assert_idle()
            stream.close()
            loop.abort(stream.ids[0])
            loop.abort(999)

    run(body)


def test_branches_are_choices() -> None:
    """A stream of two prompts with three branches each has choices 0 to 5, and ends when all have."""

    async def body() -> None:
        async with running(toy_engine()) as loop:
            stream = loop.submit([[65], [66]], SamplingParams(max_tokens=4, seed=1, n=3))
            outputs = await collect(stream)
            assert sorted(stream.choice(output) for output in outputs if output.finish_reason) == [0, 1, 2, 3, 4, 5]
            assert sum(len(output.token_ids) for output in outputs) == 24

    run(body)


def test_a_failing_engine_ends_every_stream() -> None:
    """Open streams get an error, new requests too; the loop says why, without folders; the exception is kept."""

    async def body() -> None:
        engine = toy_engine(delay_s=0.002, max_num_seqs=2)
        loop = EngineLoop(engine)
        loop.start()
        streams = [loop.submit([[65]], params(5000)) for _ in range(4)]
        await anext(streams[0])
        engine.executor.fail = PolicyError("x 1: allocator=mine reserve: no /home/me/secret/file at 0x7f00deadbeef")
        answers = await asyncio.gather(*map(collect, streams))
        assert [outputs[-1].finish_reason for outputs in answers] == ["error"] * 4
        await loop.failed.wait()
        assert not loop.healthy
        assert loop.reason == "the engine stopped: x 1: allocator=mine reserve: no <path> at <address>"
        assert answers[0][-1].error == loop.reason
        with pytest.raises(EngineUnavailable, match="allocator=mine"):
            loop.submit([[65]], params(1))
        assert loop.failure is engine.executor.fail
        assert loop.num_open == 0
        assert await loop.stop()

    run(body)


def test_any_exception_stops_the_loop() -> None:
    """An exception of no known kind is not shown, only named."""

    async def body() -> None:
        engine = toy_engine(fail=ValueError("secret"))
        loop = EngineLoop(engine)
        loop.start()
        outputs = await collect(loop.submit([[65]], params(1)))
        assert outputs[-1].error == "the engine stopped: ValueError (see the server's log)"
        await loop.stop()

    run(body)


def test_an_observer_of_steps_that_fails_stops_the_loop() -> None:
    """Nobody waits for ever because of an exception between two steps."""

    async def body() -> None:
        def broken(_: StepReport) -> None:
            raise KeyError("x")

        loop = EngineLoop(toy_engine(), on_step=broken)
        loop.start()
        outputs = await collect(loop.submit([[65]], params(1)))
        assert outputs[-1].finish_reason == "error"
        await loop.stop()

    run(body)


def test_drain_lets_requests_finish() -> None:
    """Within the grace an open request ends as usual and new ones are refused."""

    async def body() -> None:
        engine = toy_engine(delay_s=0.002)
        async with running(engine) as loop:
            answer = asyncio.create_task(collect(loop.submit([[65]], params(50))))
            await asyncio.sleep(0.01)
            draining = asyncio.create_task(loop.drain(10))
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailable, match="shutting down"):
                loop.submit([[65]], params(1))
            await draining
            outputs = await answer
            assert outputs[-1].finish_reason == "length"
            assert sum(len(output.token_ids) for output in outputs) == 50

    run(body)


def test_drain_cuts_what_outlives_the_grace() -> None:
    """After the grace an open stream gets one last output that says so."""

    async def body() -> None:
        engine = toy_engine(delay_s=0.002)
        async with running(engine) as loop:
            answer = asyncio.create_task(collect(loop.submit([[65]], params(5000))))
            started = time.monotonic()
            await loop.drain(0.1)
            outputs = await answer
            assert time.monotonic() - started < 1
            assert (outputs[-1].finish_reason, outputs[-1].error) == ("abort", "the server is shutting down")
        engine.assert_idle()

    run(body)


def test_stop_ends_the_thread_while_busy() -> None:
    """No thread is left, and the engine holds nothing."""

    async def body() -> None:
        engine = toy_engine(delay_s=0.002)
        async with running(engine) as loop:
            streams = [loop.submit([[65]], params(5000)) for _ in range(8)]
            await anext(streams[0])
        assert not [thread for thread in threading.enumerate() if thread.name == "engine"]
        engine.assert_idle()

    run(body)


def test_all_prompts_or_none() -> None:
    """One bad prompt of three: the error names it, and the others are not run."""

    async def body() -> None:
        engine = toy_engine()
        async with running(engine) as loop:
            with pytest.raises(RequestError, match="cannot be empty"):
                loop.submit([[65], [], [66]], params(5000))
            assert loop.num_open == 0
            while engine.has_work():
                await asyncio.sleep(0.01)
        engine.assert_idle()

    run(body)


def test_a_refusal_is_seen_before_any_token() -> None:
    """``admitted`` tells a refused request from one that waits in the queue, which it does not hold up."""

    async def body() -> None:
        engine = toy_engine(num_blocks=8, max_num_seqs=1, delay_s=0.002)
        async with running(engine) as loop:
            first = loop.submit([[65]], params(100))
            waits = loop.submit([[65]], params(100))
            refused = loop.submit([[65] * 100], params(100))
            assert list(await waits.admitted()) == []
            (output,) = await refused.admitted()
            assert output.finish_reason == "refused"
            assert "13 KV blocks" in output.error
            assert await anext(refused) == [output]
            first.close()
            assert (await collect(waits))[-1].finish_reason == "length"

    run(body)


def test_a_waiting_plan_is_asked_again_on_the_real_clock() -> None:
    """The thread sleeps until ``wait_until``, and not longer."""

    async def body() -> None:
        until = time.monotonic() + 0.15
        done = Output(0, 0, 0, (1,), "x", finish_reason="stop")
        engine = ScriptedEngine([report(wait_until=until), report([done])])
        async with running(engine) as loop:
            assert await collect(loop.submit([[65]], params(1))) == [done]
            assert until <= time.monotonic() < until + 0.5
            assert engine.waited == []

    run(body)


def test_a_virtual_clock_is_moved() -> None:
    """An hour on a clock that stands still takes no time."""

    async def body() -> None:
        done = Output(0, 0, 0, (1,), "x", finish_reason="stop")
        engine = ScriptedEngine([report(wait_until=3600.0), report([done])], now=lambda: 0.0)
        async with running(engine) as loop:
            assert await collect(loop.submit([[65]], params(1))) == [done]
            assert engine.waited == [3600.0]

    run(body)


def test_a_new_request_ends_a_wait() -> None:
    """A plan that waits for long is asked again when something arrives."""

    async def body() -> None:
        done = [Output(i, i, 0, (1,), "x", finish_reason="stop") for i in (0, 1)]
        engine = ScriptedEngine([report(wait_until=time.monotonic() + 60), report(done)])
        async with running(engine) as loop:
            first = loop.submit([[65]], params(1))
            await asyncio.sleep(0.05)
            second = loop.submit([[65]], params(1))
            assert await collect(first) == done[:1]
            assert await collect(second) == done[1:]

    run(body)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("needs 13 blocks / has 8", "needs 13 blocks / has 8"),
        ("Traceback\n  File x", "Traceback"),
        ("no file /usr/lib/x.py", "no file <path>"),
        ("see http://host/a/b", "see http://host/a/b"),
        ("<obj at 0x7fffdeadbeef>", "<obj at <address>>"),
        ("", "no reason given"),
    ],
)
def test_reasons_are_fit_to_be_shown(text: str, shown: str) -> None:
    """One line, no folders, no addresses."""
    assert public_reason(text) == shown
