"""What each allocator makes of the same requests: waste, concurrency, sharing and prompt tokens computed.

    python -m benchmarks.sharing [--requests 900]

Everything is counted from the pool of an engine on ``executor=toy`` with a virtual clock, so the figures are the same on
every machine.

* chat: prompts and outputs of lognormal length with ShareGPT's means (161 and 338 tokens: PagedAttention paper, figure 11),
  blocks of 16,
  max_model_len 4096, max_tokens 1,024, all requests at once into a pool of 29 slots of 4,096 tokens; means over the steps in which
  requests wait. By arithmetic ``limit`` runs 29 of them, and the pool holds 29 times the mean of what a sequence has written
  over its life: that figure is printed beside the measured one. External waste is free blocks that no waiting request
  fits; what is free beyond it waits for the head of the queue, since the scheduler skips nobody
* fan-out: n = 8 branches of 256 tokens from a prompt of 4,096: (4,096 + 8 x 256) = 6,144 tokens shared, 34,816 apart. (``declared``
  also reserves the last token drawn, which has no KV: a block more for each branch.)
* agent: 20 steps that begin with 2,000 tokens and grow by 300, of which 79 are the model's own: 97,000 submitted, 7,700 distinct

The last line is machine readable.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from rich.console import Console
from rich.table import Table

import core
from core.engine import Engine
from core.types import MemoryReport, SamplingParams

BLOCK, SLOT, MAX_TOKENS = 16, 4096, 1024
NAMES = {
    "naive limit": ("allocator=naive",),
    "naive declared": ("allocator=naive", "allocator.reserve=declared"),
    "naive pow2": ("allocator=naive", "allocator.reserve=pow2"),
    "naive oracle": ("allocator=naive", "allocator.reserve=oracle"),
    "paged": ("allocator=paged",),
    "prefix": ("allocator=prefix",),
}


def engine(
    *overrides: str, num_blocks: int, max_num_seqs: int = 1024, budget: int = 8192, longest: int = SLOT
) -> Engine:
    """An engine on the toy model with a virtual clock."""
    sizes = (
        "executor=toy", "executor.step_seconds=1", f"executor.max_position={longest}", f"max_model_len={longest}",
        f"cache.block_size={BLOCK}", f"cache.num_blocks={num_blocks}", f"max_num_seqs={max_num_seqs}",
        f"max_num_batched_tokens={budget}",
    )  # fmt: skip
    return core.build([*sizes, *overrides]).engine


def lengths(num: int, mean: float, sigma: float, longest: int, rng: np.random.Generator) -> list[int]:
    """Lognormal lengths with this mean, in tokens, from 1 to ``longest``."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return np.clip(np.rint(drawn), 1, longest).astype(int).tolist()


def params(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **fields)


@attrs.frozen
class Chat:
    """Means over the steps in which something waits, so that the pool is as full as the allocator can make it."""

    concurrency: float
    waste_of_used: float  # internal waste over written + internal waste
    used_of_pool: float
    external_of_pool: float
    to_write_of_pool: float


def workload(num_requests: int) -> tuple[list[int], list[int], np.random.Generator]:
    """Prompt and output lengths of the chat requests."""
    rng = np.random.default_rng(0)
    prompts = lengths(num_requests, 161, 1.0, SLOT - MAX_TOKENS, rng)
    return prompts, lengths(num_requests, 338, 0.9, MAX_TOKENS, rng), rng


