"""The block pool: reference counts and the order of reuse. Mechanism that all allocators share; which block to take is theirs.

Life of a block::

            take, take_run, take_ids              share                give
    free  ---------------------------->  refs 1  ------->  refs n  ---------->  refs n - 1 ... 0: free, at the back of the queue

The free blocks are one queue: never used ones in ascending order, then given back ones, longest free first. So ``take`` reuses
the block that has been free longest, and an allocator that keeps an index over the content of free blocks gets an LRU cache
for nothing: a block keeps its content until it is taken, and ``take_ids`` takes a given block out of the middle in O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Every operation is O(blocks named), but ``take_run`` which searches.

    ``refs[block]`` is the number of block tables that hold the block; read it, never write it. Errors are ``ValueError`` with the
    numbers: core turns one that a plugin caused into a ``PolicyError`` that names it.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"a pool needs num_blocks >= 0 and block_size >= 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs: list[int] = [0] * num_blocks
        self.num_extra_refs = 0  # sum of max(0, refs - 1): blocks that sharing saves
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._taken = bytearray(num_blocks)  # 1 where refs > 0, for the search of runs

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those with cached content included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self, n: int) -> list[int]:
        """``n`` free blocks, those free longest first, now with one reference each."""
        free = self._free
        if n > len(free) or n < 0:
            raise ValueError(f"asked for {n} blocks, {len(free)} of {self.num_blocks} are free")
        taken = [free.popitem(last=False)[0] for _ in range(n)]
        for block in taken:
            self.refs[block] = 1
            self._taken[block] = 1
        return taken

    def take_run(self, n: int) -> list[int] | None:
        """The first run of ``n`` consecutive free blocks, or None when no hole is that long."""
        start = self._taken.find(bytes(n)) if n > 0 else -1
        if start < 0:
            return None
        run = list(range(start, start + n))
        self.take_ids(run)
        return run

    def take_ids(self, blocks: Iterable[int]) -> None:
        """Take exactly these free blocks (a run, or cached content that is wanted again): all or none."""
        blocks = list(blocks)
        held = [b for b in blocks if b not in self._free]
        if held or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {held or blocks} cannot be taken: not free, or named twice")
        for block in blocks:
            del self._free[block]
            self.refs[block] = 1
            self._taken[block] = 1

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference on each block; only blocks that someone holds can be shared."""
        for block in blocks:
            if self.refs[block] < 1:
                raise ValueError(f"block {block} has no owner to share it with")
            self.refs[block] += 1
            self.num_extra_refs += 1

    def give(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block; one without references goes to the back of the free queue, in the order given."""
        refs = self.refs
        for block in blocks:
            count = refs[block] if 0 <= block < self.num_blocks else 0
            if count > 1:
                refs[block] = count - 1
                self.num_extra_refs -= 1
            elif count == 1:
                refs[block] = 0
                self._taken[block] = 0
                self._free[block] = None
            else:
                raise ValueError(f"block {block} was given back but nobody holds it (a second free?)")

    def largest_run(self) -> int:
        """Length in blocks of the longest run of free blocks. O(num_blocks): for reports."""
        return max(map(len, self._taken.split(b"\x01")), default=0)

    def check(self) -> None:
        """Raise ``AssertionError`` with the numbers when the pool contradicts itself. O(num_blocks)."""
        for block, count in enumerate(self.refs):
            assert (count == 0) == (block in self._free), f"block {block} has {count} references, free: {block in self._free}"
            assert bool(count) == bool(self._taken[block]), f"block {block}: run map says {self._taken[block]}, refs {count}"
        extra = sum(c - 1 for c in self.refs if c > 1)
        assert extra == self.num_extra_refs, f"{extra} shared references, counter says {self.num_extra_refs}"
        assert all(0 <= b < self.num_blocks for b in self._free), "the free queue names a block outside the pool"
