"""What Hypothesis draws: requests that share prefixes, salts and branches, and sizes under which they compete."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import strategies as st

from core.conformance.toy import VOCAB, Sizes, Work

PREFIXES = [tuple(range(10 * k, 10 * k + 40)) for k in range(3)]
"""Prompts begin with a part of one of these, so that an allocator which shares prefixes finds some."""


@st.composite
def works(draw: st.DrawFn, may_abort: bool = True, max_n: int = 3) -> Work:
    prefix = draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 24))]
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if prefix else 1, max_size=8))
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return Work(
        prompt=(*prefix, *own),
        max_tokens=draw(st.integers(1, 16)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.9])) if n == 1 else 0.9,
        seed=draw(st.integers(0, 5)),
        n=min(n, max_n),
        salt=draw(st.sampled_from(["", "", "a"])),
        arrives=draw(st.integers(0, 12)),
        aborts=draw(st.sampled_from([None, None, None, None, 0, 3, 9, 20])) if may_abort else None,
    )


@st.composite
def sizes_for(draw: st.DrawFn, longest: int, max_num_seqs: int, small_budget: bool = True) -> Sizes:
    """A pool in which a request of ``longest`` tokens fits alone and little more does."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 16]))
    budget = draw(st.integers(max_num_seqs, 24))
    return Sizes(
        block_size=block_size,
        num_blocks=max(2, -(-longest // block_size) + draw(st.sampled_from([0, 0, 1, 2, 3, 8]))),
        num_swap_blocks=draw(st.sampled_from([0, 2, 40, 40])),
        max_num_batched_tokens=budget if small_budget else max(budget, longest),
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        link_bytes_per_s=draw(st.sampled_from([1e3, 1e6, 1e9])),
    )


@st.composite
def contests(draw: st.DrawFn, small_budget: bool = True) -> tuple[list[Work], Sizes]:
    """Requests and sizes under which they compete: the largest fits alone, little more does."""
    max_num_seqs = draw(st.integers(1, 6))
    work = [attrs.evolve(w, n=min(w.n, max_num_seqs)) for w in draw(st.lists(works(), min_size=1, max_size=6))]
    longest = max(w.num_tokens for w in work)
    return work, draw(sizes_for(longest, max_num_seqs, small_budget))


def fixed_works(count: int = 10, **changes: Any) -> list[Work]:
    """The same requests every time: three prefixes, branches, two salts, different lengths."""
    return [
        Work(
            prompt=(*PREFIXES[i % 3][: 4 + 3 * (i % 5)], 100 + i, 200),
            max_tokens=6 + 2 * (i % 4),
            temperature=0.9 if i % 2 else 0.0,
            seed=i,
            n=1 + (i % 4 == 3),
            salt="a" if i % 5 == 4 else "",
            arrives=i // 2,
            **changes,
        )
        for i in range(count)
    ]
