"""What ``allocator=prefix`` knows of contents: an index of full blocks by a chain of keys, compared token by token on a hit.

A block's key is a keyed blake2b hash of its parent's key and its own tokens, from a root made of ``cache_salt`` and a random key of
this engine: keys can neither be guessed nor met under another salt. Since a hit compares tokens, parent by parent, a weak
hash could lose hits but never give another prompt's KV.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b

from core.types import HOLE, SequenceView


class Entry:
    """One block's worth of tokens that can be found, on the device or in host memory; on neither it is dead."""

    __slots__ = ("key", "tokens", "parent", "depth", "block", "host", "children", "resident", "uses", "stamp")

    def __init__(self, key: bytes, tokens: bytes, parent: Entry | None, depth: int):
        self.key, self.tokens, self.parent, self.depth = key, tokens, parent, depth
        self.block = self.host = HOLE
        self.children = 0  # living entries that continue this one
        self.resident = 0  # of them, those with a device block
        self.uses = 0  # hits
        self.stamp = 0  # of its newest place on the eviction heap

    @property
    def dead(self) -> bool:
        return self.block == HOLE and self.host == HOLE

    def token_ids(self) -> list[int]:
        return array("i", self.tokens).tolist()


class Chain:
    """What is known of one sequence's leading full blocks: entries found or offered so far, and the key of the block behind
    them.
    """

    __slots__ = ("entries", "root", "next", "epoch")

    def __init__(self, root: Entry, epoch: int):
        self.root, self.epoch = root, epoch
        self.entries: list[Entry] = []
        self.next: tuple[bytes, bytes] | None = None  # key and tokens

    @property
    def tip(self) -> Entry:
        return self.entries[-1] if self.entries else self.root

    def push(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.next = None

    def cut(self, length: int) -> None:
        if length < len(self.entries):
            del self.entries[length:]
            self.next = None

    def cut_dead(self) -> None:
        """Keep what lies before the first dead entry."""
        self.cut(next((i for i, entry in enumerate(self.entries) if entry.dead), len(self.entries)))


def same(one: Entry | None, other: Entry | None) -> bool:
    """Whether two entries stand for the same tokens from the root on, by comparison."""
    while one is not other:
        if one is None or other is None or one.depth != other.depth or one.tokens != other.tokens:
            return False
        one, other = one.parent, other.parent
    return True


class ContentIndex:
    """Entries by key, and each living sequence's chain of them."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.entries: dict[bytes, Entry] = {}
        self.chains: dict[int, Chain] = {}  # sequence id -> chain
        self._secret = secrets.token_bytes(32)
        self._epoch = (
            0  # raised when an entry dies before those that continue it: only then can a chain break in its middle
        )

    def hash(self, parent: bytes, tokens: bytes) -> bytes:
        """16 bytes that say what a block holds and everything before it."""
        return blake2b(parent + tokens, digest_size=16, key=self._secret).digest()

    def chain(self, view: SequenceView) -> Chain:
        """The sequence's chain, made at its first use."""
        chain = self.chains.get(view.id)
        if chain is None:
            salt = view.cache_salt.encode("utf-8", "surrogatepass")
            chain = self.chains[view.id] = Chain(Entry(self.hash(b"", salt), salt, None, -1), self._epoch)
        return chain

    def find(self, view: SequenceView, chain: Chain) -> tuple[Entry | None, bytes, bytes]:
        """The living entry of the block behind the chain, if there is one; and that block's key and tokens."""
        if chain.next is None:
            start = len(chain.entries) * self.block_size
            tokens = array("i", view.token_ids[start : start + self.block_size]).tobytes()
            chain.next = self.hash(chain.tip.key, tokens), tokens
        key, tokens = chain.next
        entry = self.entries.get(key)
        if entry is not None and (entry.tokens != tokens or not self._follows(entry, chain.tip)):
            entry = None
        return entry, key, tokens

    def _follows(self, entry: Entry, tip: Entry) -> bool:
        parent = entry.parent
        if parent is tip:
            return True
        if parent is None or not same(parent, tip):
            return False
        entry.parent = (
            tip  # the parent had died and was offered again, or it is another sequence's root of the same salt
        )
        resident = entry.block != HOLE
        parent.children -= 1
        parent.resident -= resident
        tip.children += 1
        tip.resident += resident
        return True

    def match(self, view: SequenceView) -> int:
        """How many leading blocks of a sequence without KV are known; its chain then begins with them. At least one of its tokens
        is left to compute. O(newly matched blocks) when asked again.
        """
        chain = self.chain(view)
        if chain.epoch != self._epoch:
            chain.cut_dead()
            chain.epoch = self._epoch
        entries = chain.entries
        while entries and entries[-1].dead:
            chain.cut(len(entries) - 1)
        limit = (view.num_tokens - 1) // self.block_size
        while len(entries) < limit and (entry := self.find(view, chain)[0]) is not None:
            chain.push(entry)
        return min(len(entries), limit)

    def add(self, key: bytes, tokens: bytes, chain: Chain) -> Entry | None:
        """A new entry behind the chain; None when the key stands for other tokens, which came first and keep it."""
        if key in self.entries:
            return None
        entry = self.entries[key] = Entry(key, tokens, chain.tip, len(chain.entries))
        chain.tip.children += 1
        return entry

    def set_block(self, entry: Entry, block: int) -> None:
        """The entry's device block is now this one, or ``HOLE``."""
        if entry.parent is not None:
            entry.parent.resident += (block != HOLE) - (entry.block != HOLE)
        entry.block = block

    def remove(self, entry: Entry) -> None:
        """The entry is dead: it cannot be found any more."""
        del self.entries[entry.key]
        if entry.children:
            self._epoch += 1
        if entry.parent is not None:
            entry.parent.children -= 1

    def fork(self, parent: SequenceView, child: SequenceView) -> None:
        """The child begins with its parent's blocks."""
        known = self.chain(parent)
        chain = self.chains[child.id] = Chain(
            known.root, known.epoch
        )  # not today's: the parent's entries were not looked at since
        chain.entries = list(known.entries)

    def clear(self) -> None:
        """Forget everything."""
        for entry in self.entries.values():
            entry.block = entry.host = HOLE
        self.entries.clear()
        self._epoch += 1
        for chain in self.chains.values():
            chain.cut(0)
