"""``predictor=quantile``: as long as a share ``q`` of the recent answers to prompts of about this length were. Learns while it
serves.

The idea of predicting from a window of observed lengths: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees",
ASPLOS 2025; here one window for each power of two of the prompt length (and client, with ``by_client``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Finished, SequenceView

MAX_WINDOWS = 1024  # clients may invent names: the window that was used longest ago is forgotten


@attrs.define(eq=False)
class Quantile:
    """Before ``min_seen`` answers of its kind have ended, a request is expected to use its ``max_tokens``."""

    q: float = attrs.field(default=0.5, validator=[attrs.validators.gt(0), attrs.validators.lt(1)])
    window: int = attrs.field(
        default=256, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)]
    )  # answers
    min_seen: int = attrs.field(
        default=8, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)]
    )  # answers
    by_client: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    _seen: dict[tuple[int, str], deque[int]] = attrs.field(init=False, factory=dict)

    def _kind(self, num_prompt_tokens: int, client_id: str) -> tuple[int, str]:
        return num_prompt_tokens.bit_length(), client_id if self.by_client else ""

    @hookimpl
    def predict_output(self, sequences: Sequence[SequenceView]) -> list[int | None]:
        known: dict[tuple[int, str], int | None] = {}
        predicted = []
        for sequence in sequences:
            kind = self._kind(sequence.num_prompt_tokens, sequence.client_id)
            if kind not in known:
                known[kind] = self._quantile(kind)
            predicted.append(known[kind])
        return predicted

    def _quantile(self, kind: tuple[int, str]) -> int | None:
        seen = self._seen.get(kind)
        if seen is None or len(seen) < self.min_seen:
            return None
        ordered = sorted(seen)
        return max(1, ordered[min(len(ordered) - 1, int(self.q * len(ordered)))])

    @hookimpl
    def sequences_finished(self, finished: Sequence[Finished]) -> None:
        for record in finished:
            if record.finish_reason not in ("stop", "length"):
                continue  # an answer that was cut off says nothing of its length
            kind = self._kind(record.num_prompt_tokens, record.client_id)
            seen = self._seen.pop(kind, None) or deque(maxlen=self.window)
            seen.append(record.num_output_tokens)
            self._seen[kind] = seen
            if len(self._seen) > MAX_WINDOWS:
                del self._seen[next(iter(self._seen))]
