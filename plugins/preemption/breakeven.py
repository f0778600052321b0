"""``preemption=breakeven``: for each victim the cheaper of swap and recompute, by its length and the machine's measured rates.

Swap copies only blocks that the victim alone owns, out and in again; recompute runs its computed tokens through the model
again, less those that a prefix cache is sure to hold, with an attention term that grows with the square of the length. Where
the link is fast enough swap always wins, where it is slow recompute wins up to the crossover length: see core/cost.py. Who goes
is ``choose``'s (plugins/preemption/victims.py); with anything but ``youngest`` an older request may be pushed out for a younger
one.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Eviction, EvictionKind, Plan, SequenceView, Shortfall, View
from plugins.preemption.victims import choose_field, evictions, progress_field


@attrs.define(eq=False)
class BreakEven:
    """A victim that the host has no room for is recomputed, since swapping it would push out another that is there; and so is one
    that owns no block alone, since swapping it would free nothing."""

    choose: str = choose_field()
    min_progress: int = progress_field()

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        def kind_of(sequence: SequenceView) -> EvictionKind:
            if not 0 < sequence.private_blocks <= view.num_free_swap_blocks:
                return "recompute"
            swap_s = view.cost.swap_of(sequence, view.block_size)
            return "swap" if swap_s <= view.cost.recompute_of(sequence, view) else "recompute"

        return evictions(view, plan, shortfall, self.choose, self.min_progress, kind_of)
