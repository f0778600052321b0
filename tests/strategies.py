"""Hypothesis strategies for workloads, in one place."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st

from core.hookspecs import hookimpl
from core.types import Chunk, Plan, View
from plugins.allocators.naive import NaiveAllocator
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.preemption.breakeven import BreakEven
from plugins.preemption.recompute import Recompute
from plugins.preemption.swap import Swap
from plugins.schedulers.chunked import ChunkedScheduler
from tests.toy import VOCAB, Work

preemptions = st.sampled_from([Recompute, Swap, BreakEven])


@attrs.define(eq=False)
class ByRank:
    """A fixed order of all sequences, in which those in front preempt those behind, newcomers included.

    It preempts with every allocator, also one whose running sequences never ask for more.
    """

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        chunks, budget, running = [], view.max_num_batched_tokens, len(view.running)
        rows = {sequence.id for sequence in view.running}  # one that waits may hold blocks, too
        for sequence in sorted([*view.running, *view.waiting], key=lambda s: (s.id * 7 % 5, s.id)):
            running += sequence.id not in rows
            if running > view.max_num_seqs:
                running -= 1
                continue
            missing = sequence.num_missing_tokens - view.cached_tokens.get(sequence.id, 0)
            n = min(missing, budget)
            if n:
                chunks.append(Chunk(sequence.id, n, True))
                budget -= n
        return Plan(tuple(chunks))


ALLOCATORS = {
    "paged": lambda draw: PagedAllocator(),
    "naive": lambda draw: NaiveAllocator(
        reserve=draw(st.sampled_from(["limit", "declared", "pow2", "oracle"])),
        fit=draw(st.sampled_from(["first", "best"])),
    ),
    "prefix": lambda draw: PrefixAllocator(
        evict=draw(st.sampled_from(["lru", "lfu", "cost"])), host=draw(st.booleans())
    ),
}


@st.composite
def works(draw: st.DrawFn, max_prompt: int = 24, max_output: int = 16, may_abort: bool = True) -> Work:
    # one of two beginnings, so that prompts of one workload have prefixes in common; then anything
    shared = list(range(draw(st.sampled_from([0, 0, 100])), 200))[: draw(st.integers(0, max_prompt))]
    rest = draw(
        st.lists(st.integers(0, VOCAB - 1), min_size=0 if shared else 1, max_size=max(1, max_prompt - len(shared)))
    )
    prompt = (shared + rest)[:max_prompt]
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    temperature = draw(st.sampled_from([0.0, 0.0, 0.9])) if n == 1 else 0.9
    return Work(
        prompt=tuple(prompt),
        max_tokens=draw(st.integers(1, max_output)),
        temperature=temperature,
        seed=draw(st.integers(0, 5)),
        n=n,
        salt=draw(st.sampled_from(["", "", "", "b"])),
        arrives=draw(st.integers(0, 12)),
        aborts=draw(st.sampled_from([None, None, None, None, 0, 3, 9, 20])) if may_abort else None,
    )


workloads = st.lists(works(), min_size=1, max_size=6)


@st.composite
def contests(draw: st.DrawFn, allocator: str = "paged") -> tuple[list[Work], dict]:
    """Requests and sizes under which they compete for one kind of allocator: the largest fits alone, little more does."""
    max_num_seqs = draw(st.integers(1, 6))
    work = [attrs.evolve(w, n=min(w.n, max_num_seqs), recorded=w.max_tokens) for w in draw(workloads)]
    plugin = ALLOCATORS[allocator](draw)
    block_size = draw(st.integers(1, 5))
    largest = max(-(-(len(w.prompt) + w.max_tokens) // block_size) for w in work)
    num_blocks = max(2, largest + draw(st.integers(0, 3)))
    max_model_len = 64
    if allocator == "naive":  # room for one or two slots: what is more than declared must fit too
        max_model_len = max(len(w.prompt) + w.max_tokens for w in work) + draw(st.integers(0, 5))
        num_blocks = max(2, -(-max_model_len // block_size) * draw(st.integers(1, 3)) + draw(st.integers(0, 3)))
    return work, {
        "allocator": plugin,
        "scheduler": draw(st.sampled_from([ChunkedScheduler, ByRank]))(),
        "block_size": block_size,
        "num_blocks": num_blocks,
        "num_swap_blocks": draw(st.sampled_from([0, 2, 40, 40])),
        "max_num_batched_tokens": draw(st.integers(1, 24)),
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "link_bytes_per_s": draw(st.sampled_from([1e3, 1e6, 1e9])),
        "preemption": draw(preemptions)(),
    }
