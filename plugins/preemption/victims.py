"""Which running sequences may be pushed out, youngest first: shared by the preemption policies, a policy only chooses the kind."""

from __future__ import annotations

from core.types import HOLE, Chunk, Plan, SequenceView, Shortfall, View


def youngest_first(view: View, plan: Plan, shortfall: Shortfall) -> list[SequenceView]:
    """As few sequences as make the plan fit: unplanned ones, youngest first, then from the plan's end.

    None ahead of the first chunk that does not fit, and never the plan's first. Counts what a victim frees (its private blocks) and
    what its own chunk no longer asks for; one that would free nothing is left alone. Where all do, because branches share what
    they hold, the youngest goes alone: dropping its references may let the last owner write in place. May be too few when
    blocks are fragmented: core asks again.
    """
    planned = {chunk.sequence: chunk for chunk in plan.chunks}
    running = {sequence.id: sequence for sequence in view.running}
    unplanned = [s for s in reversed(view.running) if s.id not in planned]
    first_to_go = max(1, shortfall.num_fitting)  # the most wanted chunk stays, or the step would compute nothing
    behind = [running[c.sequence] for c in reversed(plan.chunks[first_to_go:]) if c.sequence in running]
    victims: list[SequenceView] = []
    missing = shortfall.blocks_missing
    for sequence in unplanned + behind:
        if missing <= 0:
            break
        gain = sequence.private_blocks + _asked(sequence, planned.get(sequence.id), view.block_size)
        if gain:
            victims.append(sequence)
            missing -= gain
    return victims or (unplanned + behind)[:1]


def _asked(sequence: SequenceView, chunk: Chunk | None, size: int) -> int:
    """New blocks that the sequence's own chunk asks for."""
    if chunk is None:
        return 0
    end = min(sequence.num_computed_tokens + chunk.num_tokens, sequence.num_tokens)
    return max(0, -(-end // size) - sum(1 for block in sequence.block_table if block != HOLE))
