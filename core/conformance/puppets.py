"""A scheduler and a preemption policy that do anything the contract allows, drawn at random: what an allocator must live with.

Orderly (``random`` is None) they serve in arrival order, so that a run can always be brought to its end.
"""

from __future__ import annotations

import random as _random
from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, Eviction, Plan, SequenceView, Shortfall, View


@attrs.define(eq=False)
class AnyPlan:
    """Any chunks of any running and waiting sequences, in any order."""

    random: _random.Random | None = None

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        rng = self.random
        running, waiting = list(view.running), list(view.waiting)
        room = view.max_num_seqs - len(running)
        if rng is not None:
            rng.shuffle(running)
            running = running[: rng.randint(1, len(running))] if running else []
            rng.shuffle(waiting)
            room = rng.randint(0, room) if running else max(1, room)
        picked = running + waiting[: max(0, room)]
        if rng is not None:
            rng.shuffle(picked)
        return Plan(tuple(self._chunks(view, picked, {s.id for s in running})))

    def _chunks(self, view: View, picked: Sequence[SequenceView], running: set[int]) -> list[Chunk]:
        budget, rng = view.max_num_batched_tokens, self.random
        chunks: list[Chunk] = []
        must = next(
            (s.id for s in picked if s.id in running), None
        )  # one that may preempt has to be planned while any runs
        for sequence in picked:
            keep = int(must is not None and sequence.id != must and all(c.sequence != must for c in chunks))
            most = min(budget - keep, sequence.num_missing_tokens)
            if most < 1:
                continue
            tokens = most if rng is None or rng.random() < 0.5 else rng.randint(1, most)
            budget -= tokens
            chunks.append(
                Chunk(sequence.id, tokens, sequence.id in running or (rng is not None and rng.random() < 0.2))
            )
        return chunks


@attrs.define(eq=False)
class AnyVictims:
    """Any sequences that may be pushed out, by either kind."""

    random: _random.Random | None = None

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        planned = {chunk.sequence: i for i, chunk in enumerate(plan.chunks)}
        first = max(1, shortfall.num_fitting)
        allowed = [
            s for s in view.running if planned.get(s.id, first) >= first and (s.private_blocks or s.id in planned)
        ]
        rng = self.random
        if rng is None:
            return tuple(Eviction(s.id, "recompute") for s in allowed[-1:]) or None
        if not allowed or rng.random() < 0.1:
            return None
        victims = rng.sample(allowed, rng.randint(1, len(allowed)))
        return tuple(Eviction(s.id, rng.choice(["swap", "recompute"])) for s in victims)
