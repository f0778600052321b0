"""``predictor=declared``: an answer is expected to be as long as its request allows (``max_tokens``): an upper bound, never too
short."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import SequenceView


@attrs.define(eq=False)
class Declared:
    """``scale`` times ``max_tokens``: below 1 where clients are known to ask for more than they use."""

    scale: float = attrs.field(default=1.0, validator=[attrs.validators.gt(0), attrs.validators.le(1)])

    @hookimpl
    def predict_output(self, sequences: Sequence[SequenceView]) -> list[int]:
        return [max(1, round(sequence.max_tokens * self.scale)) for sequence in sequences]
