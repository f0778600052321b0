"""Looks at every call of an allocator's hooks: what it may touch, what it must answer, and that a refusal leaves no trace.

``Watch(engine).install()`` puts itself between core and the plugin. A fault is an ``AssertionError`` that names hook and rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from core.blocks import BlockPool
from core.engine import Engine
from core.plugins import HOOKS
from core.types import HOLE, Chunk, Lease, Move, Plan, Shortfall


class Watch:
    """Between core and the allocator of one engine. ``seen`` counts what happened, so that a case can say it was there."""

    def __init__(self, engine: Engine):
        self.engine, self.hooks, self.pool = engine, engine.hooks, engine.pool
        self.plugin = next(one.plugin for one in engine.hooks.chosen if one.kind == "allocator")
        self.seen: dict[str, int] = dict.fromkeys(("shortfall", "hit", "shared", "copied", "moved"), 0)
        self._calls: dict[str, Callable[..., Any]] = {}
        self._salts: dict[int, str | None] = {}  # block -> cache_salt of the sequence that wrote it
        self._host_salts: dict[int, str | None] = {}  # host block -> likewise

    def install(self) -> Watch:
        for hook in ("cached_tokens", "external_waste", "reserve", "fork", "commit", "release"):
            if hook in HOOKS and self.hooks.has(hook):
                self._calls[hook] = getattr(self.hooks, hook)
                setattr(self.hooks, hook, getattr(self, f"_{hook}"))
        return self

    # ------------------------------------------------------------------------------------------- the pool before and after

    def _state(self) -> tuple[list[int], list[int]]:
        """References of every block, and the free ones in the order of reuse."""
        return list(self.pool.refs), list(self.pool._free)

    def _unchanged(self, hook: str, before: tuple[list[int], list[int]], when: str) -> None:
        refs, free = self._state()
        changed = [
            f"block {b}: {old} -> {new} owners"
            for b, (old, new) in enumerate(zip(before[0], refs, strict=True))
            if old != new
        ]
        assert not changed, f"{hook} changed the pool {when}: {'; '.join(changed)}"
        assert free == before[1], f"{hook} changed the order of the free blocks {when}: {before[1]} became {free}"

    def _changed_by(self, hook: str, before: list[int], delta: dict[int, int]) -> None:
        """The pool's counts moved by exactly ``delta``: nothing leaked, nothing given back that is still held."""
        wrong = [
            f"block {b} has {new} owners, it should have {old + delta.get(b, 0)}"
            for b, (old, new) in enumerate(zip(before, self.pool.refs, strict=True))
            if new != old + delta.get(b, 0)
        ]
        assert not wrong, (
            f"{hook} counts owners wrongly (leak, double free, or two owners counted once): {'; '.join(wrong)}"
        )

    # ------------------------------------------------------------------------------------------- the hooks

    def _cached_tokens(self, sequences: Any) -> Any:
        before = self._state()
        counts = self._calls["cached_tokens"](sequences=sequences)
        again = self._calls["cached_tokens"](sequences=sequences)
        self._unchanged("cached_tokens", before, "although it is only a look")
        assert counts == again, f"cached_tokens gave {counts} and, asked again at once, {again}: it is only a look"
        for view, count in zip(sequences, counts or (), strict=False):
            assert 0 <= count < view.num_tokens, (
                f"cached_tokens says {count} of {view.num_tokens} tokens of {view!r} are cached: one must be left to compute"
            )
        return counts

    def _external_waste(self, sequences: Any) -> Any:
        before = self._state()
        blocks = self._calls["external_waste"](sequences=sequences)
        self._unchanged("external_waste", before, "although it is only a look")
        return blocks

    def _reserve(self, plan: Plan, sequences: Any) -> Any:
        before, twin = self._state(), self._twin(sequences)
        tables = {c.sequence: list(sequences[c.sequence].block_table) for c in plan.chunks}
        answer = self._calls["reserve"](plan=plan, sequences=sequences)
        if isinstance(answer, Shortfall):
            self.seen["shortfall"] += 1
            self._unchanged("reserve", before, "although it answered Shortfall")
            self._no_trace(plan, sequences, answer, twin)
        elif answer is not None and len(answer) == len(plan.chunks):
            self._check_leases(plan, sequences, answer, before[0], tables)
        return answer

    def _check_leases(
        self, plan: Plan, sequences: Any, leases: Sequence[Lease], before: list[int], tables: dict[int, list[int]]
    ) -> None:
        delta: dict[int, int] = {}
        for move in (move for lease in leases for move in lease.moves):
            self._follow(move)
        for chunk, lease in zip(plan.chunks, leases, strict=True):
            view, table = sequences[chunk.sequence], tables[chunk.sequence]
            for index, block in lease.blocks:
                delta[block] = delta.get(block, 0) + 1
                if index < len(table) and table[index] != HOLE:
                    delta[table[index]] = delta.get(table[index], 0) - 1
            if lease.num_cached_tokens:
                self._check_hit(view, lease)
        self._changed_by("reserve", before, delta)

    def _follow(self, move: Move) -> None:
        """The salt of what a block holds moves with it."""
        self.seen["copied" if move.kind == "copy" else "moved"] += 1
        source = self._host_salts if move.kind == "swap_in" else self._salts
        destination = self._host_salts if move.kind == "swap_out" else self._salts
        destination[move.destination] = source.get(move.source)

    def _check_hit(self, view: Any, lease: Lease) -> None:
        """A hit stays within one cache_salt; whether its content is right, check_content sees after the step."""
        self.seen["hit"] += 1
        blocks = dict(lease.blocks)
        for index in range(-(-lease.num_cached_tokens // self.pool.block_size)):
            salt = self._salts.get(blocks.get(index, HOLE))
            assert salt is None or salt == view.cache_salt, (
                f"reserve gave {view!r} with cache_salt {view.cache_salt!r} block {blocks[index]}, written under {salt!r}: "
                "salts must not share"
            )

    def _fork(self, groups: Any) -> Any:
        before = self._state()
        answer = self._calls["fork"](groups=groups)
        if answer is None or isinstance(answer, Shortfall):
            self._unchanged("fork", before, f"although it answered {answer}")
            return answer
        delta: dict[int, int] = {}
        for lease in (lease for leases in answer for lease in leases):
            for _, block in lease.blocks:
                delta[block] = delta.get(block, 0) + 1
        self._changed_by("fork", before[0], delta)
        self.seen["shared"] += self.pool.num_extra_refs > 0
        return answer

    def _commit(self, sequences: Any) -> Any:
        before = list(self.pool.refs)
        size = self.pool.block_size
        answer = self._calls["commit"](sequences=sequences)
        self._changed_by("commit", before, {})
        for view in sequences:
            for block in view.block_table[: -(-view.num_computed_tokens // size)]:
                if block != HOLE:
                    self._salts[block] = view.cache_salt
        return answer

    def _release(self, releases: Any) -> Any:
        before, delta = list(self.pool.refs), dict[int, int]()
        for release in releases:
            for block in release.block_ids:
                delta[block] = delta.get(block, 0) - 1
        answer = self._calls["release"](releases=releases)
        self._changed_by("release", before, delta)
        return answer

    # ------------------------------------------------------------------------------------------- a refusal leaves no trace

    def _memo(self, sequences: Any) -> dict[int, Any]:
        """What copies of a plugin share with it: sizes and live views."""
        engine = self.engine
        memo = {id(kept): kept for kept in (engine.limits, engine.model, engine.cost, *sequences.values())}
        for handle in engine.state.sequences.values():
            memo |= {id(kept): kept for kept in (handle.view, handle.view.token_ids, handle.view.block_table)}
        return memo

    def _twin(self, sequences: Any, of: Any = None) -> Any:
        """A copy of the plugin with pools of its own; None where it holds what cannot be copied (then only the pool
        is compared)."""
        plugin, *pools = of or (self.plugin, self.pool, self.engine.state.swap)
        memo = self._memo(sequences)
        copies = [object.__new__(BlockPool) for _ in pools]
        memo |= {id(pool): new for pool, new in zip(pools, copies, strict=True)}
        try:
            twin = clone(plugin, memo)
            for pool, new in zip(pools, copies, strict=True):
                copy_pool(pool, new, memo)
        except (TypeError, AttributeError, NotImplementedError, RecursionError):
            return None
        return twin, *copies

    def _ask(self, twin: Any, chunks: tuple[Chunk, ...], sequences: Any) -> Any:
        impl = self.hooks.impls("reserve")[0][1]
        given = {"plan": Plan(chunks), "sequences": sequences}
        return getattr(twin[0], impl.function.__name__)(*[given[name] for name in impl.argnames])

    def _no_trace(self, plan: Plan, sequences: Any, shortfall: Shortfall, twin: Any) -> None:
        """After a Shortfall the plugin answers as one that was never asked; and the chunks that it says fit, do."""
        if twin is None or not 0 <= shortfall.num_fitting < len(plan.chunks):
            return
        probes = [plan.chunks[: shortfall.num_fitting], plan.chunks[:1], plan.chunks[-1:]]
        for chunks in filter(None, dict.fromkeys(probes)):
            twins = self._twin(sequences), self._twin(sequences, twin)
            if None in twins:
                return
            asked, fresh = (self._ask(each, chunks, sequences) for each in twins)
            pools = [(pool.refs, list(pool._free)) for _, pool, _ in twins]
            assert asked == fresh and pools[0] == pools[1], (
                f"reserve remembers a plan that it answered with {shortfall}: asked next for {chunks} it gives {asked}, "
                f"one that was never asked gives {fresh} (its state must be untouched on Shortfall)"
            )
            assert chunks != probes[0] or not isinstance(asked, Shortfall), (
                f"reserve said that the first {shortfall.num_fitting} chunks of {plan.chunks} fit, and answers them with {asked}"
            )


def copy_pool(pool: BlockPool, new: BlockPool, memo: dict[int, Any]) -> None:
    """Fill ``new`` with a deep copy of the pool's fields; a read-only window ``x`` on a dict ``_x`` is made anew."""
    for name, value in vars(pool).items():
        if not isinstance(value, MappingProxyType):
            setattr(new, name, copy.deepcopy(value, memo))
    for name, value in vars(pool).items():
        if isinstance(value, MappingProxyType):
            setattr(new, name, MappingProxyType(getattr(new, f"_{name}")))


def clone(plugin: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a policy object, field by field: copy.deepcopy would lose what a subclass adds to an attrs
    class with slots."""
    new = object.__new__(type(plugin))
    memo[id(plugin)] = new
    slots = [name for cls in type(plugin).__mro__ for name in getattr(cls, "__slots__", ())]
    for name in {*slots, *getattr(plugin, "__dict__", {})} - {"__weakref__", "__dict__"}:
        if hasattr(plugin, name):
            object.__setattr__(new, name, copy.deepcopy(getattr(plugin, name), memo))
    return new
