"""``idle=swap``: a stalled session's KV goes to host memory at once and comes back with its next turn."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import IdleChoice, SequenceView, View
from plugins.idle.overdue import overdue


@attrs.define(eq=False)
class Swap:
    """Without room on the host it stays on the device; forgotten when it is ``patience`` times its stall late."""

    patience: float = attrs.field(default=4.0, validator=attrs.validators.ge(0))  # times the stall that was announced

    @hookimpl
    def plan_idle(self, view: View) -> Sequence[IdleChoice]:
        return [c for s in view.idle if (c := self._choice(s, view)) is not None]

    def _choice(self, sequence: SequenceView, view: View) -> IdleChoice | None:
        if overdue(sequence, view.now, self.patience):
            return IdleChoice(sequence.id, "discard")
        return IdleChoice(sequence.id, "swap") if sequence.where == "device" else None
