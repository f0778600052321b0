"""``scheduler=chunked``: running sequences first, then prefills in chunks within the budget, first come first served (the default).

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024.
"""

from __future__ import annotations

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, Plan, SequenceView, View, one_token


@attrs.define(eq=False)
class ChunkedScheduler:
    """Decodes take the budget first, one token each; what is left goes to prefills under way, oldest first, then to newcomers.

    So a running stream gets its token in every step of another's prefill. The plan lists running sequences in arrival order: when
    blocks run short, the youngest give way. Newcomers are admitted in arrival order, nobody is skipped, and only while
    ``watermark`` of the pool stays free behind them (unless nothing runs): room for those that run to grow. A prefill takes at
    most ``max_chunk`` tokens a step (null: all that is left), which lets a short prompt start beside a long one.
    """

    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
    max_chunk: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        limit = self.max_chunk or view.max_num_batched_tokens
        running = list(view.running)
        missing = [s.num_tokens - s.num_computed_tokens for s in running]
        for_decodes = min(missing.count(1), view.max_num_batched_tokens)
        for_prefills = view.max_num_batched_tokens - for_decodes
        if for_decodes == len(running) and not view.waiting:
            return Plan(tuple([one_token(sequence.id) for sequence in running]))
        chunks = []
        for sequence, n in zip(running, missing, strict=True):
            if n == 1:
                if for_decodes:
                    for_decodes -= 1
                    chunks.append(one_token(sequence.id))
            elif for_prefills:
                n = min(n, for_prefills, limit)
                for_prefills -= n
                chunks.append(Chunk(sequence.id, n, True))
        if view.waiting and for_prefills:
            chunks += self._newcomers(view, for_prefills, limit)
        return Plan(tuple(chunks))

    def _newcomers(self, view: View, budget: int, limit: int) -> list[Chunk]:
        size, running = view.block_size, len(view.running)
        free = view.num_free_blocks - int(self.watermark * view.num_blocks)
        chunks: list[Chunk] = []
        for sequence in view.waiting:
            if not budget or running + len(chunks) >= view.max_num_seqs:
                break
            free -= self._blocks(sequence, size)
            if free < 0 and (running or chunks):
                break
            computed = sequence.num_computed_tokens or view.cached_tokens.get(sequence.id, 0)
            n = min(sequence.num_tokens - computed, budget, limit)
            budget -= n
            chunks.append(Chunk(sequence.id, n))
        return chunks

    @staticmethod
    def _blocks(sequence: SequenceView, size: int) -> int:
        """Blocks that the whole sequence needs, so that a prefill admitted in chunks can also end."""
        return -(-sequence.num_tokens // size)
