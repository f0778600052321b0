"""Allocators with one planted fault each, and a small one that shares prefixes, which the kit must pass."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import attrs

from core.hookspecs import hookimpl
from core.types import HOLE, Lease, Plan, Refusal, Shortfall
from plugins.allocators.paged import PagedAllocator


class Faulty(PagedAllocator):
    """Gives what the shipped one gives, after ``change``."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        answer = PagedAllocator.reserve(self, plan, sequences)
        return answer if isinstance(answer, Shortfall) else self.change(plan, sequences, list(answer))

    def change(self, plan: Plan, sequences: Any, leases: list[Lease]) -> Any:
        return leases


class TwoOwners(Faulty):
    """Leases one sequence's new block to another one too, counted once."""

    def change(self, plan: Plan, sequences: Any, leases: list[Lease]) -> Any:
        new = [i for i, lease in enumerate(leases) if lease.blocks]
        if len(new) > 1:
            (index, _), *rest = leases[new[1]].blocks
            leases[new[1]] = attrs.evolve(leases[new[1]], blocks=((index, leases[new[0]].blocks[0][1]), *rest))
        return leases


class DoubleFree(PagedAllocator):
    """Gives the last block of a release back twice, if somebody else holds it."""

    @hookimpl
    def release(self, releases: Any) -> None:
        shared = [block for r in releases for block in r.block_ids[-1:] if self._pool.refs[block] > 1]
        PagedAllocator.release(self, releases)
        self._pool.give(shared)


class Leak(PagedAllocator):
    """Keeps the first block of every release."""

    @hookimpl
    def release(self, releases: Any) -> None:
        PagedAllocator.release(self, [attrs.evolve(r, block_ids=r.block_ids[1:]) for r in releases])


class LeakOnAbort(PagedAllocator):
    """Forgets what aborted requests held."""

    @hookimpl
    def release(self, releases: Any) -> None:
        PagedAllocator.release(self, [r for r in releases if r.reason != "abort"])


class NoCopy(Faulty):
    """Replaces a shared block but forgets the copy."""

    def change(self, plan: Plan, sequences: Any, leases: list[Lease]) -> Any:
        return [attrs.evolve(lease, moves=()) for lease in leases]


