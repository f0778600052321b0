"""allocator=naive: slots by rule, holes by fit, refusals with the numbers, waste as arithmetic gives it."""

from __future__ import annotations

from typing import Any

import pytest

from core.types import ConfigError
from plugins.allocators.naive import NaiveAllocator
from plugins.allocators.runs import as_runs
from plugins.preemption.swap import Swap
from tests.toy import Work, alone, make_engine, run


def blocks_after_a_step(work: Work, **options: Any) -> int:
    engine = make_engine(allocator=NaiveAllocator(**options), num_blocks=40, block_size=4, max_model_len=120)
    engine.submit(work.prompt, work.params(), recorded_output_tokens=work.recorded)
    engine.step()
    (sequence,) = engine.state.sequences.values()
    assert sequence.table == list(range(sequence.table[0], sequence.table[0] + len(sequence.table)))
    return len(sequence.table)


@pytest.mark.parametrize(
    ("reserve", "recorded", "blocks"),
    [
        ("limit", None, 30),  # 120 tokens
        ("declared", 25, 18),  # 10 + 60
        ("pow2", 25, 11),  # 10 + 32: the example of the PagedAttention paper
        ("pow2", 32, 11),
        ("pow2", 33, 19),  # 10 + 64
        ("pow2", None, 19),  # no record: 64 covers the 60 declared
        ("oracle", 25, 9),  # 10 + 25
        ("oracle", 1, 3),
    ],
)
def test_a_slot_is_what_its_rule_says(reserve: str, recorded: int | None, blocks: int) -> None:
    assert blocks_after_a_step(Work(tuple(range(10)), 60, recorded=recorded), reserve=reserve) == blocks


def test_a_limit_slot_larger_than_the_pool_stops_the_start_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=100 tokens needs 25 blocks of 4, but the pool has 20"):
        make_engine(allocator=NaiveAllocator(), num_blocks=20, block_size=4, max_model_len=100)


def test_what_can_never_be_served_is_refused_with_the_numbers_and_others_go_on() -> None:
    engine = make_engine(allocator=NaiveAllocator(reserve="oracle"), num_blocks=8, block_size=4, max_model_len=100)
    work = [Work(tuple(range(20)), 30, recorded=30), Work((1,), 5), Work(tuple(range(9)), 6, recorded=6)]
    result = run(engine, work)
    assert result.reason == {(0, 0): "refused", (1, 0): "refused", (2, 0): "length"}
    assert "a slot of 13 KV blocks (20 prompt + at most 30 output" in result.error[(0, 0)]
    assert "8 blocks (32 tokens)" in result.error[(0, 0)]
    assert "recorded_output_tokens" in result.error[(1, 0)]


@pytest.mark.parametrize("bad", [{"reserve": "max"}, {"fit": "worst"}, {"reserve": None}])
def test_unknown_rules_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'first', 'best'|one of limit, declared"):
        NaiveAllocator(**bad)


def test_a_sequence_never_moves_and_later_chunks_lease_nothing() -> None:
    engine = make_engine(allocator=NaiveAllocator(reserve="declared"), num_blocks=16, max_num_batched_tokens=3)
    engine.submit(tuple(range(10)), Work((1,), 20).params())
    engine.step()
    (sequence,) = engine.state.sequences.values()
    table = list(sequence.table)
    while engine.has_work():
        assert engine.step().memory.copied_bytes == 0
        assert sequence.table in (table, [])
    engine.assert_idle()


def test_a_fork_copies_into_runs_of_its_own_and_branches_are_as_alone() -> None:
    work = Work(tuple(range(10)), 6, 0.9, 5, n=3)
    engine = make_engine(allocator=NaiveAllocator(reserve="declared"), num_blocks=16, block_size=4)
    result = run(engine, [work])
    assert [result.tokens[(0, b)] for b in range(3)] == alone(work)
    copied = [r.memory.copied_bytes for r in result.reports]
    assert sum(copied) == copied[1] == 2 * 3 * 4 * engine.model.kv_bytes_per_token  # 3 blocks for each of 2 branches
    assert max(r.memory.reserved for r in result.reports) == 3 * 16  # 16 tokens a branch, nothing shared
    assert sum(r.num_forked for r in result.reports) == 2


