"""``preemption=breakeven``: for each victim the cheaper of swap and recompute, by its length and the machine's measured rates.

Swap copies only blocks that the victim alone owns, out and in again; recompute runs its computed tokens through the model again, with
an attention term that grows with the square of the length. Where the link is fast enough swap always wins, where it is slow recompute
wins up to the crossover length: see core/cost.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Eviction, Plan, SequenceView, Shortfall, View
from plugins.preemption.victims import youngest_first


@attrs.define(eq=False)
class BreakEven:
    """The youngest sequences give way, each by the kind that costs fewer seconds."""

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        victims = youngest_first(view, plan, shortfall)
        return tuple(self._evict(view, s) for s in victims) or None

    @staticmethod
    def _evict(view: View, sequence: SequenceView) -> Eviction:
        if not sequence.private_blocks:
            return Eviction(sequence.id, "recompute")  # shared blocks stay on the device: a swap would free nothing
        to_move = min(sequence.private_blocks * view.block_size, sequence.num_computed_tokens)
        swap_s = view.cost.swap_s(to_move)
        recompute_s = view.cost.recompute_s(sequence.num_computed_tokens)
        return Eviction(sequence.id, "swap" if swap_s <= recompute_s else "recompute")