class WritesShared(PagedAllocator):
    """Never copies: a branch writes into its siblings' block."""

    def _need(self, view: Any, num_tokens: int, owners: Any) -> Any:
        table = view.block_table
        end = min(view.num_computed_tokens + num_tokens, view.num_tokens)
        return [i for i, block in enumerate(table) if block < 0] + list(
            range(len(table), -(-end // self._pool.block_size))
        )


class KeepsHoles(PagedAllocator):
    """Forgets that a swapped sequence needs its blocks back."""

    def _need(self, view: Any, num_tokens: int, owners: Any) -> Any:
        table = view.block_table
        return [i for i in PagedAllocator._need(self, view, num_tokens, owners) if i >= len(table) or table[i] != HOLE]


class TooFew(PagedAllocator):
    """Gives one block where several are needed."""

    def _need(self, view: Any, num_tokens: int, owners: Any) -> Any:
        return PagedAllocator._need(self, view, num_tokens, owners)[:1]


class TakesOnShortfall(PagedAllocator):
    """Keeps a block although it refuses the plan."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        answer = PagedAllocator.reserve(self, plan, sequences)
        if isinstance(answer, Shortfall) and self._pool.num_free:
            self._pool.take(1)
        return answer


class RemembersShortfall(PagedAllocator):
    """Leaves the pool alone on Shortfall, but a list of its own grows: its next answer is another one."""

    _stack: list = attrs.field(init=False, factory=list)

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        answer = PagedAllocator.reserve(self, plan, sequences)
        if isinstance(answer, Shortfall):
            self._stack.append(answer)
            return answer
        return [self.turned(lease) for lease in answer] if len(self._stack) % 2 else answer

    @staticmethod
    def turned(lease: Lease) -> Lease:
        """The same blocks in another order."""
        indices, blocks = zip(*lease.blocks, strict=True) if lease.blocks else ((), ())
        return lease if lease.moves else attrs.evolve(lease, blocks=tuple(zip(indices, blocks[::-1], strict=True)))


RemembersShortfall = attrs.define(eq=False)(RemembersShortfall)  # type: ignore[misc]


class SaysItFits(PagedAllocator):
    """Says of one chunk too many that it fits."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        answer = PagedAllocator.reserve(self, plan, sequences)
        if isinstance(answer, Shortfall) and answer.num_fitting + 1 < len(plan.chunks):
            return attrs.evolve(answer, num_fitting=answer.num_fitting + 1)
        return answer


class ClaimsHits(Faulty):
    """Says that a newcomer's first token is cached; it is not."""

    def change(self, plan: Plan, sequences: Any, leases: list[Lease]) -> Any:
        views = [sequences[chunk.sequence] for chunk in plan.chunks]
        return [
            attrs.evolve(lease, num_cached_tokens=1) if view.where == "none" and view.num_tokens > 1 else lease
            for lease, view in zip(leases, views, strict=True)
        ]


class LooksAndTakes(PagedAllocator):
    """Turns the free queue when it is only asked to look."""

    @hookimpl
    def cached_tokens(self, sequences: Any) -> Any:
        if self._pool.num_free:
            self._pool.give(self._pool.take(1))
        return [0] * len(sequences)


class PowersOfTwo(PagedAllocator):
    """Computes a block's index with a shift: right for 1, 2, 4, 8, ... only."""

    def _need(self, view: Any, num_tokens: int, owners: Any) -> Any:
        end = min(view.num_computed_tokens + num_tokens, view.num_tokens)
        shift = self._pool.block_size.bit_length() - 1
        if self._pool.block_size == 1 << shift:
            return PagedAllocator._need(self, view, num_tokens, owners)
        return [*PagedAllocator._need(self, view, num_tokens, owners)][
            : max(0, (end - 1 >> shift) - len(view.block_table))
        ]


class RefusesEverything(PagedAllocator):
    """No request is good enough."""

    @hookimpl
    def admit(self, sequences: Any) -> Any:
        return [Refusal("not today") for _ in sequences]


class KeepsStateInTheClass(PagedAllocator):
    """Engines share a counter, so that a run depends on those before it."""

    runs: ClassVar[list[int]] = []

    @hookimpl
    def setup(self, engine_info: Any) -> None:
        self.runs.append(1)
        self._pool = engine_info.pool
        if len(self.runs) % 2:
            self._pool.take(2)  # a reserve for every other engine

    @hookimpl
    def teardown(self) -> None:
        """Nothing."""


class AsksASet(PagedAllocator):
    """Refuses newcomers by the order of a set of strings."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        first = next(iter({sequences[chunk.sequence].client_id for chunk in plan.chunks}))
        if len(plan.chunks) > 1 and not plan.chunks[-1].may_preempt and hash(first) % 2:
            return Shortfall(len(plan.chunks) - 1, 1)
        return PagedAllocator.reserve(self, plan, sequences)


class Slow(Faulty):
    """Takes its time."""

    def change(self, plan: Plan, sequences: Any, leases: list[Lease]) -> Any:
        time.sleep(0.03)
        return leases


class Quadratic(Faulty):
    """Compares every sequence with every other."""

    def change(self, plan: Plan, sequences: Any, leases: list[Lease]) -> Any:
        for one in plan.chunks:
            assert sum(other.sequence == one.sequence for other in plan.chunks) == 1
        return leases


class NeedsTorch(PagedAllocator):
    """Imports torch when it is set up."""

    @hookimpl
    def setup(self, engine_info: Any) -> None:
        import torch  # noqa: F401

        self._pool = engine_info.pool


class Fields(PagedAllocator):
    """Has fields, for YAML files that do not tell the truth about them."""

    depth: int = attrs.field(default=3)
    fit: str = attrs.field(default="first")


Fields = attrs.define(eq=False)(Fields)  # type: ignore[misc]


class Bare(Faulty):
    __doc__ = None


# ------------------------------------------------------------------------------------------------ sharing prefixes


class TinyPrefix(PagedAllocator):
    """Paged, and full blocks of earlier prompts are found again: the smallest allocator with ``cached_tokens``,
    right in every way."""

    @hookimpl
    def setup(self, engine_info: Any) -> None:
        self._pool = engine_info.pool
        self._block: dict[Any, int] = {}  # key -> block
        self._key: dict[int, Any] = {}  # block -> key

    def key(self, view: Any, index: int) -> Any:
        return view.cache_salt, tuple(view.token_ids[: (index + 1) * self._pool.block_size])

    def find(self, view: Any) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * self._pool.block_size < view.num_tokens:
            block = self._block.get(self.key(view, len(found)))
            if block is None:
                break
            found.append(block)
        return found

    @hookimpl
    def cached_tokens(self, sequences: Any) -> Any:
        return [0 if view.where == "swap" else len(self.find(view)) * self._pool.block_size for view in sequences]

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        views = [sequences[chunk.sequence] for chunk in plan.chunks]
        hits = [self.find(view) if view.where == "none" else [] for view in views]
        pinned = list(dict.fromkeys(b for hit in hits for b in hit if not self._pool.refs[b]))
        owners: dict[int, int] = {}
        needs = []
        for view, chunk, hit in zip(views, plan.chunks, hits, strict=True):
            end = min(len(hit) * self._pool.block_size + chunk.num_tokens, view.num_tokens)
            fresh = range(len(hit), -(-end // self._pool.block_size))
            needs.append(list(fresh) if hit else list(self._need(view, chunk.num_tokens, owners)))
        wanted = 0
        for i, need in enumerate(needs):
            wanted += len(need) + sum(1 for b in pinned if any(b in hit for hit in hits[i : i + 1]))
            if wanted > self._pool.num_free:
                return Shortfall(i, max(1, sum(map(len, needs)) + len(pinned) - self._pool.num_free))
        for hit in hits:
            for block in hit:
                self._pool.share([block]) if self._pool.refs[block] else self._pool.take_ids([block])
        return [self.give(view, need, hit) for view, need, hit in zip(views, needs, hits, strict=True)]

    def give(self, view: Any, need: Any, hit: list[int]) -> Lease:
        lease = PagedAllocator._lease(self, view, need)
        self.forget([block for _, block in lease.blocks])
        if not hit:
            return lease
        cached = len(hit) * self._pool.block_size
        return Lease((*enumerate(hit), *lease.blocks), lease.moves, cached)

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self._key:
                del self._block[self._key.pop(block)]

    @hookimpl
    def commit(self, sequences: Any) -> bool:
        for view in sequences:
            for index in range(view.num_computed_tokens // self._pool.block_size):
                key, block = self.key(view, index), view.block_table[index]
                if key not in self._block and block not in self._key:
                    self._block[key], self._key[block] = block, key
        return True


class IgnoresSalt(TinyPrefix):
    """Tenants share."""

    def key(self, view: Any, index: int) -> Any:
        return "", TinyPrefix.key(self, view, index)[1]


class KeepsStaleKeys(TinyPrefix):
    """A block that is taken for something else keeps its key."""

    def forget(self, blocks: list[int]) -> None:
        """Nothing."""


class HashesOneBlock(TinyPrefix):
    """The key of a block has its own tokens only, not those before it."""

    def key(self, view: Any, index: int) -> Any:
        size = self._pool.block_size
        return view.cache_salt, tuple(view.token_ids[index * size : (index + 1) * size])


class CommitsTooMuch(TinyPrefix):
    """Offers a block that is not full yet."""

    @hookimpl
    def commit(self, sequences: Any) -> bool:
        for view in sequences:
            for index in range(min(len(view.block_table), view.num_tokens // self._pool.block_size)):
                key, block = self.key(view, index), view.block_table[index]
                if key not in self._block and block not in self._key:
                    self._block[key], self._key[block] = block, key
        return True


class NeverHits(TinyPrefix):
    """Offers cached_tokens and finds nothing."""

    def find(self, view: Any) -> list[int]:
        return []


class TakesBeforePinning(TinyPrefix):
    """Takes one sequence's new blocks before it holds another's hit."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        views = [sequences[chunk.sequence] for chunk in plan.chunks]
        hits = [self.find(view) if view.where == "none" else [] for view in views]
        before = list(self._pool._free)
        answer = TinyPrefix.reserve(self, plan, sequences)
        if isinstance(answer, Shortfall) or len(views) < 2 or not hits[-1]:
            return answer
        stolen = next((b for b in hits[-1] if b in before and self._pool.refs[b] == 1), None)
        victim = next((i for i, lease in enumerate(answer[:-1]) if lease.blocks and not hits[i]), None)
        if stolen is None or victim is None:
            return answer
        (index, block), *rest = answer[victim].blocks
        self._pool.share([stolen])
        self._pool.give([block])
        answer[victim] = attrs.evolve(answer[victim], blocks=((index, stolen), *rest))
        return answer
