"""``predictor=oracle``: the length that the workload recorded: what no live server can know, and the best a predictor could do.

``error`` makes it wrong on purpose, to see what a wrong prediction costs: the recorded length times exp(normal(0, error)), the
same for the same seed and request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import EngineInfo, SequenceView
from core.uniform import uniform


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
        # Box-Muller on two numbers that depend on seed and request alone, not on who else arrives
        u, v = (max(1e-12, float(uniform(self._seed, i, sequence.request_id))) for i in (0, 1))
        return max(1, round(recorded * math.exp(self.error * math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v))))
