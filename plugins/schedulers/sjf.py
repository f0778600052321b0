"""``scheduler=sjf``: the shortest predicted remaining work first, which makes the mean wait shortest if the prediction is right.

Sources: shortest (remaining) processing time first is optimal for the mean (Schrage, 1968); for language models with predicted
lengths Zheng et al., "Response Length Perception and Sequence Scheduling", NeurIPS 2023; Fu et al., "Efficient LLM Scheduling
by Learning to Rank", NeurIPS 2024.

Order: remaining work in steps, predicted output tokens still to come (group ``predictor``) + prompt tokens left / the step's
budget; the plan lists running sequences in this order, so those with most ahead of them give way. Fairness: a request that has
waited ``patience_s`` goes ahead of all that have not, by arrival: with steps of s seconds it ends patience_s / s + T steps
after it came at the latest, T the tokens of all that were there by then. ``patience_s: null`` starves long requests under load.
May preempt for a newcomer: never.
"""

from __future__ import annotations

import attrs

from core.hookspecs import hookimpl
from core.types import Plan, SequenceView, View
from plugins.schedulers.packing import Room, continue_running, in_order, start_waiting


@attrs.define(eq=False)
class SjfScheduler:
    """Decodes get their token first, then prefills under way and newcomers, the shortest first."""

    patience_s: float | None = attrs.field(default=30.0, validator=attrs.validators.optional(attrs.validators.ge(0)))  # type: ignore[arg-type]
    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
    max_chunk: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        budget = view.max_num_batched_tokens
        patient_since = view.now - self.patience_s if self.patience_s is not None else float("-inf")

        def work(sequence: SequenceView) -> float:
            """Steps that are left; below 0, the longer it waits the more, for one whose patience is over."""
            if sequence.queued_s <= patient_since:
                return sequence.queued_s - view.now - 1.0
            missing = sequence.num_tokens - sequence.num_computed_tokens
            return sequence.predicted_remaining_tokens + missing / budget

        room = Room(view, self.watermark, self.max_chunk)
        chunks = continue_running(room, list(in_order(view.running, work)))
        if view.waiting and room.tokens and room.rows:
            chunks += start_waiting(room, in_order(view.waiting, work))
        return Plan(tuple(chunks))
