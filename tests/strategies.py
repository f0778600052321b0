"""Hypothesis strategies for workloads, in one place."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st

from plugins.preemption.breakeven import BreakEven
from plugins.preemption.recompute import Recompute
from plugins.preemption.swap import Swap
from tests.toy import VOCAB, Work

preemptions = st.sampled_from([Recompute, Swap, BreakEven])


@st.composite
def works(draw: st.DrawFn, max_prompt: int = 24, max_output: int = 16, may_abort: bool = True) -> Work:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=max_prompt))
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    temperature = draw(st.sampled_from([0.0, 0.0, 0.9])) if n == 1 else 0.9
    return Work(
        prompt=tuple(prompt),
        max_tokens=draw(st.integers(1, max_output)),
        temperature=temperature,
        seed=draw(st.integers(0, 5)),
        n=n,
        arrives=draw(st.integers(0, 12)),
        aborts=draw(st.sampled_from([None, None, None, None, 0, 3, 9, 20])) if may_abort else None,
    )


workloads = st.lists(works(), min_size=1, max_size=6)


@st.composite
def contests(draw: st.DrawFn) -> tuple[list[Work], dict]:
    """Requests and sizes under which they compete: the largest fits alone, little more does."""
    max_num_seqs = draw(st.integers(1, 6))
    work = [attrs.evolve(w, n=min(w.n, max_num_seqs)) for w in draw(workloads)]
    block_size = draw(st.integers(1, 5))
    largest = max(-(-(len(w.prompt) + w.max_tokens) // block_size) for w in work)
    return work, {
        "block_size": block_size,
        "num_blocks": max(2, largest + draw(st.integers(0, 3))),
        "num_swap_blocks": draw(st.sampled_from([0, 2, 40, 40])),
        "max_num_batched_tokens": draw(st.integers(1, 24)),
        "max_num_seqs": max_num_seqs,
        "max_model_len": 64,
        "link_bytes_per_s": draw(st.sampled_from([1e3, 1e6, 1e9])),
        "preemption": draw(preemptions)(),
    }