def test_branches_without_a_hole_compute_the_prompt_again() -> None:
    work = Work(tuple(range(10)), 6, 0.9, 5, n=3)
    result = run(make_engine(allocator=NaiveAllocator(reserve="declared"), num_blocks=7, block_size=4), [work])
    assert [result.tokens[(0, b)] for b in range(3)] == alone(work)
    assert sum(r.num_forked for r in result.reports) == 0


def test_a_sequence_that_outlives_its_record_grows_in_place() -> None:
    work = Work(tuple(range(6)), 20, recorded=2)
    result = run(make_engine(allocator=NaiveAllocator(reserve="oracle"), num_blocks=8, block_size=4), [work])
    assert result.tokens[(0, 0)] == alone(work)[0]


def test_one_that_outlives_its_record_without_room_behind_it_makes_room() -> None:
    """Its neighbour, which is younger, is computed again later; both get their tokens."""
    work = [Work(tuple(range(6)), 20, recorded=2), Work(tuple(range(3, 9)), 10, recorded=10)]
    result = run(make_engine(allocator=NaiveAllocator(reserve="oracle"), num_blocks=8, block_size=4), work)
    assert [result.tokens[(i, 0)] for i in range(2)] == [alone(w)[0] for w in work]
    assert sum(len(r.preempted) for r in result.reports) > 0


def test_one_at_the_pools_end_that_outlives_its_record_moves_to_where_there_is_room() -> None:
    """Its neighbour before it has ended, and nothing is behind it; the run it gets overlaps the one it has."""
    work = [Work(tuple(range(30)), 6, recorded=6), Work(tuple(range(6)), 34, recorded=2, arrives=5)]
    engine = make_engine(allocator=NaiveAllocator(reserve="oracle"), num_blocks=11, block_size=4, max_model_len=40)
    result = run(engine, work)
    assert [result.tokens[(i, 0)] for i in range(2)] == [alone(w)[0] for w in work]
    assert sum(r.memory.copied_bytes for r in result.reports) == 2 * 4 * engine.model.kv_bytes_per_token
    assert not any(r.preempted for r in result.reports)


def test_external_waste_is_free_blocks_that_no_waiting_request_fits() -> None:
    """Slots of 4, 2 and 4 blocks in 10; the middle one ends: its 2 blocks are of no use to one that wants 3."""
    engine = make_engine(allocator=NaiveAllocator(reserve="declared"), num_blocks=10, block_size=4)
    for prompt, tokens in ((6, 10), (4, 4), (6, 10), (6, 6)):
        engine.submit(tuple(range(prompt)), Work((1,), tokens).params())
    waste = []
    while engine.has_work():
        memory = engine.step().memory
        waste.append((engine.stats()["waiting"], memory.external_waste))
    assert (1, 8) in waste  # 2 blocks of 4 tokens
    assert all(tokens == 0 for waiting, tokens in waste if not waiting)


def test_its_holes_are_the_pools_free_blocks_whatever_happens() -> None:
    """Branches, a sequence that outlives its record, swaps, an abort and shortfalls: after every step the index of holes is right."""
    allocator = NaiveAllocator(reserve="oracle", fit="best")
    engine = make_engine(allocator=allocator, preemption=Swap(), num_blocks=12, block_size=4, num_swap_blocks=12)
    works = [Work((1, 2, 3), 9, n=2, recorded=3), Work((4,) * 6, 12, recorded=2), Work((5,) * 9, 5, recorded=5)] * 2
    ids = [engine.submit(work.prompt, work.params(), recorded_output_tokens=work.recorded) for work in works]
    preempted = 0
    while engine.has_work():
        report = engine.step()
        preempted += len(report.preempted)
        if report.step == 2:
            engine.abort(ids[1])
        assert allocator._holes.holes() == as_runs(sorted(engine.pool._free))
    assert preempted and allocator._holes.holes() == [(0, 12)]
