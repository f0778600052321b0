"""Which cached block goes first: eviction orders of ``allocator=prefix``, each a small function.

Only blocks that no cached block continues are candidates, so that a prefix never goes before what needs it. To add an order, put a
function into ``ORDERS`` before the engine is built::

    ORDERS["mine"] = lambda entry, cost, block_size: ...     # of the candidates, the block with the least goes first

``lru`` is no function: it is the order of the pool's free queue, O(1). The others keep a heap, O(log blocks) a freed block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from core.blocks import BlockPool
from core.cost import CostModel
from core.types import HOLE
from plugins.allocators.content import Entry

Order = Callable[[Entry, CostModel, int], float]


def least_used(entry: Entry, cost: CostModel, block_size: int) -> float:
    """Hits so far."""
    return entry.uses


def cheapest(entry: Entry, cost: CostModel, block_size: int) -> float:
    """Seconds to compute the block again behind its prefix: attention makes deep blocks dearer."""
    return cost.recompute_s((entry.depth + 1) * block_size, entry.depth * block_size)


ORDERS: dict[str, Order | None] = {"lru": None, "lfu": least_used, "cost": cheapest}
"""Eviction orders by name. Of equals, the one that became a candidate first goes first."""


class Evictor:
    """Takes blocks from the pool: those without findable content first, then the cached ones of least worth."""

    def __init__(self, order: Order | None, pool: BlockPool, cost: CostModel):
        self.order, self.pool, self.cost = order, pool, cost
        self._heap: list[tuple[float, int, Entry]] = []  # worth, stamp, entry; a stale stamp is passed over
        self._stamp = 0

    def take(self, n: int) -> list[int]:
        """``n`` free blocks; there are as many."""
        pool = self.pool
        if self.order is None:
            return pool.take(n)
        taken = pool.take(min(n, pool.num_free - pool.num_cached))
        while len(taken) < n:
            while self._heap:
                _, stamp, entry = heapq.heappop(self._heap)
                if self._waits(entry, stamp):
                    pool.next_to_take(entry.block)
                    break
            taken += pool.take(1)  # without a candidate: the least recently used
        return taken

    def _waits(self, entry: Entry, stamp: int) -> bool:
        return entry.stamp == stamp and entry.block != HOLE and not entry.resident and not self.pool.refs[entry.block]

    def consider(self, entry: Entry | None) -> None:
        """This entry may have become a candidate."""
        if self.order is None or entry is None or not self._waits(entry, entry.stamp):
            return
        self._stamp += 1
        entry.stamp = self._stamp
        heapq.heappush(self._heap, (self.order(entry, self.cost, self.pool.block_size), self._stamp, entry))
        if len(self._heap) > 4 * self.pool.num_blocks + 64:
            self._heap = [item for item in self._heap if self._waits(item[2], item[1])]
            heapq.heapify(self._heap)
