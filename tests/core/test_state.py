"""State: the status table, queues in arrival order, views that only core can write."""

from __future__ import annotations

import itertools

import attrs
import pytest

from core.blocks import BlockPool
from core.state import MOVES, Sequence, State, Status
from core.types import Limits, ReadOnlyList, Request, SamplingParams
from tests.toy import Work, make_engine


def make_state() -> State:
    limits = Limits(
        block_size=4, num_blocks=8, num_swap_blocks=4, max_model_len=32, max_num_seqs=3, max_num_batched_tokens=8
    )
    return State(limits, BlockPool(8, 4), cost=None)  # type: ignore[arg-type]


def new(state: State, number: int, arrival_s: float) -> Sequence:
    params = SamplingParams(max_tokens=4)
    request = Request(id=number, prompt_token_ids=(1, 2, 3), params=params, arrival_s=arrival_s)
    seq = Sequence(request, params, 0, state.pool, id=number)
    state.add(seq)
    return seq


@pytest.mark.parametrize(("start", "to"), list(itertools.product(Status, Status)))
def test_a_status_moves_only_along_the_table(start: Status, to: Status) -> None:
    state = make_state()
    seq = new(state, 0, 0.0)
    seq.status = start
    if start is Status.RUNNING:
        state.waiting.remove(seq.view)
        state.running.append(seq.view)
    if start is Status.HELD:
        state.waiting.remove(seq.view)
        state.held[0] = seq
    if start is Status.IDLE:
        state.waiting.remove(seq.view)
        state.sessions[seq.session] = seq
        state.idle.append(seq.view)
    if to in MOVES[start]:
        state.move(seq, to)
        assert seq.status is to
    else:
        with pytest.raises(ValueError, match=f"sequence 0: {start.value} -> {to.value} is not an allowed move"):
            state.move(seq, to)


def test_a_held_sequence_is_in_no_queue_and_gives_up_its_row() -> None:
    """It keeps its blocks, back in the queue too; without blocks it waits like any other."""
    state = make_state()
    seqs = [new(state, i, float(i)) for i in range(2)]
    rows = len(state._rows)
    for seq in seqs:
        state.move(seq, Status.RUNNING)
        seq.table.extend(state.pool.take(1))
        state.move(seq, Status.HELD)
    assert (len(state._rows), state.running, state.waiting, list(state.held)) == (rows, [], [], [0, 1])
    state.check_owners()
    state.pool.give(seqs[1].table)
    seqs[1].table.clear()
    for seq in seqs:
        state.move(seq, Status.WAITING)
    assert [(view.id, view.where) for view in state.waiting] == [(0, "device"), (1, "none")]
    assert (list(state.parked), state.held) == ([0], {})


def test_queues_keep_arrival_order_and_a_preempted_sequence_goes_back_to_its_place() -> None:
    state = make_state()
    a, b, c = new(state, 0, 2.0), new(state, 1, 1.0), new(state, 2, 3.0)
    assert [v.id for v in state.waiting] == [1, 0, 2]
    for seq in (c, a, b):
        state.move(seq, Status.RUNNING)
    assert [v.id for v in state.running] == [1, 0, 2]
    new(state, 3, 2.5)
    state.move(a, Status.SWAPPED)
    assert [v.id for v in state.waiting] == [0, 3]
    assert (a.view.where, b.view.where) == ("swap", "device")
    state.move(a, Status.WAITING)
    assert [v.id for v in state.waiting] == [0, 3] and a.view.where == "none" and not state.swapped()


def test_policies_cannot_write_what_they_see() -> None:
    engine = make_engine()
    engine.submit((1, 2, 3), Work((1,), 4).params())
    engine.step()
    view = engine.state.view
    with pytest.raises(AttributeError, match=r"may not write View\.now"):
        view.now = 3.0
    with pytest.raises(AttributeError, match=r"may not write SequenceView\.num_tokens"):
        view.running[0].num_tokens = 3
    for seen in (view.running, view.waiting, view.running[0].token_ids, view.running[0].block_table):
        assert isinstance(seen, ReadOnlyList)
        with pytest.raises(TypeError):
            seen[0] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        view.cached_tokens[0] = 1  # type: ignore[index]


def test_views_follow_the_sequence_while_a_policy_keeps_them() -> None:
    engine = make_engine()
    engine.submit((1, 2, 3), Work((1,), 4).params())
    engine.step()
    kept = engine.state.view.running[0]
    before = (kept.num_tokens, kept.num_computed_tokens, len(kept.token_ids))
    engine.step()
    assert before == (4, 3, 4)
    assert (kept.num_tokens, kept.num_computed_tokens, len(kept.token_ids), len(kept.block_table)) == (5, 4, 5, 1)
    assert kept.num_output_tokens == 2 and kept.num_missing_tokens == 1 and kept.private_blocks == 1


def test_idle_means_that_nothing_is_held() -> None:
    state = make_state()
    state.assert_idle()
    block = state.pool.take(1)
    with pytest.raises(AssertionError, match="1 blocks are not free"):
        state.assert_idle()
    state.pool.give(block)
    new(state, 0, 0.0)
    with pytest.raises(AssertionError, match="1 sequences are left"):
        state.assert_idle()


def test_values_between_stages_are_frozen() -> None:
    from core import types

    for name in (
        "Plan",
        "Lease",
        "Shortfall",
        "Eviction",
        "Release",
        "Request",
        "SamplingParams",
        "Limits",
        "EngineInfo",
    ):
        assert attrs.has(getattr(types, name))
        assert getattr(types, name).__setattr__ is not object.__setattr__, name
