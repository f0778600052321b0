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

    Take and give are O(1) a block, for any block size. Internal waste is the tail of each last block, less than
    ``block_size`` tokens a
    sequence; external waste does not exist. A write into a block with several owners gets a copy of it (copy on write); the last
    owner writes in place.
    """

    _pool: BlockPool = attrs.field(init=False, default=None)
    _room: dict[int, int] = attrs.field(
        init=False, factory=dict
    )  # tokens a sequence may have computed without a new block

    @hookimpl
    def setup(self, engine_info: EngineInfo) -> None:
        self._pool = engine_info.pool

    @hookimpl
    def reserve(self, plan: Plan, sequences: Mapping[int, SequenceView]) -> Sequence[Lease] | Shortfall:
        room = self._room
        asked = [
            (i, sequences[id], n)
            for i, (id, n, _) in enumerate(plan.chunks)
            if sequences[id].num_computed_tokens + n > room.get(id, 0)  # most decodes have room: one look
        ]
        owners: dict[int, int] = {}  # of blocks that are copied in this plan: the last writer writes in place
        needs = [(i, view, self._need(view, n, owners)) for i, view, n in asked]
        free, wanted = self._pool.num_free, 0
        for i, _, need in needs:
            wanted += len(need)
            if wanted > free:
                return Shortfall(num_fitting=i, blocks_missing=sum(len(need) for _, _, need in needs) - free)
        leases = [NO_CHANGE] * len(plan.chunks)
        for i, view, need in needs:
            if need:
                leases[i] = self._lease(view, need)
            table = view.block_table
            room[view.id] = max(len(table), need[-1] + 1 if need else 0) * self._pool.block_size
        return leases

    def _need(self, view: SequenceView, num_tokens: int, owners: dict[int, int]) -> Sequence[int]:
        """Table indices that need a new block before this chunk can be written."""
        size, table = self._pool.block_size, view.block_table
        start = view.num_computed_tokens
        end = min(start + num_tokens, view.num_tokens)
        have, want = len(table), -(-end // size)
        indices: list[int] = []
        if view.where == "swap":
            indices += [i for i, block in enumerate(table) if block == HOLE]
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
            self._room[parent.id] = 0  # its next write may need a copy
            leases.append([Lease(blocks)] * len(children))
        return leases

    @hookimpl
    def release(self, releases: Sequence[Release]) -> bool:
        for release in releases:
            self._pool.give(release.block_ids)
            self._room.pop(release.sequence, None)
        return True
