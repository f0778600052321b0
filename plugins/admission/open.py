"""``admission=open``: whoever waits is served, in the end. What can never fit is refused by core, and ``max_queue`` bounds the
queue."""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class Open:
    """Implements no hook: nothing is refused or demoted while it waits."""
