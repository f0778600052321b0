"""``allocator=paged``: blocks on demand, one at a time, shared between the branches of a request by reference counts.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from core.blocks import BlockPool
from core.hookspecs import ForkGroup, hookimpl
from core.types import HOLE, NO_CHANGE, EngineInfo, Lease, Move, Plan, Release, SequenceView, Shortfall


@attrs.define(eq=False)
class PagedAllocator:
    """Takes the block that has been free longest; gives a sequence's blocks back in table order, so that runs stay runs.

    Internal waste is the tail of each last block, less than ``block_size`` tokens a sequence; external waste does not exist.
    A write into a block with several owners gets a copy of it (copy on write); the last owner writes in place.
    """

    extends_tables = True  # it goes on with a table that another sequence began (sessions: see core/sessions.py)

    _pool: BlockPool = attrs.field(init=False, default=None)

    @hookimpl
    def setup(self, engine_info: EngineInfo) -> None:
        self._pool = engine_info.pool

    @hookimpl
    def reserve(self, plan: Plan, sequences: Mapping[int, SequenceView]) -> Sequence[Lease] | Shortfall:
        needs: list[Sequence[int]] = []
        owners: dict[int, int] = {}  # of blocks that are copied in this plan: the last writer writes in place
        size, whole = self._pool.block_size, not self._pool.num_extra_refs
        for id, num_tokens, _ in plan.chunks:
            sequence = sequences[id]
            if num_tokens == 1 and whole and sequence.num_computed_tokens % size and sequence.where == "device":
                needs.append(())  # most decodes: the last block is part full, and nobody shares it
            else:
                needs.append(self._need(sequence, num_tokens, owners))
        if not any(needs):
            return [NO_CHANGE] * len(needs)
        free, wanted = self._pool.num_free, 0
        for i, need in enumerate(needs):
            wanted += len(need)
            if wanted > free:
                return Shortfall(num_fitting=i, blocks_missing=sum(map(len, needs)) - free)
        return [self._lease(sequences[chunk.sequence], need) if need else NO_CHANGE
                for chunk, need in zip(plan.chunks, needs, strict=True)]  # fmt: skip

    def _need(self, view: SequenceView, num_tokens: int, owners: dict[int, int]) -> Sequence[int]:
        """Table indices that need a new block before this chunk can be written."""
        size, table = self._pool.block_size, view.block_table
        start = view.num_computed_tokens
        end = min(start + num_tokens, view.num_tokens)
        have, want = len(table), -(-end // size)
        if want <= have and view.where == "device" and not self._pool.num_extra_refs:
            return ()
        indices: list[int] = []
        if view.where == "swap":
            indices += [i for i in range(have) if table[i] == HOLE]
        if start % size:
            block = table[start // size]
            count = owners.get(block) or self._pool.refs[block] if block != HOLE else 1
            if count > 1:
                owners[block] = count - 1
                indices.append(start // size)
        if want > have:
            indices += range(have, want)
        return indices

    def _lease(self, view: SequenceView, indices: Sequence[int]) -> Lease:
        pool, table, moves = self._pool, view.block_table, []
        blocks = tuple(zip(indices, pool.take(len(indices)), strict=True))
        for index, block in blocks:
            old = table[index] if index < len(table) else HOLE
            if old != HOLE:
                moves.append(Move("copy", old, block))
                pool.give((old,))
        return Lease(blocks, tuple(moves))

    @hookimpl
    def fork(self, groups: Sequence[ForkGroup]) -> Sequence[Sequence[Lease]]:
        leases = []
        for parent, children in groups:
            blocks = tuple(enumerate(parent.block_table[: -(-parent.num_computed_tokens // self._pool.block_size)]))
            for _ in children:
                self._pool.share([block for _, block in blocks])
            leases.append([Lease(blocks)] * len(children))
        return leases

    @hookimpl
    def release(self, releases: Sequence[Release]) -> bool:
        for release in releases:
            self._pool.give(release.block_ids)
        return True
