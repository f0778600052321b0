"""``preemption=recompute``: drop a victim's KV and compute it again when there is room."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Eviction, Plan, Shortfall, View
from plugins.preemption.victims import youngest_first


@attrs.define(eq=False)
class Recompute:
    """The youngest sequences give way; each costs its prefill again, tokens already delivered included."""

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        victims = youngest_first(view, plan, shortfall)
        return tuple(Eviction(s.id, "recompute") for s in victims) or None
