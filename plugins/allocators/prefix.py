"""``allocator=prefix``: paged, and full blocks are shared across requests by what they hold.

Life of a cached block: ``commit`` offers it, whether a prompt or decode wrote it; when its last holder releases it, it goes
to the back
of the pool's free queue and can still be found (a sequence's tail before its head); a hit takes it out again; when ``take`` reuses
it, it cannot be found any more. A fully cached prompt computes its last block again, into a block of its own: so logits exist and
nothing shared is written. Two sequences that write the same tokens at the same time each keep their own block; one is found.

Sources: block hash chains over a free queue that is the LRU are vLLM's automatic prefix caching (Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", SOSP 2023, shared prefix); evicting leaves first is
RadixAttention's (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from core.blocks import BlockPool
from core.cost import CostModel
from core.hookspecs import ForkGroup, hookimpl
from core.types import HOLE, NO_CHANGE, EngineInfo, Lease, Move, Plan, Release, SequenceView, Shortfall
from plugins.allocators.content import ContentIndex, Entry
from plugins.allocators.evict import ORDERS, Evictor

NEVER = 1 << 62  # tokens that no sequence reaches


def _known_order(instance: object, attribute: attrs.Attribute, value: object) -> None:
    if value not in ORDERS:
        raise ValueError(f"'{attribute.name}' must be one of {', '.join(ORDERS)}, got {value!r}")


@attrs.define(eq=False)
class PrefixAllocator:
    """``evict``: which cached block goes first. ``host``: an evicted block goes to free swap space where copying it out and
    in again is
    cheaper than computing it again (core/cost.py), and comes back on a hit; swapped sequences take that space before the cache.

    Hits are looked up when a sequence starts, also after a preemption by recompute. Requests share only within a ``cache_salt``.
    """

    extends_tables = True  # it goes on with a table that another sequence began (sessions: see core/sessions.py)

    evict: str = attrs.field(default="lru", validator=_known_order)
    host: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    _pool: BlockPool = attrs.field(init=False, default=None)
    _swap: BlockPool | None = attrs.field(init=False, default=None)  # with ``host``
    _cost: CostModel = attrs.field(init=False, default=None)
    _index: ContentIndex = attrs.field(init=False, default=None)
    _evictor: Evictor = attrs.field(init=False, default=None)
    _room: dict[int, int] = attrs.field(
        init=False, factory=dict
    )  # tokens a sequence may have computed without a new block
    _due: dict[int, int] = attrs.field(init=False, factory=dict)  # computed tokens at which its next block is full
    _moves: list[Move] = attrs.field(
        init=False, factory=list
    )  # of the reserve under way, in the order of its decisions

    @hookimpl
    def setup(self, engine_info: EngineInfo) -> None:
        self._pool, self._cost = engine_info.pool, engine_info.cost
        self._pool.on_reuse = self._evicted
        self._index = ContentIndex(self._pool.block_size)
        self._evictor = Evictor(ORDERS[self.evict], self._pool, self._cost)
        if self.host and engine_info.swap is not None and engine_info.swap.num_blocks:
            self._swap = engine_info.swap
            self._swap.on_reuse = self._lost_on_host

    @hookimpl
    def cached_tokens(self, sequences: Sequence[SequenceView]) -> Sequence[int]:
        index, size = self._index, self._pool.block_size
        if not index.entries:
            return [0] * len(sequences)
        return [index.match(view) * size if view.where == "none" else 0 for view in sequences]

    # ------------------------------------------------------------------------------------------- reserve

    @hookimpl
    def reserve(self, plan: Plan, sequences: Mapping[int, SequenceView]) -> Sequence[Lease] | Shortfall:
        room, refs, free = self._room, self._pool.refs, self._pool.num_free
        asked = [
            (i, sequences[id], n)
            for i, (id, n, _) in enumerate(plan.chunks)
            if sequences[id].num_computed_tokens + n > room.get(id, 0)
        ]
        owners: dict[int, int] = {}  # of blocks that are copied in this plan: the last writer writes in place
        fetched: set[Entry] = set()  # hits that leave the free queue, or come from the host into a block of it
        needs: list[tuple[int, SequenceView, list[Entry], list[int]]] = []
        wanted, num_fitting = 0, None
        for i, view, n in asked:
            hits: list[Entry] = []
            if view.where == "none":
                num_hits = self._index.match(view)
                hits = self._index.chain(view).entries[:num_hits]
                fetched.update([e for e in hits if e.block == HOLE or not refs[e.block]])
            indices = self._indices(view, len(hits), n, owners)
            wanted += len(indices)
            if num_fitting is None and wanted + len(fetched) > free:
                num_fitting = i
            needs.append((i, view, hits, indices))
        if num_fitting is not None:
            return Shortfall(num_fitting, wanted + len(fetched) - free)
        leases = [NO_CHANGE] * len(plan.chunks)
        if not needs:
            return leases
        self._moves = []
        self._pin([entry for _, _, hits, _ in needs for entry in hits])
        for i, view, hits, indices in needs:
            leases[i] = self._lease(view, hits, indices)
        if self._moves:  # all on the plan's first lease: an eviction for one chunk may free the host block of another's
            leases[0] = Lease(leases[0].blocks, tuple(self._moves), leases[0].num_cached_tokens)
        return leases

    def _indices(self, view: SequenceView, num_hits: int, num_tokens: int, owners: dict[int, int]) -> list[int]:
        """Table indices that need a new block before this chunk can be written."""
        size, table = self._pool.block_size, view.block_table
        start = view.num_computed_tokens or num_hits * size
        end = min(start + num_tokens, view.num_tokens)
        indices = [i for i, block in enumerate(table) if block == HOLE] if view.where == "swap" else []
        if start % size and table[start // size] != HOLE:
            block = table[start // size]
            count = owners.get(block) or self._pool.refs[block]
            if count > 1:
                owners[block] = count - 1
                indices.append(start // size)
        indices += range(len(table) or num_hits, -(-end // size))
        return indices

    def _pin(self, hits: list[Entry]) -> None:
        """Hold every hit of the plan before a block is taken; then those in host memory come back by copy."""
        pool, refs = self._pool, self._pool.refs
        away = dict.fromkeys(entry for entry in hits if entry.block == HOLE)
        if away and self._swap is not None:
            self._swap.take_ids([entry.host for entry in away])
        for entry in hits:
            entry.uses += 1
            if entry not in away:
                (pool.share if refs[entry.block] else pool.take_ids)((entry.block,))
        for entry in away:
            self._fetch(entry)
        held = set()
        for entry in hits:
            if entry in held:
                pool.share((entry.block,))  # a second sequence of this plan that starts from it
            elif entry in away:
                held.add(entry)

    def _fetch(self, entry: Entry) -> None:
        """Copy a pinned host block into a device block."""
        assert self._swap is not None
        (block,) = self._evictor.take(1)
        self._moves.append(Move("swap_in", entry.host, block))
        host = entry.host
        self._to_device(entry, block)
        self._swap.give((host,))

    def _lease(self, view: SequenceView, hits: list[Entry], indices: list[int]) -> Lease:
        table, size = view.block_table, self._pool.block_size
        blocks = [(i, entry.block) for i, entry in enumerate(hits)]
        for index, block in zip(indices, self._evictor.take(len(indices)), strict=True):
            old = table[index] if index < len(table) else HOLE
            if old != HOLE:
                self._moves.append(Move("copy", old, block))
                self._pool.give((old,))
            blocks.append((index, block))
        if view.where == "none":
            self._index.chain(view).cut(len(hits))
            self._due[view.id] = (len(hits) + 1) * size
        self._room[view.id] = max(len(table), blocks[-1][0] + 1 if blocks else 0) * size
        return Lease(tuple(blocks), (), len(hits) * size)

    # ------------------------------------------------------------------------------------------- commit, fork, release

    @hookimpl
    def commit(self, sequences: Sequence[SequenceView]) -> Any:
        due = self._due
        for view in sequences:
            if view.num_computed_tokens >= due.get(
                view.id, 0
            ):  # a session's next turn goes on with blocks that it never reserved
                self._offer(view)
        return True

    def _offer(self, view: SequenceView) -> None:
        """Make this sequence's full blocks findable; where the same content can be found already, that stays the one."""
        index, chain, table = self._index, self._index.chain(view), view.block_table
        full = view.num_computed_tokens // index.block_size
        if chain.entries and chain.tip.dead:
            chain.cut_dead()  # evicted, while this sequence holds the same content in blocks of its own: offer those
        for i in range(len(chain.entries), full):
            entry, key, tokens = index.find(view, chain)
            entry = entry or index.add(key, tokens, chain)
            if entry is None:
                self._due[view.id] = NEVER  # a key that two contents share
                return
            if entry.block == HOLE:
                self._to_device(entry, table[i])
            chain.push(entry)
        self._due[view.id] = (full + 1) * index.block_size

    def _to_device(self, entry: Entry, block: int) -> None:
        if entry.host != HOLE and self._swap is not None:
            self._swap.drop(entry.host)
            entry.host = HOLE
        self._index.set_block(entry, block)
        self._pool.keep(block, entry)

    @hookimpl
    def fork(self, groups: Sequence[ForkGroup]) -> Sequence[Sequence[Lease]]:
        leases = []
        for parent, children in groups:
            blocks = tuple(enumerate(parent.block_table[: -(-parent.num_computed_tokens // self._pool.block_size)]))
            for child in children:
                self._pool.share([block for _, block in blocks])
                self._index.fork(parent, child)
                self._due[child.id] = self._due[parent.id]
            self._room[parent.id] = 0  # its next write may need a copy
            leases.append([Lease(blocks)] * len(children))
        return leases

    @hookimpl
    def release(self, releases: Sequence[Release]) -> Any:
        kept = self._pool.kept
        for id, block_ids, reason in [(r.sequence, r.block_ids, r.reason) for r in releases]:
            blocks = block_ids[::-1]
            self._pool.give(blocks)
            if self._evictor.order is not None:
                for block in blocks:
                    self._evictor.consider(kept.get(block))
            self._room.pop(id, None)
            if reason in ("finish", "abort", "error"):
                self._due.pop(id, None)
                self._index.chains.pop(id, None)
        return True

    # ------------------------------------------------------------------------------------------- eviction, reset

    def _evicted(self, block: int, entry: Entry) -> None:
        """The pool reuses a cached block: its content goes to the host, if that pays, or cannot be found any more."""
        swap, size = self._swap, self._pool.block_size
        self._index.set_block(entry, HOLE)
        again_s = self._cost.recompute_s((entry.depth + 1) * size, entry.depth * size)
        if swap is not None and swap.num_free and self._cost.swap_s(size) <= again_s:
            (entry.host,) = swap.take(1)
            self._moves.append(Move("swap_out", block, entry.host))
            swap.keep(entry.host, entry)
            swap.give((entry.host,))
        else:
            self._index.remove(entry)
        self._evictor.consider(entry.parent)

    def _lost_on_host(self, host: int, entry: Entry) -> None:
        entry.host = HOLE
        self._index.remove(entry)

    @hookimpl
    def reset_cache(self) -> Any:
        for entry in self._index.entries.values():
            if entry.block != HOLE:
                self._pool.drop(entry.block)
            elif self._swap is not None:
                self._swap.drop(entry.host)
        self._index.clear()
        self._due = dict.fromkeys(self._due, NEVER)  # what sequences hold now is not offered any more
        return True

    def cached_blocks(self) -> Iterator[tuple[str, int, int, list[int]]]:
        """Everything that can be found, as ("device" or "host", block id, position of its first token, its token ids): for
        tests.
        """
        for entry in self._index.entries.values():
            where, block = ("device", entry.block) if entry.block != HOLE else ("host", entry.host)
            yield where, block, entry.depth * self._pool.block_size, entry.token_ids()
