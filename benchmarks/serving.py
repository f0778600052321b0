"""What HTTP, detokenising and streaming cost: the same requests through ``frontend=replay`` and through the server, turn by turn.

    python -m benchmarks.serving [--model toy|tiny|smollm2] [--requests 64] [--tokens 64] [--concurrency 16] [--repeat 5] [group=option ...]

Both serve one engine in one process, ``--concurrency`` requests in flight. Replay makes no text; the server streams to a load generator
in a process of its own on the same machine, which reads bytes and parses nothing, and whose part of the machine is said. With
``--model toy`` (``executor=toy``, no time per step) there is next to no model: microseconds a token are the figure to read there.

``http_share: X`` is the part of replay's output tokens/s that is lost, the median of the turns; ``http_cpu_share`` the part of the serving
process's CPU seconds that replay does not need, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs

from core.config import compose
from core.frontends.http import HttpFrontend
from core.frontends.replay import ReplayFrontend
from core.start import Started, start
from core.types import SamplingParams
from core.workloads import WorkloadRequest

MODELS = {
    "toy": ["executor=toy", "executor.step_seconds=0"],
    "tiny": ["model=tiny"],
    "smollm2": ["model=smollm2"],
}
PROMPT_TOKENS = 32
_END = b"data: [DONE]\n\n"


@attrs.frozen
class Turn:
    """Seconds on the clock, CPU seconds of the serving process and of the load generator."""

    seconds: float
    cpu_s: float
    load_cpu_s: float = 0.0


@attrs.frozen
class Fixed:
    """Requests of one size, as a workload."""

    num_requests: int
    num_tokens: int
    concurrency: int

    def prompt(self, i: int) -> list[int]:
        return [3 + (i * 7 + k) % 200 for k in range(PROMPT_TOKENS)]

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        params = SamplingParams(max_tokens=self.num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        for i in range(self.num_requests):
            yield WorkloadRequest(prompt_token_ids=tuple(self.prompt(i)), params=params)

    def bodies(self) -> list[bytes]:
        common = {
            "model": "default",
            "max_tokens": self.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        return [json.dumps({**common, "prompt": self.prompt(i)}).encode() for i in range(self.num_requests)]


def replay(started: Started, workload: Fixed) -> Turn:
    """One run without HTTP."""
    began, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        record = ReplayFrontend(workload=workload, progress=False).run(started)
    if record["status"] != "ok":
        raise SystemExit(f"the replay did not end well: {record.get('error')}")
    return Turn(time.perf_counter() - began, time.process_time() - cpu)


# ------------------------------------------------------------------------------------------------ the load generator


async def _client(port: int, bodies: Iterator[bytes]) -> int:
    """Requests one after the other on one connection; gives the events that came."""
    events = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for body in bodies:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        seen = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in seen[:20]:
            raise RuntimeError(seen.decode())
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(65_536)
            if not data or b'"error"' in data:
                raise RuntimeError(data.decode() or "the connection ended")
            events += data.count(b"data: ")
            tail = (tail + data)[-len(_END) - 16 :]
        if _END not in tail:
            raise RuntimeError("a stream ended without [DONE]")
    writer.close()
    return events


async def _load(port: int, bodies: list[bytes], concurrency: int) -> int:
    left = iter(bodies)
    return sum(await asyncio.gather(*(_client(port, left) for _ in range(concurrency))))


def generate(pipe: Any, bodies: list[bytes], concurrency: int) -> None:
    """The process of the load generator: a port comes in, (seconds, CPU seconds, events) go out."""
    while (port := pipe.recv()) is not None:
        began, cpu = time.perf_counter(), time.process_time()
        events = asyncio.run(_load(port, bodies, concurrency))
        pipe.send((time.perf_counter() - began, time.process_time() - cpu, events))


# ------------------------------------------------------------------------------------------------ turns


class Served:
    """The server, in a thread as in a program of its own; up for one turn, because the engine is replay's in the next."""

    def __init__(self, started: Started, pipe: Any):
        self._started, self._pipe = started, pipe

    def turn(self) -> Turn:
        frontend = HttpFrontend(port=0, grace_s=5)
        frontend.check()
        thread = threading.Thread(target=frontend.run, args=(self._started,))
        with contextlib.redirect_stdout(io.StringIO()):
            thread.start()
            frontend.ready.wait()
        cpu = time.process_time()
        self._pipe.send(int(str(frontend.address).rsplit(":", 1)[1]))
        seconds, load_cpu_s, events = self._pipe.recv()
        if not events:
            raise SystemExit("nothing was streamed")
        turn = Turn(seconds, time.process_time() - cpu, load_cpu_s)
        frontend.shutdown()
        thread.join()
        return turn


def compare(started: Started, workload: Fixed, repeat: int) -> list[tuple[Turn, Turn]]:
    """(replay, HTTP) of each turn, after one that is not counted."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    load = context.Process(target=generate, args=(theirs, workload.bodies(), workload.concurrency), daemon=True)
    load.start()
    served = Served(started, ours)
    turns = [(replay(started, workload), served.turn()) for _ in range(repeat + 1)]
    ours.send(None)
    load.join(10)
    return turns[1:]


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    started = start(compose([*MODELS[args.model], "max_num_batched_tokens=512", *args.overrides]), say=lambda _: None)
    workload = Fixed(args.requests, args.tokens, args.concurrency)
    turns = compare(started, workload, args.repeat)
    started.engine.close()
    tokens = args.requests * args.tokens
    for one, other in turns:
        print(f"replay {tokens / one.seconds:9.0f} tokens/s, HTTP {tokens / other.seconds:9.0f} tokens/s")
    middle = statistics.median
    load = middle(http.load_cpu_s / http.seconds for _, http in turns)
    extra = middle((http.cpu_s - plain.cpu_s) / tokens for plain, http in turns)
    print(f"load generator: {load:.0%} of one core; HTTP: {1e6 * extra:.1f} us more CPU a token than replay")
    print(f"http_cpu_share: {middle(1 - plain.cpu_s / http.cpu_s for plain, http in turns):.3f}")
    print(f"http_share: {middle(1 - plain.seconds / http.seconds for plain, http in turns):.3f}")


if __name__ == "__main__":
    main()
