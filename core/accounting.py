"""Where the pool's tokens are: one report a step, made by core from block tables and the pool, the same for every allocator.

For each sequence with device blocks: its capacity is ``blocks x block_size``; ``written`` is what is computed; ``to_write``
is what it
will still write into the blocks it has (up to its declared limit, or its recorded length in a replay; the last token of an answer
is never written); the rest is ``internal_waste``. Blocks with several owners are counted once: ``shared`` is what that saves.

Of the free blocks, ``cached`` is those whose content can be found (the pool knows: ``BlockPool.keep``); they can be taken
at any time,
so they are not in use. ``external_waste`` is free blocks that no waiting sequence can use: the allocator says how many consecutive
blocks each would reserve (hook ``reservations``), and the pool how many free blocks lie in shorter runs than the least of
them. It is 0 while nothing waits, and for allocators that take any free block.
"""

from __future__ import annotations

from typing import Any

from core.state import State
from core.types import HOLE, MemoryReport, SequenceView


def _final_tokens(view: SequenceView) -> int:
    """Tokens whose KV this sequence will have written when it ends, as far as is known now."""
    output = view.recorded_output_tokens if view.recorded_output_tokens is not None else view.max_tokens
    return view.num_prompt_tokens + min(output, view.max_tokens) - 1


def _owners_of_tail(view: SequenceView, table: list[int], refs: list[int], size: int) -> int:
    """How many tables hold this sequence's part-full last block (1 when there is none)."""
    index = view.num_computed_tokens // size
    return refs[table[index]] if view.num_computed_tokens % size and table[index] != HOLE else 1


def external_waste(state: State, hooks: Any) -> int:
    """Free tokens in runs too short for any waiting sequence's reservation; see the module's docstring."""
    pool = state.pool
    if not state.waiting or not pool.num_free or not hooks.has("reservations"):
        return 0
    head = state.waiting[: state.limits.max_num_seqs]
    runs = hooks.reservations(sequences=head)
    if runs is None:
        return 0
    if len(runs) != len(head) or not all(isinstance(n, int) and n >= 0 for n in runs):
        raise hooks.policy_error(
            "reservations", f"gave {runs!r} for {len(head)} sequences: a number of blocks for each"
        )
    return pool.free_in_runs_below(min(runs)) * pool.block_size


def memory_report(state: State, copied_bytes: int, external: int = 0) -> MemoryReport:
    """This step's report, in tokens. O(running sequences)."""
    pool, size = state.pool, state.limits.block_size
    refs, sequences = pool.refs, state.sequences
    reserved = pool.num_used * size
    saved: float = pool.num_extra_refs * size  # as if shared blocks were full; part-full ones are put right below
    written, to_write = 0, 0.0
    sharing = pool.num_extra_refs > 0
    for view in [*state.running, *(seq.view for seq in state.swapped())]:
        table = sequences[view.id].table
        computed, capacity = view.num_computed_tokens, len(table) * size
        written += computed if view.where == "device" else _on_device(table, computed, size)
        if capacity <= computed:
            continue
        growth = max(0, min(capacity, _final_tokens(view)) - computed) if view.where == "device" else 0
        owners = _owners_of_tail(view, table, refs, size) if sharing else 1
        if owners > 1:  # each owner stands for its part of the block's unwritten tokens
            saved -= (size - computed % size) * (owners - 1) / owners
            growth /= owners
        to_write += growth
    shared = round(saved)
    written -= shared
    rest = int(to_write + 1e-6)
    return MemoryReport(
        pool=pool.num_blocks * size,
        reserved=reserved,
        written=written,
        to_write=rest,
        internal_waste=reserved - written - rest,
        external_waste=external,
        shared=shared,
        cached=pool.num_cached * size,
        copied_bytes=copied_bytes,
    )


def _on_device(table: list[int], computed: int, size: int) -> int:
    """Written tokens of a swapped sequence in the shared blocks that stayed on the device."""
    return sum(min(size, computed - i * size) for i, block in enumerate(table) if block != HOLE)
