"""``idle=discard``: a stalled session's KV is given back at once; its next turn computes its prompt again, but for what a
prefix cache still holds."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import IdleChoice, View


@attrs.define(eq=False)
class Discard:
    """The baseline: what an engine without session stalls does."""

    @hookimpl
    def plan_idle(self, view: View) -> Sequence[IdleChoice]:
        return [IdleChoice(s.id, "discard") for s in view.idle]
