"""allocator=paged: copy on write as the reference numbers give it, any block size, the order of reuse. prefix does the same."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from tests.toy import Work, alone, check_cache, make_engine, run

BOTH = pytest.mark.parametrize("allocator", [PagedAllocator, PrefixAllocator])


@BOTH
@pytest.mark.parametrize(("prompt", "after_fork", "after_a_write", "copies"), [(8, 2, 5, 0), (6, 2, 4, 2)])
def test_three_branches_on_two_blocks(
    allocator: type, prompt: int, after_fork: int, after_a_write: int, copies: int
) -> None:
    """Both full: 2 blocks with count 3, then each writes into its own: 5. The last part full: two copy, one in place: 4."""
    engine = make_engine(allocator=allocator(), block_size=4)
    engine.submit(tuple(range(prompt)), Work((1,), 5, 0.9, 1, n=3).params())
    engine.step()
    assert engine.pool.num_used == after_fork
    assert [c for c in engine.pool.refs if c] == [3, 3]
    report = engine.step()
    assert engine.pool.num_used == after_a_write
    assert report.memory.copied_bytes == copies * 4 * engine.model.kv_bytes_per_token


@BOTH
def test_the_last_owner_writes_in_place_when_the_others_are_gone(allocator: type) -> None:
    engine = make_engine(allocator=allocator(), block_size=4)
    request = engine.submit(tuple(range(6)), Work((1,), 5, 0.9, 1, n=2).params())
    engine.step()
    parent = engine.state.sequences[request]
    engine._committer.end(_step(), [(parent, "abort")], 0.0)
    report = engine.step()
    assert report.memory.copied_bytes == 0 and engine.pool.num_used == 2


def _step() -> Any:
    from core.scratch import Step

    return Step(0, 0.0, [])


@BOTH
@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 100, 255, 256])
def test_any_block_size(allocator: type, block_size: int) -> None:
    work = [Work(tuple(range(i, i + 20)), 9, 0.9, i, n=1 + i) for i in range(3)]
    engine = make_engine(
        allocator=allocator(), block_size=block_size, num_blocks=max(8, 400 // block_size), max_model_len=60
    )
    result = run(engine, work, after_step=check_cache)
    assert [[result.tokens[(i, b)] for b in range(w.n)] for i, w in enumerate(work)] == [alone(w) for w in work]


def test_blocks_come_in_runs_and_the_one_free_longest_comes_first() -> None:
    """A prompt gets consecutive blocks, also out of those that another gave back."""
    engine = make_engine(num_blocks=8, block_size=4)
    tables = []
    for prompt in (range(12), range(12), range(12)):
        engine.submit(tuple(prompt), Work((1,), 1).params())
        take = engine._change_table
        engine._change_table = lambda step, seq, lease, take=take: (
            take(step, seq, lease),
            tables.append(list(seq.table)),
        )[0]
        engine.step()
        engine._change_table = take
    assert tables == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
