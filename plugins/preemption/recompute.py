"""``preemption=recompute``: drop a victim's KV and compute it again when there is room.

Who goes is ``choose``'s (plugins/preemption/victims.py); with anything but ``youngest`` an older request may be pushed out for
a younger one. Source of the two kinds: Kwon et al., SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Eviction, Plan, Shortfall, View
from plugins.preemption.victims import choose_field, evictions, progress_field


@attrs.define(eq=False)
class Recompute:
    """Each victim costs its prefill again, tokens already delivered included."""

    choose: str = choose_field()
    min_progress: int = progress_field()

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        return evictions(view, plan, shortfall, self.choose, self.min_progress, lambda _: "recompute")
