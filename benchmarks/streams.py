"""Many streams at once for minutes: each text must be what its prompt got alone, and memory must stay flat.

    python -m benchmarks.streams [--model toy|tiny|smollm2] [--streams 100] [--minutes 3] [--tokens 48] [group=option ...]

``--streams`` clients ask for one of twelve prompts, again and again, greedily and by seed. Prints requests, tokens/s, answers by status
(429 is allowed: ``max_queue`` is half of the streams beyond ``max_num_seqs``), memory after a quarter of the time and at the end, and
``wrong: N``, the number of answers that were neither right nor 429. Exit code 1 if there is one, or if memory grew by more than 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

from benchmarks.serving import MODELS
from core.config import compose
from core.frontends.http import HttpFrontend
from core.start import start

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "The sea was calm and", "In 1969,", "My favourite recipe is",
    "A list of three colours:", "Dear Sir or Madam,", "Water boils at", "The difference between a cat and a dog is", "2 + 2 =",
    "She opened the door and " * 6,
]  # fmt: skip

SEED = 5
"""With it no draw of 48 tokens of SmolLM2 is closer than 6e-6 to where another token would be drawn (17: 7e-7). Another
batch shape may change a logit in its last bits, and a draw closer than that is no fault of the engine."""


def resident_mb() -> float:
    """Memory of this process, 1e6 bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def body(index: int, num_tokens: int) -> bytes:
    """One of twenty-four requests: a prompt, greedily or drawn with a seed."""
    prompt, drawn = PROMPTS[index % len(PROMPTS)], index >= len(PROMPTS)
    fields = {"model": "default", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    return json.dumps({**fields, "temperature": 0.8 if drawn else 0, "seed": SEED}).encode()


async def ask(port: int, data: bytes) -> tuple[int, str]:
    """Status and text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    status, _, rest = answer.partition(b"\r\n")
    events = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(event) for event in events]
    ended = rest.rstrip().endswith(b"0") and b"data: [DONE]" in rest
    text = "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))
    return int(status.split(b" ")[1]), text if ended else "(not ended) " + text


class Run:
    """One server, its clients and what they got."""

    def __init__(self, port: int, num_tokens: int):
        self.port, self.num_tokens = port, num_tokens
        self.alone: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []

    async def learn(self) -> None:
        for index in range(2 * len(PROMPTS)):
            status, text = await ask(self.port, body(index, self.num_tokens))
            assert status == 200, text
            self.alone.append(text)

    async def client(self, number: int, until: float) -> None:
        draw = random.Random(number)
        while time.monotonic() < until:
            index = draw.randrange(len(self.alone))
            status, text = await ask(self.port, body(index, self.num_tokens))
            self.statuses[status] += 1
            if status == 429:
                await asyncio.sleep(draw.random())
            elif status != 200 or text != self.alone[index]:
                self.wrong.append(f"request {index}: {status} {text!r} instead of {self.alone[index]!r}")

    async def go(self, streams: int, seconds: float) -> tuple[float, float]:
        """Memory after a quarter and at the end."""
        until = time.monotonic() + seconds
        clients = asyncio.gather(*(self.client(i, until) for i in range(streams)))
        await asyncio.sleep(seconds / 4)
        gc.collect()
        early = resident_mb()
        await clients
        gc.collect()
        return early, resident_mb()


def measure(args: argparse.Namespace) -> int:
    """Run, print, give the exit code."""
    spare = max(1, (args.streams - 64) // 2)
    words = [*MODELS[args.model], "max_num_batched_tokens=256", f"max_queue={spare}", *args.overrides]
    started = start(compose(words), say=lambda _: None)
    frontend = HttpFrontend(port=0, grace_s=1)
    frontend.check()
    server: Any = threading.Thread(target=frontend.run, args=(started,))
    with contextlib.redirect_stdout(io.StringIO()):
        server.start()
        frontend.ready.wait()
    run = Run(int(str(frontend.address).rsplit(":", 1)[1]), args.tokens)
    asyncio.run(run.learn())
    early, late = asyncio.run(run.go(args.streams, args.minutes * 60))
    frontend.shutdown()
    server.join()
    started.engine.assert_idle()
    started.engine.close()
    rate = run.statuses[200] * args.tokens / (args.minutes * 60)
    print(f"{args.streams} streams, {args.minutes:g} min: answers {dict(run.statuses)}, {rate:.0f} tokens/s")
    print(f"memory: {early:.0f} MB after a quarter, {late:.0f} MB at the end ({late / early - 1:+.1%})")
    for line in run.wrong[:5]:
        print("WRONG", line, file=sys.stderr)
    print(f"wrong: {len(run.wrong)}")
    return int(bool(run.wrong) or late > 1.05 * early or not run.statuses[200])


def main() -> int:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="smollm2")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("overrides", nargs="*")
    return measure(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
