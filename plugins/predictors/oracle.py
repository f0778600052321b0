"""``predictor=oracle``: the length that the workload recorded: what no live server can know, and the best a predictor could do.

``error`` makes it wrong on purpose, to see what a wrong prediction costs: the recorded length times exp(normal(0, error)), the
same for the same seed and request.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import EngineInfo, SequenceView


@attrs.define(eq=False)
class Oracle:
    """Recorded lengths, times a log-normal error; a request without one (live traffic) is expected to use its ``max_tokens``."""

    error: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))  # sigma of the logarithm; 0: always right
    _seed: int = attrs.field(init=False, default=0)

    @hookimpl
    def setup(self, engine_info: EngineInfo) -> None:
        self._seed = engine_info.seed

    @hookimpl
    def predict_output(self, sequences: Sequence[SequenceView]) -> list[int | None]:
        return [self._predict(sequence) for sequence in sequences]

    def _predict(self, sequence: SequenceView) -> int | None:
        recorded = sequence.recorded_output_tokens
        if recorded is None or not self.error:
            return recorded
        # seeded by seed and request alone, so that an error does not depend on who else arrives
        error = random.Random(self._seed << 64 | sequence.request_id).gauss(0, self.error)
        return max(1, round(recorded * math.exp(error)))
