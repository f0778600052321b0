"""``python -m tests.soak --minutes 10``: random clients against a small pool for a long time.

Good requests of every kind, turns of sessions, many that are aborted at a random moment, bad ones, ones that fail inside, ones that
nobody reads, bytes that are no HTTP, more than the queue holds. Throughout: no answer but those that are documented, each good text
equal to what the request got alone. At the end: the engine holds nothing, and neither memory since the first fifth, nor threads, nor
descriptors have grown.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

from plugins.allocators.prefix import PrefixAllocator
from plugins.idle.breakeven import BreakEven
from plugins.preemption.swap import Swap
from tests.frontends.toys import Server, toy_engine
from tests.frontends.web import Reply, request_bytes

NUM_CLIENTS = 12
BROKEN = 41
"""``max_tokens`` of requests whose rows fail inside."""
ALLOWED_GROWTH_KB = 12_000
"""Of resident memory between the first fifth and the end: caches of the interpreter and the allocator's own slack."""
BAD: tuple[Any, ...] = (
    {"temperature": -1},
    {"max_tokens": 10**9},
    {"prompt": []},
    {"model": "nobody"},
    {"stop": ["a"] * 9},
    {"logit_bias": {"x": 1}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
    {"nothing": 1},
)


def num_descriptors() -> int:
    """Open files and sockets of this process."""
    return len(os.listdir("/proc/self/fd"))


def resident_kb() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


class Soak:
    """One server and its clients."""

    def __init__(self, seconds: float, seed: int):
        self.engine = toy_engine(
            num_blocks=48, block_size=4, num_swap_blocks=96, max_model_len=160, max_num_seqs=8, max_num_batched_tokens=24,
            max_queue=6, allocator=PrefixAllocator(), preemption=Swap(), idle=BreakEven(), delay_s=0.0005, break_at=BROKEN,
        )  # fmt: skip
        self.server = Server(
            self.engine, client_timeout_s=1.0, request_timeout_s=20, api_keys=["soak-key-0", "soak-key-1"]
        )
        self.until = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.alone: dict[str, str] = {}
        self._seed = seed

    def call(self, body: dict[str, Any], key: int = 0) -> Reply:
        headers = {"content-type": "application/json", "authorization": f"Bearer soak-key-{key}"}
        return Reply(self.server, "POST", "/v1/completions", body, headers)

    def learn(self) -> None:
        """What twenty requests get when nobody else is there."""
        for i in range(20):
            body = self.good(random.Random(i))
            reply = self.call(body)
            assert reply.status == 200, reply.data
            self.alone[json.dumps(body)] = text_of(reply)

    def good(self, draw: random.Random) -> dict[str, Any]:
        prompt = draw.choice("abcd") * draw.randint(1, 30) + draw.choice("xyz")
        return {
            "model": "toy", "prompt": prompt, "max_tokens": draw.randint(1, 40), "seed": draw.randint(0, 3),
            "temperature": draw.choice([0, 1]), "n": draw.choice([1, 1, 2]), "stream": draw.random() < 0.5,
        }  # fmt: skip

    def client(self, number: int) -> None:
        """Until the time is up."""
        draw = random.Random(self._seed * 1000 + number)
        while time.monotonic() < self.until:
            try:
                kind = draw.choices(("good", "leaves", "bad", "hostile", "broken", "unread"), (50, 30, 8, 8, 2, 2))[0]
                getattr(self, f"_{kind}")(draw)
                self.counts[kind] += 1
            except Exception as error:
                self.wrong.append(f"client {number}: {type(error).__name__}: {error}")

    def _good(self, draw: random.Random) -> None:
        written = draw.choice(list(self.alone))
        body = json.loads(written)
        key, turns = draw.randint(0, 1), 1
        if draw.random() < 0.3:  # turns of one of a few sessions
            body["session_id"] = draw.choice("abcdef")
            if body["n"] == 1:
                body["stall_s"] = draw.choice([0.01, 0.3, 60])
                turns = draw.randint(1, 3)
        for _ in range(turns):
            reply = self.call(body, key)
            self.counts[f"status {reply.status}"] += 1
            if reply.status == 429:
                assert reply.headers["retry-after"]
                time.sleep(draw.random() * 0.05)
            elif reply.status != 200 or text_of(reply) != self.alone[written]:
                self.wrong.append(f"{json.dumps(body)} got {reply.status} {reply.data[:300]!r}")

    def _leaves(self, draw: random.Random) -> None:
        data = with_key(request_bytes({**self.good(draw), "max_tokens": 100}))
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=10) as sock:
            sock.sendall(data[: draw.randint(1, len(data))] if draw.random() < 0.3 else data)
            time.sleep(draw.random() ** 3 * 0.3)
            if draw.random() < 0.3:
                sock.settimeout(0.05)
                try:
                    sock.recv(draw.randint(1, 2000))
                except TimeoutError:
                    self.counts["left without a byte"] += 1

    def _bad(self, draw: random.Random) -> None:
        reply = self.call({**self.good(draw), **draw.choice(BAD)})
        if not 400 <= reply.status < 500:
            self.wrong.append(f"a bad request got {reply.status} {reply.data[:300]!r}")

    def _broken(self, draw: random.Random) -> None:
        reply = self.call({**self.good(draw), "max_tokens": BROKEN})
        if b"the row has no numbers" not in reply.data and reply.status != 429:
            self.wrong.append(f"a request that fails inside got {reply.status} {reply.data[:300]!r}")

    def _hostile(self, draw: random.Random) -> None:
        data = bytearray(with_key(request_bytes(self.good(draw))))
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=10) as sock:
            sock.sendall(data)
            sock.settimeout(5)
            try:
                status = sock.recv(64).split(b" ")[1:2]
            except (TimeoutError, ConnectionResetError):
                status = []
        if status and status[0].startswith(b"5"):
            self.wrong.append(f"{bytes(data)!r} got {status[0]!r}")

    def _unread(self, draw: random.Random) -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", self.server.port))
            sock.sendall(with_key(request_bytes({**self.good(draw), "max_tokens": 120, "n": 4, "stream": True})))
            time.sleep(0.5)

    def run(self) -> list[str]:
        """What is wrong, nothing if all is well."""
        self.learn()
        early_descriptors = num_descriptors()
        began = time.monotonic()
        threads = [threading.Thread(target=self.client, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        memory_kb = []
        for _ in range(5):
            time.sleep((self.until - began) / 5)
            gc.collect()
            memory_kb.append(resident_kb())
        for thread in threads:
            thread.join()
        self.engine.end_sessions()
        self.call({"model": "toy", "prompt": "x", "max_tokens": 1})  # wakes the engine
        self.server.wait_idle(10)
        time.sleep(2)  # as long as a connection that nobody reads may be held
        gc.collect()
        if num_descriptors() > early_descriptors + 2:
            self.wrong.append(f"{num_descriptors() - early_descriptors} descriptors more than before")
        memory_kb.append(resident_kb())
        grown_kb = memory_kb[-1] - memory_kb[0]
        if grown_kb > ALLOWED_GROWTH_KB:
            self.wrong.append(f"memory grew by {grown_kb} kB")
        if len(self.alone) != 20 or self.server.frontend._session._loop.num_open:
            self.wrong.append("something is left open")
        if self.counts["status 200"] < 20:
            self.wrong.append(f"hardly anything was served: {dict(self.counts)}")
        port = self.server.port
        self.server.stop()
        self.engine.assert_idle()
        left = [thread.name for thread in threading.enumerate() if thread.name in ("engine", "lobby")]
        self.wrong += [f"the thread {name} is left" for name in left]
        socket.create_server(("127.0.0.1", port)).close()
        steps = self.engine.executor.num_steps
        self.counts |= {f"sessions {name}": number for name, number in self.engine.sessions.counts.items()}
        print(
            f"{time.monotonic() - began:.0f} s, {steps} steps, memory {grown_kb:+d} kB {memory_kb}, {dict(sorted(self.counts.items()))}"
        )
        return self.wrong


def with_key(data: bytes) -> bytes:
    """The request of somebody who has a key."""
    return data.replace(b"Host: x\r\n", b"Host: x\r\nAuthorization: Bearer soak-key-1\r\n", 1)


def text_of(reply: Reply) -> str:
    """All of its text, by choice."""
    found: dict[int, str] = {}
    parts = reply.events() if reply.data.startswith(b"data: ") else [reply.json()]
    for part in parts:
        for choice in part["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return json.dumps(sorted(found.items()))


def main() -> int:
    """1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = Soak(options.minutes * 60, options.seed).run()
    for line in wrong[:20]:
        print("WRONG", line, file=sys.stderr)
    print(f"{len(wrong)} faults")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
