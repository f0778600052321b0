"""``allocator=naive``: one run of consecutive blocks a sequence, reserved at its first chunk for the longest it may get.

The baselines of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, section
6.1: Orca (Max), (Pow2) and (Oracle), and what a server does that trusts ``max_tokens``::

    limit     max_model_len tokens, whatever the request says             Orca (Max)
    declared  prompt + max_tokens
    pow2      prompt + the power of two that covers the true output       Orca (Pow2): at most twice the output
    oracle    prompt + the true output                                    Orca (Oracle)

The true output is ``recorded_output_tokens``, which a replay knows; ``oracle`` refuses a request without it, ``pow2`` then covers
``max_tokens``. A sequence that outlives its record grows in place if the blocks behind it are free. If they are not it is copied to
where there is room, its own blocks counted; without any it makes room like any chunk that does not fit. Otherwise none moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from core.blocks import BlockPool
from core.hookspecs import ForkGroup, hookimpl
from core.types import (
    HOLE,
    NO_CHANGE,
    ConfigError,
    EngineInfo,
    Lease,
    Move,
    Plan,
    Refusal,
    Release,
    SequenceView,
    Shortfall,
)
from plugins.allocators.runs import FreeRuns, as_runs

Reserve = Literal["limit", "declared", "pow2", "oracle"]


def _declared(view: SequenceView) -> int:
    return view.max_tokens


def _oracle(view: SequenceView) -> int:
    recorded = view.recorded_output_tokens
    if recorded is None or view.num_output_tokens > recorded:  # the record was wrong: what is declared is left
        return view.max_tokens
    return min(recorded, view.max_tokens)


def _pow2(view: SequenceView) -> int:
    return 1 << max(0, _oracle(view) - 1).bit_length()


OUTPUT: dict[str, Callable[[SequenceView], int]] = {"declared": _declared, "pow2": _pow2, "oracle": _oracle}
"""Output tokens that a slot has room for, by ``reserve``; ``limit`` looks at no request."""


def _known_rule(instance: object, attribute: attrs.Attribute, value: object) -> None:
    if value != "limit" and value not in OUTPUT:
        raise ValueError(f"'reserve' must be one of limit, {', '.join(OUTPUT)}, got {value!r}")


@attrs.define(eq=False)
class NaiveAllocator:
    """Reserve to the maximum. ``fit``: the lowest hole that is long enough, or the shortest.

    Internal waste is what a sequence never writes of its slot; external waste is free blocks in holes too short for any waiting
    request. Nothing is shared: a fork copies the prompt's blocks into a run of the branch's own before the next forward pass, and
    a branch without a hole computes the prompt again.
    """

    reserve_for: Reserve = attrs.field(default="limit", alias="reserve", validator=_known_rule)
    fit: Literal["first", "best"] = attrs.field(default="first", validator=attrs.validators.in_(("first", "best")))
    _pool: BlockPool = attrs.field(init=False, default=None)
    _max_model_len: int = attrs.field(init=False, default=0)
    _holes: FreeRuns = attrs.field(init=False, default=None)

    @hookimpl
    def setup(self, engine_info: EngineInfo) -> None:
        self._pool, self._max_model_len = engine_info.pool, engine_info.limits.max_model_len
        self._holes = FreeRuns(self._pool.num_blocks, range(self._pool.num_blocks))
        slot = self._blocks(self._max_model_len)
        if self.reserve_for == "limit" and slot > self._pool.num_blocks:
            raise ConfigError(
                f"allocator=naive reserve=limit: one slot of max_model_len={self._max_model_len} tokens needs {slot} blocks of "
                f"{self._pool.block_size}, but the pool has {self._pool.num_blocks} (cache.num_blocks)"
            )

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _slot(self, view: SequenceView) -> int:
        """Blocks of the run that this sequence gets."""
        if self.reserve_for == "limit":
            return self._blocks(self._max_model_len)
        tokens = view.num_prompt_tokens + OUTPUT[self.reserve_for](view)
        return self._blocks(min(tokens, self._max_model_len))

    def _take(self, blocks: Sequence[int]) -> None:
        self._pool.take_ids(blocks)
        for start, length in as_runs(blocks):
            self._holes.remove(start, length)

    def _give(self, blocks: Sequence[int]) -> None:
        self._pool.give(blocks)
        for start, length in as_runs(blocks):
            self._holes.add(start, length)

    @hookimpl
    def admit(self, sequences: Sequence[SequenceView]) -> Sequence[Refusal | None]:
        return [self._refusal(view) for view in sequences]

    def _refusal(self, view: SequenceView) -> Refusal | None:
        if self.reserve_for == "oracle" and view.recorded_output_tokens is None:
            return Refusal(
                "allocator=naive reserve=oracle serves only requests that carry recorded_output_tokens (a replay)"
            )
        slot = self._slot(view)
        if slot <= self._pool.num_blocks:
            return None
        return Refusal(
            f"the request needs a slot of {slot} KV blocks ({view.num_prompt_tokens} prompt + at most {view.max_tokens} output "
            f"tokens, {self._pool.block_size} a block), but the pool has {self._pool.num_blocks} blocks "
            f"({self._pool.num_blocks * self._pool.block_size} tokens)"
        )

    @hookimpl
    def external_waste(self, sequences: Sequence[SequenceView]) -> int:
        return self._holes.shorter_than(min(self._slot(view) for view in sequences))

    @hookimpl
    def reserve(self, plan: Plan, sequences: Mapping[int, SequenceView]) -> Sequence[Lease] | Shortfall:
        size = self._pool.block_size
        new: list[tuple[int, int]] = []  # place in the plan, blocks
        grown: list[tuple[int, list[int], list[int]]] = []  # place, the run it has, the longer one that it gets
        too_long: int | None = None  # place of the first that outlived its record and cannot grow
        for i, chunk in enumerate(plan.chunks):
            view = sequences[chunk.sequence]
            if view.where != "device":
                new.append((i, self._slot(view)))
            elif view.num_computed_tokens + chunk.num_tokens > len(view.block_table) * size:
                have, wanted = list(view.block_table), self._grown(view, chunk.num_tokens)
                if wanted > len(have):
                    run = self._extend(have, wanted)
                    if not run:
                        too_long = i
                        break
                    grown.append((i, have, run))
        starts = self._holes.find_all([slot for _, slot in new], self.fit)
        if too_long is not None or len(starts) < len(new):
            for _, have, run in reversed(grown):
                self._exchange(run, have)
            short = new[len(starts)][0] if len(starts) < len(new) else len(plan.chunks)
            return Shortfall(min(short, len(plan.chunks) if too_long is None else too_long), self._missing(new))
        leases = [NO_CHANGE] * len(plan.chunks)
        moves: list[Move] = []
        for i, have, run in grown:
            first = 0 if run[0] != have[0] else len(have)
            leases[i] = Lease(tuple(enumerate(run))[first:])
            pairs = list(zip(have, run, strict=False)) if not first else []
            moves += [Move("copy", *pair) for pair in (pairs if run[0] < have[0] else reversed(pairs))]
        for (i, slot), start in zip(new, starts, strict=True):
            self._take(range(start, start + slot))
            leases[i] = Lease(tuple(enumerate(range(start, start + slot))))
        if moves:  # all on the first lease: what is leased to one may be what another moves out of
            leases[0] = Lease(leases[0].blocks, tuple(moves))
        return leases

    def _missing(self, new: list[tuple[int, int]]) -> int:
        return max(1, sum(slot for _, slot in new) - self._pool.num_free)

    def _grown(self, view: SequenceView, num_tokens: int) -> int:
        """Blocks for a sequence that outlived its record: up to what it declared."""
        end = self._blocks(min(view.num_computed_tokens + num_tokens, view.num_tokens))
        return max(self._slot(view), end) if end > len(view.block_table) else len(view.block_table)

    def _extend(self, have: list[int], wanted: int) -> list[int]:
        """Take a longer run in the place of one: with the blocks behind it where they are free, or wherever there is room if its
        own blocks were free, too. Empty when there is none."""
        pool, last = self._pool, have[-1]
        behind = list(range(last + 1, last + 1 + wanted - len(have)))
        if behind[-1] < pool.num_blocks and not any(pool.refs[block] for block in behind):
            self._take(behind)
            return have + behind
        self._give(have)
        starts = self._holes.find_all([wanted], self.fit)
        run = list(range(starts[0], starts[0] + wanted)) if starts else []
        self._take(run or have)
        return run

    def _exchange(self, run: list[int], have: list[int]) -> None:
        self._give(run)
        self._take(have)

    @hookimpl
    def fork(self, groups: Sequence[ForkGroup]) -> Sequence[Sequence[Lease]] | Shortfall:
        pool = self._pool
        slots = [self._slot(child) for _, children in groups for child in children]
        starts = self._holes.find_all(slots, self.fit)
        if len(starts) < len(slots):
            return Shortfall(0, max(1, sum(slots) - pool.num_free))
        places = iter(zip(starts, slots, strict=True))
        answer: list[list[Lease]] = []
        for parent, children in groups:
            written = parent.block_table[: self._blocks(parent.num_computed_tokens)]
            leases = []
            for _ in children:
                start, slot = next(places)
                run = range(start, start + slot)
                self._take(run)
                moves = tuple(Move("copy", *pair) for pair in zip(written, run, strict=False) if pair[0] != HOLE)
                leases.append(Lease(tuple(enumerate(run)), moves))
            answer.append(leases)
        return answer

    @hookimpl
    def release(self, releases: Sequence[Release]) -> Any:
        for release in releases:
            self._give(release.block_ids)
        return True
