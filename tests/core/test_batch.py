"""Pack: index arrays of a step, worked out by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from core.batch import BatchBuilder, Run, sampling_batch
from core.blocks import BlockPool
from core.state import Sequence
from core.types import Limits, Request, SamplingParams


def sequence(tokens: list[int], table: list[int], row: int, n: int = 1) -> Sequence:
    params = SamplingParams(max_tokens=8, n=n)
    request = Request(id=row, prompt_token_ids=tuple(tokens), params=params, arrival_s=0.0)
    seq = Sequence(request, params, 7, BlockPool(128, 4), id=row)
    seq.table.extend(table)
    seq.row = row
    return seq


def builder(seqs: list[Sequence], block_size: int) -> BatchBuilder:
    limits = Limits(
        block_size=block_size,
        num_blocks=128,
        num_swap_blocks=0,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    made = BatchBuilder(limits)
    for seq in seqs:
        made.set_row(seq.row, seq.table)
    return made


def test_slot_mapping_of_the_reference_example() -> None:
    """Block size 256, table [47, 12, 83]: token 257 lies in slot 12 x 256 + 1 = 3073, token 300 in slot 3116."""
    seq = sequence(list(range(301)), [47, 12, 83], 0)
    batch = builder([seq], 256).pack([Run(seq, 257, 258)])
    assert batch.slot_mapping.tolist() == [3073]
    assert builder([seq], 256).pack([Run(seq, 300, 301)]).slot_mapping.tolist() == [3116]
    assert batch.slot_mapping.dtype == np.int32


def test_a_mixed_batch_is_packed_end_to_end() -> None:
    a, b, c = (
        sequence([9, 8, 7, 6, 5], [3, 1], 2),
        sequence([4, 4, 4], [0], 0),
        sequence(list(range(20)), [5, 6, 7, 8, 9], 1),
    )
    batch = builder([a, b, c], 4).pack([Run(a, 4, 5), Run(b, 0, 3), Run(c, 6, 11)])
    assert batch.token_ids.tolist() == [5, 4, 4, 4, 6, 7, 8, 9, 10]
    assert batch.positions.tolist() == [4, 0, 1, 2, 6, 7, 8, 9, 10]
    assert batch.slot_mapping.tolist() == [4, 0, 1, 2, 26, 27, 28, 29, 30]
    assert batch.query_start.tolist() == [0, 1, 4, 9]
    assert batch.kv_lens.tolist() == [5, 3, 11]
    assert batch.block_tables[0, :2].tolist() == [3, 1] and batch.block_tables[2, :3].tolist() == [5, 6, 7]
    assert batch.logit_tokens.tolist() == [0, 3]  # c is not at its end: no logits for it
    assert (batch.max_query_len, batch.max_kv_len, batch.sequence_ids) == (5, 11, (2, 0, 1))


def test_a_parent_is_drawn_once_for_each_branch_from_one_row() -> None:
    a, b = sequence([1, 2], [0], 0), sequence([3, 4, 5], [1], 1, n=3)
    sampling = sampling_batch([Run(a, 1, 2), Run(b, 0, 3)])
    assert sampling.rows == [0, 1, 1, 1]
    assert sampling.branches == [0, 0, 1, 2]
    assert sampling.positions == [2, 3, 3, 3]
    assert sampling.seeds == [7] * 4


@given(data=st.data(), block_size=st.integers(1, 7))
def test_every_token_gets_the_slot_that_its_block_table_says(data: st.DataObject, block_size: int) -> None:
    ids = iter(data.draw(st.permutations(range(128))))
    runs = []
    for row in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 20))
        start = data.draw(st.integers(0, length - 1))
        end = data.draw(st.integers(start + 1, min(length, start + 10)))
        blocks = min(20, -(-length // block_size))
        runs.append(Run(sequence(list(range(length)), [next(ids) for _ in range(blocks)], row), start, end))
    batch = builder([r.seq for r in runs], block_size).pack(runs)
    expected = [r.seq.table[p // block_size] * block_size + p % block_size for r in runs for p in range(r.start, r.end)]
    assert batch.slot_mapping.tolist() == expected
