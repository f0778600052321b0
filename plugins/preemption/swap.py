"""``preemption=swap``: copy a victim's KV to host memory and back when there is room."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Eviction, Plan, Shortfall, View
from plugins.preemption.victims import youngest_first


@attrs.define(eq=False)
class Swap:
    """The youngest sequences give way. Where swap space is full, core turns the newest of them to recompute (counted ``turned``).

    A sequence that owns no block alone is recomputed: swapping it would free nothing, shared blocks stay on the device.
    """

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        victims = youngest_first(view, plan, shortfall)
        return tuple(Eviction(s.id, "swap" if s.private_blocks else "recompute") for s in victims) or None
