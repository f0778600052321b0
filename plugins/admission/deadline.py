"""``admission=deadline``: a request whose first token can no longer come in time is refused, or demoted, instead of making
others late.

A request's target is its own ``deadline_s`` or its class's ``slo`` target; without one it is left alone. Late is judged by
arithmetic on the clock and the cost model: ``now`` + the seconds of its prefill (less what is computed already, by itself or in
the cache) > ``deadline_s``. The first 512 that may stay are judged in a step; those behind them when they come up.
With ``patience`` the queue ahead is counted too: a request is judged as if it started only after the prefills and answers (by
``predictor``) of that share of the work ahead of it had run. 0, the default, waits and sees.

Refusing late requests early is the admission control of real-time systems; for language models see e.g. Mooncake's early rejection
(Qin et al., FAST 2025).
"""

from __future__ import annotations

import attrs

from core.hookspecs import hookimpl
from core.types import SequenceView, Triage, View

LOOKED_AT = 512  # requests that stay at the head of the queue: those behind them are judged when they come up


@attrs.define(eq=False)
class Deadline:
    """``late: refuse`` ends a late request with its reason; ``demote`` serves it behind all that wait now, once."""

    late: str = attrs.field(default="refuse", validator=attrs.validators.in_(["refuse", "demote"]))
    patience: float = attrs.field(default=0.0, validator=[attrs.validators.ge(0), attrs.validators.le(1)])

    @hookimpl
    def triage(self, view: View) -> Triage | None:
        lost: list[tuple[SequenceView, float]] = []
        now, cost, cached = view.now, view.cost, view.cached_tokens
        may_stay = max(LOOKED_AT, view.max_num_seqs)
        looked_up = view.max_num_seqs if view.finds_prefixes else len(view.waiting)  # behind them all may be cached
        ahead_s = 0.0
        for i, sequence in enumerate(view.waiting):
            if i - len(lost) == may_stay:
                break
            deadline = sequence.deadline_s
            if not self.patience and (deadline is None or sequence.demoted):
                continue
            known = sequence.num_computed_tokens or cached.get(sequence.id, 0)
            prefill_s = cost.recompute_s(sequence.num_tokens, known) if known or i < looked_up else 0.0
            expected = now + ahead_s + prefill_s
            if deadline is not None and expected > deadline and not sequence.demoted and not sequence.num_output_tokens:
                lost.append((sequence, expected))
            elif self.patience:  # what is refused is not in anybody's way
                work_s = prefill_s + cost.step_s(sequence.predicted_remaining_tokens, 0)
                ahead_s += self.patience * work_s
        if not lost:
            return None
        if self.late == "demote":
            return Triage(demoted=tuple(sequence.id for sequence, _ in lost))
        return Triage(refused=tuple((sequence.id, self._reason(sequence, at)) for sequence, at in lost))

    @staticmethod
    def _reason(sequence: SequenceView, expected: float) -> str:
        target = (sequence.deadline_s or 0.0) - sequence.arrival_s
        return (
            f"the first token was due {target:.3g} s after arrival and would come after {expected - sequence.arrival_s:.3g} s "
            "at the earliest"
        )
