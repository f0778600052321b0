"""The block pool: reference counts and the order of reuse. Mechanism that all allocators share; which block to take is theirs.

Life of a block::

            take, take_ids              share                give
    free  ------------------>  refs 1  ------->  refs n  ---------->  refs n - 1 ... 0: free, at the back of the queue

The free blocks are one queue: never used ones in ascending order, then given back ones, longest free first, each sequence's in the
order in which its allocator names them. So ``take`` reuses the block that has been free longest, and blocks that lay side by side
come back side by side.

A pool that is made with ``newest_first`` takes the block that was given back last instead: of host memory then only so much is
ever touched as was held at once, and a block's first touch takes many times as long as a copy into it.

Cached content. An allocator that can find a block by what it holds says so (``keep``). Such a block goes to the back of the queue
when it is free and one without findable content to the front, so ``take`` reuses what nobody can find first, then the least
recently used: the free queue is the cache. Reusing a kept block tells its owner (``on_reuse``); ``take_ids`` takes a wanted
one back, content and all. Everything is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Every operation is O(blocks named).

    ``refs[block]`` is the number of block tables that hold the block; read it, never write it. Errors are ``ValueError`` with the
    numbers: core turns one that a plugin caused into a ``PolicyError`` that names it.
    """

    def __init__(self, num_blocks: int, block_size: int, newest_first: bool = False):
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"a pool needs num_blocks >= 0 and block_size >= 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._newest_first = newest_first
        self.refs: list[int] = [0] * num_blocks
        self.num_extra_refs = 0  # sum of max(0, refs - 1): blocks that sharing saves
        self.num_cached = 0  # free blocks whose content can be found
        self.on_reuse: Callable[[int, Any], None] | None = (
            None  # told (block, owner) when kept content is lost to ``take``
        )
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._kept: dict[int, Any] = {}  # block -> owner
        self.kept: Mapping[int, Any] = MappingProxyType(self._kept)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those with cached content included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    # ------------------------------------------------------------------------------------------- taking

    def take(self, n: int) -> list[int]:
        """``n`` free blocks, those free longest first (``newest_first``: last), now with one reference each."""
        free, refs = self._free, self.refs
        if n > len(free) or n < 0:
            raise ValueError(f"asked for {n} blocks, {len(free)} of {self.num_blocks} are free")
        pop = free.popitem
        taken = [pop(False)[0] for _ in range(n)]
        for block in taken:
            refs[block] = 1
        if self._kept:
            self._lose(taken)
        return taken

    def take_ids(self, blocks: Iterable[int]) -> None:
        """Take exactly these free blocks, all or none. Kept content stays findable: this is how it is wanted again."""
        blocks = list(blocks)
        held = [b for b in blocks if b not in self._free]
        if held or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {held or blocks} cannot be taken: not free, or named twice")
        kept = self._kept
        for block in blocks:
            del self._free[block]
            self.refs[block] = 1
            if kept and block in kept:
                self.num_cached -= 1

    def next_to_take(self, block: int) -> None:
        """Put a free block at the front of the queue: how an allocator chooses what ``take`` reuses."""
        self._free.move_to_end(block, last=False)

    # ------------------------------------------------------------------------------------------- sharing and giving back

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference on each block; only blocks that someone holds can be shared."""
        for block in blocks:
            if self.refs[block] < 1:
                raise ValueError(f"block {block} has no owner to share it with")
            self.refs[block] += 1
            self.num_extra_refs += 1

    def give(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block. One without references is free: at the back of the queue, in the order given.

        Where content is kept, a block without any goes to the front instead.
        """
        refs, free, kept = self.refs, self._free, self._kept
        for block in blocks:
            count = refs[block] if 0 <= block < self.num_blocks else 0
            if count > 1:
                refs[block] = count - 1
                self.num_extra_refs -= 1
            elif count == 1:
                refs[block] = 0
                free[block] = None
                if block in kept:
                    self.num_cached += 1
                elif kept or self._newest_first:
                    free.move_to_end(block, last=False)
            else:
                raise ValueError(f"block {block} was given back but nobody holds it (a second free?)")

    # ------------------------------------------------------------------------------------------- cached content

    def keep(self, block: int, owner: Any) -> None:
        """The content of this block can be found; ``owner`` is what ``on_reuse`` is told when it is lost."""
        if block not in self._kept and not self.refs[block]:
            self.num_cached += 1
            self._free.move_to_end(block)
        self._kept[block] = owner

    def drop(self, block: int) -> None:
        """The content of this block can no longer be found; if the block is free it is reused next."""
        del self._kept[block]
        if not self.refs[block]:
            self.num_cached -= 1
            self._free.move_to_end(block, last=False)

    def _lose(self, blocks: Sequence[int]) -> None:
        """Forget the content of blocks that are reused."""
        for block in blocks:
            owner = self._kept.pop(block, self)
            if owner is not self:
                self.num_cached -= 1
                if self.on_reuse is not None:
                    self.on_reuse(block, owner)

    # ------------------------------------------------------------------------------------------- self-check

    def check(self) -> None:
        """Raise ``AssertionError`` with the numbers when the pool contradicts itself. O(num_blocks)."""
        for block, count in enumerate(self.refs):
            assert (count == 0) == (block in self._free), (
                f"block {block} has {count} references, free: {block in self._free}"
            )
        extra = sum(c - 1 for c in self.refs if c > 1)
        assert extra == self.num_extra_refs, f"{extra} shared references, counter says {self.num_extra_refs}"
        assert all(0 <= b < self.num_blocks for b in self._free), "the free queue names a block outside the pool"
        cached = sum(1 for b in self._kept if not self.refs[b])
        assert cached == self.num_cached, f"{cached} free blocks have kept content, counter says {self.num_cached}"
