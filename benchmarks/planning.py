"""Microseconds that a scheduler takes to plan a step: ``python -m benchmarks.planning [--scheduler NAME ...]``.

Two loads: 256 running and 1,000 waiting sequences, 32 and 100. Most of those that run decode, four are in the middle of their
prompts, two rows are free and newcomers fit, so every scheduler also has to find whom to start. Clients, priorities, deadlines
and predictions differ, so that every order has work to do. Best and median of many calls; the promise is about the median on an
idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from core.blocks import BlockPool
from core.config import compose, instantiate
from core.cost import CostModel
from core.executors.toy import ToyExecutor
from core.state import Sequence, State, Status
from core.types import EngineInfo, Limits, Request, SamplingParams

SCHEDULERS = ("static", "fcfs", "chunked", "priority", "sjf", "prefix_aware", "fair", "slo")
LOADS = ((256, 1000, 400.0), (32, 100, 60.0))
BLOCK, TOKENS = 16, 2048


def loaded_state(num_running: int, num_waiting: int) -> tuple[State, EngineInfo]:
    """A state with so many sequences, made by core's own calls, and what ``setup`` is told."""
    limits = Limits(
        block_size=BLOCK,
        num_blocks=40_000,
        num_swap_blocks=0,
        max_model_len=TOKENS,
        max_num_seqs=num_running + 2,
        max_num_batched_tokens=TOKENS,
    )
    pool = BlockPool(limits.num_blocks, BLOCK)
    model = ToyExecutor().load()
    cost = CostModel.of(model, 1e9, 1e9, 1e8)
    state = State(limits, pool, cost)
    rng = np.random.default_rng(0)
    for i in range(num_running + num_waiting):
        seq = _sequence(i, rng, pool)
        state.add(seq)
        if i < num_running:
            _run(state, seq, decodes=i >= 4)
    state.look(1000.0, 1)
    head = state.waiting[: limits.max_num_seqs]
    state.cached_tokens.update({view.id: int(rng.integers(0, view.num_tokens)) for view in head})
    return state, EngineInfo(limits=limits, model=model, pool=pool, cost=cost, seed=0)


def _sequence(i: int, rng: np.random.Generator, pool: BlockPool) -> Sequence:
    request = Request(
        id=i,
        prompt_token_ids=tuple(range(int(rng.integers(50, 400)))),
        params=SamplingParams(max_tokens=int(rng.integers(50, 400))),
        arrival_s=900.0 + i / 20,
        priority=int(rng.integers(0, 4)),
        client_id=f"client-{int(rng.integers(0, 20))}",
        deadline_s=950.0 + i / 20 + float(rng.integers(0, 100)),
        tpot_s=1000.0,
    )
    return Sequence(request, request.params, 0, pool, id=i)


def _run(state: State, seq: Sequence, decodes: bool) -> None:
    seq.table += state.pool.take(-(-len(seq.tokens) // BLOCK) + 1)
    state.move(seq, Status.RUNNING)
    if decodes:
        seq.append(1, 990.0)
        seq.append(1, 995.0)
    seq.set_computed(len(seq.tokens) - (1 if decodes else 20))


def measure(name: str, num_running: int, num_waiting: int, calls: int) -> tuple[float, float, int]:
    """Best and median microseconds of ``plan_step``, and the chunks it planned."""
    state, info = loaded_state(num_running, num_waiting)
    scheduler: Any = instantiate(compose([f"scheduler={name}"]).scheduler, f"scheduler={name}")
    if hasattr(scheduler, "setup"):
        scheduler.setup(info)
    plan = scheduler.plan_step(view=state.view)
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        scheduler.plan_step(view=state.view)
        times.append(1e6 * (time.perf_counter() - started))
    return min(times), statistics.median(times), len(plan.chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", nargs="*", default=list(SCHEDULERS))
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{'scheduler':<14}{'running + waiting':>20}{'best µs':>10}{'median µs':>11}{'limit µs':>10}{'chunks':>8}")
    for name in arguments.scheduler:
        for running, waiting, limit in LOADS:
            best, median, chunks = measure(name, running, waiting, arguments.calls)
            print(f"{name:<14}{f'{running} + {waiting}':>20}{best:>10.0f}{median:>11.0f}{limit:>10.0f}{chunks:>8}")


if __name__ == "__main__":
    main()
