"""``allocator=lastfit``: paged blocks, but the one given back last is reused first (warm in the CPU's cache)."""

import attrs

from core.hookspecs import hookimpl
from core.types import HOLE, NO_CHANGE, Lease, Shortfall


@attrs.define(eq=False)
class LastFitAllocator:
    """The three things an allocator must do: know the pool, reserve all or nothing, take back exactly what is released.

    Without ``fork`` the branches of a request (``n`` > 1) queue as ordinary sequences, so no block ever has two owners.
    """

    _pool: object = attrs.field(init=False, default=None)
    _stack: list = attrs.field(init=False, factory=list)  # free blocks, the one to take next last

    @hookimpl
    def setup(self, engine_info):
        self._pool = engine_info.pool
        self._stack = list(reversed(range(self._pool.num_blocks)))

    @hookimpl
    def reserve(self, plan, sequences):
        needs = [self._need(sequences[chunk.sequence], chunk.num_tokens) for chunk in plan.chunks]
        wanted = 0
        for num_fitting, need in enumerate(needs):
            wanted += len(need)
            if wanted > len(self._stack):
                return Shortfall(num_fitting, blocks_missing=sum(map(len, needs)) - len(self._stack))
        return [self._lease(need) for need in needs]

    def _need(self, sequence, num_tokens):
        """Table indices that need a block: the holes of a swapped sequence, and new ones at the end."""
        table, size = sequence.block_table, self._pool.block_size
        end = min(sequence.num_computed_tokens + num_tokens, sequence.num_tokens)
        return [i for i in range(len(table)) if table[i] == HOLE] + list(range(len(table), -(-end // size)))

    def _lease(self, indices):
        if not indices:
            return NO_CHANGE
        blocks = [self._stack.pop() for _ in indices]
        self._pool.take_ids(blocks)
        return Lease(tuple(zip(indices, blocks, strict=True)))

    @hookimpl
    def release(self, releases):
        for release in releases:
            self._pool.give(release.block_ids)
            self._stack.extend(release.block_ids)
        return True
