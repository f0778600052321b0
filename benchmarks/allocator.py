"""What an allocator costs a step at 256 running sequences, for pools of 1,000 to 1,000,000 blocks.

    python -m benchmarks.allocator [--steps 400] [--repeat 5]

No engine: sequences of up to 48 tokens decode in blocks of 16, and each step 2 to 10 of them end and are replaced, so that a step
has about 22 new blocks and 6 prompts and releases. ``reserve`` + ``commit`` + ``release`` are timed together; shown is the
least of the
repetitions' medians (other work on the machine only adds). Prompts are random, so that prefix has no hits. The last line is machine
readable: each allocator's worst figure over the sizes, the ratio of the largest pool to the smallest, what prefix costs over paged.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from core.blocks import BlockPool
from core.cost import CostModel
from core.state import Sequence, State, Status
from core.types import Chunk, EngineInfo, Limits, ModelInfo, Plan, Release, Request, SamplingParams
from plugins.allocators.naive import NaiveAllocator
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator

SIZES = (1_000, 100_000, 1_000_000)
RUNNING = 256
REPLACED = 2
BLOCK = 16
LONGEST = 48
MODEL = ModelInfo(
    name="none", num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, hidden_size=16, vocab_size=50_000, max_position=LONGEST,
    num_parameters=10_000, dtype="int64", kv_bytes_per_token=8,
)  # fmt: skip
ALLOCATORS: dict[str, Any] = {
    "naive": lambda: NaiveAllocator(reserve="declared"),
    "paged": PagedAllocator,
    "prefix": PrefixAllocator,
}


class Bench:
    """The part of an engine that an allocator sees, moved on by hand."""

    def __init__(self, allocator: Any, num_blocks: int):
        self.allocator = allocator
        self.limits = Limits(
            block_size=BLOCK, num_blocks=num_blocks, num_swap_blocks=0, max_model_len=LONGEST, max_num_seqs=RUNNING,
            max_num_batched_tokens=10**6,
        )  # fmt: skip
        self.pool = BlockPool(num_blocks, BLOCK)
        cost = CostModel.of(MODEL, 1e9, 1e12)
        self.state = State(self.limits, self.pool, cost)
        allocator.setup(
            EngineInfo(limits=self.limits, model=MODEL, pool=self.pool, cost=cost, seed=0, swap=self.state.swap)
        )
        self.ids = itertools.count()
        self.rng = random.Random(0)
        self.commits = hasattr(allocator, "commit")
        for _ in range(RUNNING):
            self._arrive()

    def _arrive(self) -> None:
        prompt = tuple(self.rng.choices(range(50_000), k=self.rng.randrange(1, 9)))
        params = SamplingParams(max_tokens=LONGEST - len(prompt))
        request = Request(id=next(self.ids), prompt_token_ids=prompt, params=params, arrival_s=0.0)
        self.state.add(Sequence(request, params, 0, self.pool, id=request.id))

    def step(self) -> float:
        """One step; seconds in the allocator."""
        state, allocator = self.state, self.allocator
        views = [*state.running, *state.waiting]
        plan = Plan(tuple([Chunk(v.id, v.num_tokens - v.num_computed_tokens, True) for v in views]))
        started = time.perf_counter()
        leases = allocator.reserve(plan, state.readonly_views)
        spent = time.perf_counter() - started
        for view, lease in zip(views, leases, strict=True):
            seq = state.sequences[view.id]
            seq.table.extend(block for _, block in lease.blocks)
            if seq.status is not Status.RUNNING:
                state.move(seq, Status.RUNNING)
            seq.set_computed(view.num_tokens)
            seq.append(7, 0.0)
        started = time.perf_counter()
        if self.commits:
            allocator.commit(views)
        spent += time.perf_counter() - started
        over = [view for view in views if view.num_tokens >= LONGEST]
        over += [view for view in views if view.num_tokens < LONGEST][: max(0, REPLACED - len(over))]
        releases = tuple([Release(view.id, state.sequences[view.id].device_blocks(), "finish") for view in over])
        started = time.perf_counter()
        allocator.release(releases)
        spent += time.perf_counter() - started
        for view in over:
            seq = state.sequences[view.id]
            seq.table.clear()
            state.move(seq, Status.FINISHED)
            self._arrive()
        return spent


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps measured for each size (default 400)")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions (default 5)")
    given = parser.parse_args()
    shown = Table(title=f"µs a step at {RUNNING} running: reserve + commit + release", title_justify="left")
    for column in ("allocator", *(f"{size:,} blocks" for size in SIZES)):
        shown.add_column(column, justify="right")
    took: dict[str, list[float]] = {name: [] for name in ALLOCATORS}
    for size in SIZES:
        benches = {name: Bench(make(), size) for name, make in ALLOCATORS.items()}
        runs: dict[str, list[float]] = {name: [] for name in benches}
        for _ in range(given.repeat):  # in turns: a busy machine is busy for all of them
            for name, bench in benches.items():
                bench.step()
                runs[name].append(statistics.median([bench.step() for _ in range(given.steps)]) * 1e6)
        for name, values in runs.items():
            took[name].append(min(values))
    for name, values in took.items():
        shown.add_row(name, *(f"{value:.0f}" for value in values))
    Console().print(shown)
    over = max(prefix - paged for prefix, paged in zip(took["prefix"], took["paged"], strict=True))
    worst = " ".join(f"{name}_us={max(values):.1f}" for name, values in took.items())
    flat = " ".join(f"{name}_flat={values[-1] / values[0]:.2f}" for name, values in took.items())
    print(
        f"allocator: running={RUNNING} {worst} {flat} prefix_over_paged_us={over:.1f} allowed_us={30 + 0.5 * RUNNING:.0f}"
    )


if __name__ == "__main__":
    main()
