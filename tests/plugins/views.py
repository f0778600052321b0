"""Views of running sequences made by hand, for tests of single decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.blocks import BlockPool
from core.state import Sequence as Seq
from core.state import State, Status
from core.types import Chunk, Limits, Plan, Request, SamplingParams, Shortfall, View

SIZE = 4


def running_view(
    *,
    blocks: Sequence[int],
    missing: int = 0,
    shared: Mapping[int, int] | None = None,
    preempted: Mapping[int, int] | None = None,
    finds_prefixes: bool = False,
) -> tuple[View, Plan, Shortfall]:
    """Sequences 0, 1, ... that run, with so many blocks of their own, each full; a plan of one token each, of which one fits.

    ``shared`` are leading blocks that those named hold together, as branches of one request; ``preempted`` how many tokens a
    sequence got since it was pushed out.
    """
    limits = Limits(
        block_size=SIZE,
        num_blocks=100,
        num_swap_blocks=100,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    pool = BlockPool(limits.num_blocks, SIZE)
    state = State(limits, pool, None)  # type: ignore[arg-type]
    state.set_finds_prefixes(finds_prefixes)
    shared = dict(shared or {})
    common = pool.take(max(shared.values(), default=0))
    first_holder = min(shared, default=-1)
    for i, count in enumerate(blocks):
        num_tokens = SIZE * (count + shared.get(i, 0))
        params = SamplingParams(max_tokens=50, n=len(shared) if i in shared else 1)
        request = Request(
            id=first_holder if i in shared else i,
            prompt_token_ids=tuple(range(num_tokens)),
            params=params,
            arrival_s=float(i),
        )
        seq = Seq(request, params, 0, pool, id=i, branch=sorted(shared).index(i) if i in shared else 0)
        state.add(seq)
        if i in shared:
            seq.table += common
            if i != first_holder:
                pool.share(common)
        seq.table += pool.take(count)
        state.move(seq, Status.RUNNING)
        seq.set_computed(num_tokens)
        if i in (preempted or {}):
            state.count_preemption(seq)
            for _ in range((preempted or {})[i]):
                seq.append(1, 0.0)
    chunks = tuple(Chunk(i, 1, True) for i in range(len(blocks)))
    return state.view, Plan(chunks), Shortfall(num_fitting=1, blocks_missing=max(1, missing))
