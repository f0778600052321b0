"""``idle=breakeven``: keep a stalled session's KV while nobody needs its blocks; then swap or discard it, whichever costs less.

The choice is preemption's: seconds to move its own blocks out and in again against seconds to compute its tokens again when it
comes back (core/cost.py). While memory is not short both cost more than keeping, which costs nothing. Short is it when fewer than
``watermark`` of the pool's blocks are free, when the first that waits does not fit, or when core says that a plan is short.

Source of the question: Abhyankar et al., "InferCept: Efficient Intercept Support for Augmented LLM Inference", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import IdleChoice, SequenceView, View
from plugins.idle.overdue import overdue


@attrs.define(eq=False)
class BreakEven:
    """Those that are back last go first, no more than are needed."""

    patience: float = attrs.field(default=4.0, validator=attrs.validators.ge(0))  # times the stall that was announced
    watermark: float = attrs.field(default=0.02, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])

    @hookimpl
    def plan_idle(self, view: View) -> Sequence[IdleChoice]:
        late = [s for s in view.idle if overdue(s, view.now, self.patience)]
        choices = [IdleChoice(s.id, "discard") for s in late]
        missing = self._missing(view) - sum(s.private_blocks for s in late if s.where == "device")
        if missing <= 0:
            return choices
        held = [s for s in view.idle if s.where == "device" and s not in late]
        for sequence in sorted(held, key=self._back_s, reverse=True):
            if missing <= 0:
                break
            missing -= sequence.private_blocks
            swap = view.cost.swap_of(sequence, view.block_size) <= view.cost.recompute_of(sequence, view)
            fits = sequence.private_blocks <= view.num_free_swap_blocks
            choices.append(IdleChoice(sequence.id, "swap" if swap and fits else "discard"))
        return choices

    def _missing(self, view: View) -> int:
        """Blocks that should be free and are not."""
        if view.blocks_missing:
            return view.blocks_missing
        wanted = int(self.watermark * view.num_blocks)
        if view.waiting and len(view.running) < view.max_num_seqs:
            first = view.waiting[0]
            wanted += -(-first.num_tokens // view.block_size) - (
                len(first.block_table) if first.where == "device" else 0
            )
        return wanted - view.num_free_blocks

    @staticmethod
    def _back_s(sequence: SequenceView) -> float:
        return (sequence.idle_since_s or 0.0) + (sequence.stall_s or 0.0)
