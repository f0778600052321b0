"""``scheduler=static``: request-level batching: a batch is filled once and runs until its last request has ended. The baseline.

Source: what servers did before iteration-level scheduling; described in Yu et al., "Orca", OSDI 2022, as request-level scheduling.
Finished rows leave the batch at once and are not padded here, so an engine that pads does worse than this one.

Order: arrival. Fairness: a request starts when its turn comes in a new batch; with R requests ahead of it, at most R batches
later, that is R x (most output tokens of a request + 1) steps, preempted ones counted again. May preempt for a newcomer: never.
"""

from __future__ import annotations

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, EngineInfo, Plan, SequenceView, View
from plugins.schedulers.packing import require_whole_prefills


@attrs.define(eq=False)
class StaticScheduler:
    """Admits only when nothing runs: whole prompts, in arrival order, as many as fit in one step and in the pool.

    Room is counted for all that a request may become (prompt + ``max_tokens``, each branch), so nobody is preempted where the
    allocator takes blocks of ``block_size``. ``batch_size`` bounds the batch (null: ``max_num_seqs``).
    """

    batch_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    @hookimpl
    def setup(self, engine_info: EngineInfo) -> None:
        require_whole_prefills("static", engine_info)

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        if view.running:
            return self._continue(view)
        rows = min(self.batch_size or view.max_num_seqs, view.max_num_seqs)
        budget, free = view.max_num_batched_tokens, view.num_free_blocks
        chunks: list[Chunk] = []
        for sequence in view.waiting:
            n = sequence.num_tokens - (sequence.num_computed_tokens or view.cached_tokens.get(sequence.id, 0))
            branches = sequence.n if not sequence.branch and not sequence.num_output_tokens else 1
            free -= self._blocks(sequence, view.block_size) * branches
            if n > budget or (chunks and (free < 0 or rows < branches)):
                break
            budget -= n
            rows -= branches
            chunks.append(Chunk(sequence.id, n))
            if rows < 1:
                break
        return Plan(tuple(chunks))

    @staticmethod
    def _continue(view: View) -> Plan:
        budget, chunks = view.max_num_batched_tokens, []
        for sequence in view.running:
            n = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if not n:
                break
            budget -= n
            chunks.append(Chunk(sequence.id, n, True))
        return Plan(tuple(chunks))

    @staticmethod
    def _blocks(sequence: SequenceView, size: int) -> int:
        return -(-(sequence.num_prompt_tokens + sequence.max_tokens) // size)
