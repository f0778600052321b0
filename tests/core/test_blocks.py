"""The block pool: counts, order of reuse, and that every misuse is an error and not a corruption."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.blocks import BlockPool


def test_a_second_free_raises_and_hands_out_no_block_twice() -> None:
    pool = BlockPool(4, 16)
    (block,) = pool.take(1)
    pool.give([block])
    with pytest.raises(ValueError, match="second free"):
        pool.give([block])
    assert pool.num_free == 4
    assert len(set(pool.take(2))) == 2


def test_never_used_blocks_come_first_in_order_then_the_one_free_longest() -> None:
    pool = BlockPool(6, 1)
    assert pool.take(4) == [0, 1, 2, 3]
    pool.give([2])
    pool.give([0, 1])
    assert pool.take(5) == [4, 5, 2, 0, 1]


def test_a_newest_first_pool_touches_no_more_blocks_than_were_held_at_once() -> None:
    pool = BlockPool(100, 1, newest_first=True)
    touched = set()
    for _ in range(20):
        taken = pool.take(3)
        touched |= set(taken)
        for block in taken:  # one by one, as they are swapped in
            pool.give([block])
    assert touched == {0, 1, 2}
    pool.check()


def test_a_newest_first_pool_keeps_findable_content_until_nothing_else_is_free() -> None:
    """A host tier keeps content in the swap pool: such a block goes to the back of the queue there too."""
    pool = BlockPool(3, 1, newest_first=True)
    first, second = pool.take(2)
    pool.keep(first, "prompt")
    pool.give([first])
    pool.give([second])
    pool.check()
    assert pool.num_cached == 1
    assert pool.take(3) == [second, 2, first]


def test_a_named_free_block_leaves_the_middle_of_the_queue() -> None:
    pool = BlockPool(4, 1)
    pool.take_ids([2])
    assert pool.take(3) == [0, 1, 3]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda p: p.take(5),
        lambda p: p.take(-1),
        lambda p: (p.take(1), p.take_ids([0])),
        lambda p: p.take_ids([1, 1]),
        lambda p: p.take_ids([9]),
        lambda p: p.share([0]),
        lambda p: p.give([-1]),
        lambda p: p.give([4]),
    ],
)
def test_misuse_raises_and_leaves_the_pool_sound(misuse) -> None:
    pool = BlockPool(4, 1)
    with pytest.raises(ValueError):
        misuse(pool)
    pool.check()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(-1, 4), (4, 0)])
def test_sizes_that_make_no_pool_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="num_blocks >= 0 and block_size >= 1"):
        BlockPool(num_blocks, block_size)


def test_kept_content_is_reused_last_and_its_owner_is_told() -> None:
    pool, lost = BlockPool(6, 1), []
    pool.on_reuse = lambda block, owner: lost.append((block, owner))
    held = pool.take(5)
    for block in (1, 3, 2):
        pool.keep(block, f"content of {block}")
    pool.give(held)  # 0 .. 4: 1, 2 and 3 can be found, in the order in which they became free
    assert pool.num_cached == 3
    pool.take_ids([2])
    assert (pool.num_cached, lost) == (2, [])
    assert pool.take(4) == [4, 0, 5, 1]
    assert (pool.num_cached, lost) == (1, [(1, "content of 1")])
    pool.give([2])
    assert pool.take(1) == [3]
    pool.drop(2)
    assert pool.num_cached == 0
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain list of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, 4)
        self.held: list[int] = []

    @rule(n=st.integers(0, 9))
    def take(self, n: int) -> None:
        if n > self.pool.num_free:
            with pytest.raises(ValueError):
                self.pool.take(n)
        else:
            taken = self.pool.take(n)
            assert not set(taken) & set(self.held)
            self.held += taken

    @rule(blocks=st.sets(st.integers(0, 8), min_size=1, max_size=4))
    def take_ids(self, blocks: set[int]) -> None:
        if blocks & set(self.held):
            with pytest.raises(ValueError):
                self.pool.take_ids(blocks)
        else:
            self.pool.take_ids(blocks)
            self.held += blocks

    @rule(block=st.integers(0, 8))
    def keep_or_drop(self, block: int) -> None:
        if block in self.pool.kept:
            self.pool.drop(block)
        else:
            self.pool.keep(block, block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.share([block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.give([block])
        self.held.remove(block)

    @invariant()
    def counts_are_owners(self) -> None:
        assert self.pool.refs == [self.held.count(b) for b in range(9)]
        assert self.pool.num_free == 9 - len(set(self.held))
        self.pool.check()


PoolMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestPool = PoolMachine.TestCase