def used_by_slots(num_requests: int) -> float:
    """What 29 slots hold of the pool, by arithmetic: a sequence is in its slot for one step an output token, and has written its
    prompt and the tokens before.
    """
    prompts, outputs, _ = workload(num_requests)
    held = sum(o * p + o * (o - 1) // 2 for p, o in zip(prompts, outputs, strict=True))
    return held / sum(outputs) / SLOT


def chat(overrides: Sequence[str], num_requests: int) -> Chat:
    """All requests at once; ``MAX_TOKENS`` is what the client allows, the recorded length is what the answer gets."""
    prompts, outputs, rng = workload(num_requests)
    one = engine(*overrides, num_blocks=29 * SLOT // BLOCK)
    ends: dict[int, int] = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = tuple(rng.integers(0, 300, prompt).tolist())
        ends[one.submit(tokens, params(MAX_TOKENS), recorded_output_tokens=output)] = output
    seen: list[tuple[int, MemoryReport]] = []
    made = dict.fromkeys(ends, 0)
    while one.has_work():
        report = one.step()
        for out in report.outputs:
            made[out.request_id] += len(out.token_ids)
            if out.finish_reason is None and made[out.request_id] >= ends[out.request_id]:
                one.abort(out.request_id)  # the answer ends by itself long before max_tokens: as with a stop token
        if report.num_waiting and report.memory is not None and report.step > 30:
            seen.append((report.num_running, report.memory))
    one.close()
    running = np.array([num for num, _ in seen])
    terms = ("written", "internal_waste", "external_waste", "to_write")
    memory = {name: np.array([getattr(m, name) for _, m in seen], float) for name in terms}
    pool = seen[0][1].pool
    written, waste = memory["written"].mean(), memory["internal_waste"].mean()
    return Chat(
        float(running.mean()), waste / (written + waste), written / pool, memory["external_waste"].mean() / pool,
        memory["to_write"].mean() / pool,
    )  # fmt: skip


def fan_out(overrides: Sequence[str]) -> int:
    """Most tokens' blocks held at once for n = 8 branches of 256 tokens from a prompt of 4,096, less the last token's."""
    one = engine(*overrides, num_blocks=4096, longest=4096 + 512)
    one.submit(tuple(i % 300 for i in range(4096)), params(257, n=8))  # the last token drawn has no KV: 256 are written
    most = 0
    while one.has_work():
        report = one.step()
        most = max(most, report.memory.reserved if report.memory else 0)
    one.close()
    return most


def agent(overrides: Sequence[str]) -> tuple[int, int, int]:
    """Submitted prompt tokens, those found in the cache, and output tokens that came back as prompt."""
    one = engine(*overrides, num_blocks=1024, longest=16_384, max_num_seqs=4)
    rng = np.random.default_rng(1)
    history = rng.integers(0, 300, 2000).tolist()
    submitted = cached = own = 0
    for step in range(20):
        request = one.submit(tuple(history), params(79))
        answer: list[int] = []
        while one.has_work():
            for out in one.step().outputs:
                assert out.request_id == request
                answer += out.token_ids
                found = out.num_cached_tokens
        submitted, cached = submitted + len(history), cached + found
        if step < 19:
            own += len(answer)
            history += answer + rng.integers(0, 300, 300 - len(answer)).tolist()
    one.close()
    return submitted, cached, own


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=900, help="requests of the chat experiment (default 900)")
    given = parser.parse_args()
    console, last = Console(width=110), []
    shown = Table(
        title=f"chat: {given.requests} requests, pool of 29 x {SLOT} tokens, block {BLOCK}", title_justify="left"
    )
    for column in ("allocator", "running", "internal waste of used", "written of pool", "to write", "external waste"):
        shown.add_column(column, justify="right")
    for name, overrides in NAMES.items():
        got = chat(overrides, given.requests)
        shares = (got.waste_of_used, got.used_of_pool, got.to_write_of_pool, got.external_of_pool)
        shown.add_row(name, f"{got.concurrency:.1f}", *(f"{100 * share:.2f} %" for share in shares))
        last.append(f"{name.replace(' ', '_')}_running={got.concurrency:.1f}")
        if name == "naive limit":
            by_hand = used_by_slots(given.requests)
            last.append(f"naive_limit_used_over_arithmetic={got.used_of_pool / by_hand:.3f}")
        if name == "paged":
            last.append(f"paged_waste={got.waste_of_used:.4f}")
    console.print(shown)
    console.print(f"naive limit by arithmetic: 29 running, {100 * by_hand:.2f} % of the pool written")
    shared, apart = fan_out(NAMES["paged"]), fan_out(NAMES["naive declared"])
    console.print(
        f"fan-out of 8 from 4,096 tokens: {shared:,} tokens' blocks with paged, {apart:,} with naive (declared)"
    )
    shown = Table(title="agent of 20 steps", title_justify="left")
    for column in ("allocator", "submitted", "from cache", "computed", "its own outputs, re-sent"):
        shown.add_column(column, justify="right")
    for name in ("paged", "prefix"):
        submitted, cached, own = agent(NAMES[name])
        computed = submitted - cached
        shown.add_row(name, *(f"{n:,}" for n in (submitted, cached, computed, own)))
        last.append(f"agent_{name}_computed={computed}")
    console.print(shown)
    console.print(f"allowed for prefix: 0.85 x 7,700 = {int(0.85 * 7700):,}")
    print("sharing: " + " ".join(last) + f" fan_out_paged={shared} fan_out_naive={apart}")


if __name__ == "__main__":
    main()
