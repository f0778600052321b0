"""When a session that said it would be back has been away too long: shared by the idle policies."""

from __future__ import annotations

from core.types import SequenceView

SHORTEST_S = 1.0  # a stall of 0 s is a turn that comes at once, not one that is late at once


def overdue(sequence: SequenceView, now: float, patience: float) -> bool:
    """Whether an idle sequence is away for longer than ``patience`` times the stall that its client announced."""
    since = sequence.idle_since_s if sequence.idle_since_s is not None else now
    return now - since > patience * max(SHORTEST_S, sequence.stall_s or 0.0)
