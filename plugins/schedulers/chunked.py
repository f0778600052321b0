"""``scheduler=chunked``: running sequences first, then prefills in chunks within the budget, first come first served (the default).

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024.

Order: decodes one token each, then prefills under way, then newcomers, each by arrival; the plan lists running sequences in arrival
order, so the youngest give way. Fairness: nobody is skipped, so later arrivals cannot delay anybody: a request has ended T
steps after its arrival at the latest, T the prompt and output tokens of all that had arrived by then (computed again after a
preemption: counted again), since every step computes a token of one of them. May preempt for a newcomer: never.
"""

from __future__ import annotations

import attrs

from core.hookspecs import hookimpl
from core.types import Plan, View
from plugins.schedulers.packing import Room, continue_running, start_waiting


@attrs.define(eq=False)
class ChunkedScheduler:
    """Decodes take the budget first, one token each; what is left goes to prefills under way, oldest first, then to newcomers.

    So a running stream gets its token in every step of another's prefill. Newcomers start only while ``watermark`` of the pool
    stays free behind them (unless nothing runs): room for those that run to grow. ``headroom`` of what those that run are still
    expected to write (by ``predictor``) is kept free for them as well: 0 starts newcomers early and preempts when memory runs
    out, 1 with a right prediction never preempts. A prefill takes at most ``max_chunk`` tokens a step (null: all that is left),
    which lets several prompts be under way at once, so that a short one starts beside a long one.
    """

    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
    headroom: float = attrs.field(default=0.0, validator=[attrs.validators.ge(0), attrs.validators.le(1)])
    max_chunk: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        room = Room(view, self.watermark, self.max_chunk)
        chunks = continue_running(room, view.running)
        if view.waiting and room.tokens and room.rows:
            if self.headroom:
                room.expect_growth(view.running, self.headroom)
            chunks += start_waiting(room, view.waiting)
        return Plan(tuple(chunks))
