"""``scheduler=fcfs``: iteration-level batching with whole prompts first: newcomers join at any step, and streams wait for their
prefill.

Sources: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022 (iteration-level
scheduling); Kwon et al., SOSP 2023 (the first vLLM: prompts before decodes).

Order: arrival; the plan lists running sequences in arrival order, so the youngest give way. Fairness: nobody is skipped; a
request starts when those before it have started and one of them at a time has ended: within T steps, T the prompt and output
tokens of all requests before it (those that run again after a preemption counted again). May preempt for a newcomer: never.
"""

from __future__ import annotations

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, EngineInfo, Plan, View
from plugins.schedulers.packing import Room, require_whole_prefills


@attrs.define(eq=False)
class FcfsScheduler:
    """The budget goes to whole prompts in arrival order; what they leave goes to running sequences, oldest first.

    While ``watermark`` of the pool stays free behind them (unless nothing runs), newcomers start. A step with prefills takes as
    long as they do, and every stream waits for it: that is the price that ``chunked`` avoids.
    """

    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])

    @hookimpl
    def setup(self, engine_info: EngineInfo) -> None:
        require_whole_prefills("fcfs", engine_info)

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        room = Room(view, self.watermark)
        kept = int(bool(view.running))  # a token of the oldest that runs: newcomers may turn out to have no blocks
        room.tokens -= kept
        new: list[Chunk] = []
        for sequence in view.waiting:
            if not room.fits(sequence) or room.left(sequence) > room.tokens:
                break
            new.append(Chunk(sequence.id, room.take_new(sequence)))
        room.tokens += kept
        chunks = []
        for sequence in view.running:
            if not room.tokens:
                break
            chunks.append(Chunk(sequence.id, room.take_running(sequence), True))
        return Plan((*chunks, *new))
