"""``scheduler=lifo``: running sequences first, then the newest that waits. Short queues love it, long ones starve their oldest."""

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, Plan


@attrs.define(eq=False)
class LifoScheduler:
    """Every field is an option: ``scheduler.max_running=4``. A validator's message reaches the user in one line."""

    max_running: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    @hookimpl
    def plan_step(self, view):
        budget = view.max_num_batched_tokens
        room = min(view.max_num_seqs, self.max_running or view.max_num_seqs) - len(view.running)
        chunks = []
        for sequence in view.running:
            if tokens := min(budget, sequence.num_missing_tokens):
                budget -= tokens
                chunks.append(Chunk(sequence.id, tokens, may_preempt=True))
        for sequence in reversed(view.waiting):
            if room <= 0 or budget <= 0:
                break
            tokens = min(budget, sequence.num_missing_tokens)
            budget, room = budget - tokens, room - 1
            chunks.append(Chunk(sequence.id, tokens))
        return Plan(tuple(chunks))
