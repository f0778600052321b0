"""Free runs of blocks: finds a hole for a run of consecutive blocks without looking at every block.

Three pictures of the same holes are kept: starts in ascending order (neighbours, to merge), (length, start) in ascending
order (best
fit), and a tree of maxima over the starts (first fit). A change costs O(log blocks) and one list insertion; a search
O(log blocks). For allocators that need consecutive blocks: who takes and gives blocks of the pool says so here, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Literal

Fit = Literal["first", "best"]


class FreeRuns:
    """Holes of a pool of ``num_blocks`` blocks, each as long as it can be: two never touch."""

    def __init__(self, num_blocks: int, free: Iterable[int]):
        self._lengths: dict[int, int] = {}  # start -> blocks
        for start, length in as_runs(sorted(free)):
            self._lengths[start] = length
        self._starts = sorted(self._lengths)
        self._by_length = sorted((length, start) for start, length in self._lengths.items())
        self._leaves = 1
        while self._leaves < num_blocks:
            self._leaves *= 2
        self._tree = [0] * (2 * self._leaves)  # leaf i: length of the hole that starts at i; above: the larger child
        for start, length in self._lengths.items():
            self._tree[self._leaves + start] = length
        for node in range(self._leaves - 1, 0, -1):
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])

    def find(self, n: int, fit: Fit = "first") -> int | None:
        """Start of a hole of at least ``n`` >= 1 blocks: the lowest one, or the shortest (of those the lowest); None without."""
        if not self._by_length or self._by_length[-1][0] < n:
            return None
        if fit == "best":
            return self._by_length[bisect_left(self._by_length, (n, -1))][1]
        node, tree = 1, self._tree
        while node < self._leaves:
            node *= 2
            if tree[node] < n:
                node += 1
        return node - self._leaves

    def find_all(self, lengths: Sequence[int], fit: Fit = "first") -> list[int]:
        """Starts of disjoint holes, one a length, as far as they fit one after the other. Nothing is taken."""
        starts: list[int] = []
        for n in lengths:
            start = self.find(n, fit)
            if start is None:
                break
            self.remove(start, n)
            starts.append(start)
        for start, n in zip(starts, lengths, strict=False):
            self.add(start, n)
        return starts

    def remove(self, start: int, n: int) -> None:
        """These free blocks are taken; they lie in one hole."""
        hole = self._starts[bisect_right(self._starts, start) - 1]
        length = self._lengths[hole]
        self._drop(hole, length)
        if hole < start:
            self._put(hole, start - hole)
        if start + n < hole + length:
            self._put(start + n, hole + length - start - n)

    def add(self, start: int, n: int) -> None:
        """These blocks are free again: they join the holes beside them."""
        place = bisect_left(self._starts, start)
        after = self._starts[place] if place < len(self._starts) else None
        before = self._starts[place - 1] if place else None
        if after == start + n:
            length = self._lengths[after]
            self._drop(after, length)
            n += length
        if before is not None and before + self._lengths[before] == start:
            length = self._lengths[before]
            self._drop(before, length)
            start, n = before, n + length
        self._put(start, n)

    def shorter_than(self, n: int) -> int:
        """Blocks in holes of less than ``n`` blocks. O(such holes)."""
        return sum(length for length, _ in self._by_length[: bisect_left(self._by_length, (n, -1))])

    def holes(self) -> list[tuple[int, int]]:
        """(start, length) of every hole, in order."""
        return [(start, self._lengths[start]) for start in self._starts]

    def _put(self, start: int, length: int) -> None:
        self._lengths[start] = length
        insort(self._starts, start)
        insort(self._by_length, (length, start))
        self._set(start, length)

    def _drop(self, start: int, length: int) -> None:
        del self._lengths[start]
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self._set(start, 0)

    def _set(self, start: int, length: int) -> None:
        tree, node = self._tree, self._leaves + start
        tree[node] = length
        node //= 2
        while node:
            left, right = tree[2 * node], tree[2 * node + 1]
            most = left if left > right else right
            if tree[node] == most:
                return
            tree[node] = most
            node //= 2


def as_runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Block ids as (start, length) of their ascending consecutive stretches, in the order given."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        start, length = runs[-1] if runs else (block, 0)
        if block == start + length:
            runs[-1:] = [(start, length + 1)]
        else:
            runs.append((block, 1))
    return runs
