"""``preemption=swap``: copy a victim's KV to host memory and back when there is room.

Who goes is ``choose``'s (plugins/preemption/victims.py); with anything but ``youngest`` an older request may be pushed out for
a younger one. Source of the two kinds: Kwon et al., SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Eviction, EvictionKind, Plan, SequenceView, Shortfall, View
from plugins.preemption.victims import choose_field, evictions, progress_field


@attrs.define(eq=False)
class Swap:
    """Blocks that others share stay on the device; who owns none alone is recomputed, since swapping it would free nothing.

    Where swap space is full, core turns the newest to recompute (counted ``turned``).
    """

    choose: str = choose_field()
    min_progress: int = progress_field()

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        def kind_of(sequence: SequenceView) -> EvictionKind:
            return "swap" if sequence.private_blocks else "recompute"

        return evictions(view, plan, shortfall, self.choose, self.min_progress, kind_of)
