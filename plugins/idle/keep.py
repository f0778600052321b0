"""``idle=keep``: a stalled session's KV stays on the device until it is back, or ``patience`` times its stall has passed."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import IdleChoice, View
from plugins.idle.overdue import overdue


@attrs.define(eq=False)
class Keep:
    """Newcomers wait for it; only the growth of what runs pushes it out (core then forgets the longest idle first)."""

    patience: float = attrs.field(default=4.0, validator=attrs.validators.ge(0))  # times the stall that was announced

    @hookimpl
    def plan_idle(self, view: View) -> Sequence[IdleChoice]:
        return [IdleChoice(s.id, "discard") for s in view.idle if overdue(s, view.now, self.patience)]
