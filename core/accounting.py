"""Where the pool's tokens are: one report a step, made by core from block tables and the pool, the same for every allocator.

For each sequence with device blocks: its capacity is ``blocks x block_size``; ``written`` is what is computed; ``to_write`` is what it
will still write into the blocks it has (up to its declared limit, or its recorded length in a replay; the last token of an answer
is never written); the rest is ``internal_waste``. Blocks with several owners are counted once: ``shared`` is what that saves.
"""

from __future__ import annotations

from core.state import State
from core.types import HOLE, MemoryReport, SequenceView


def _owners_of_tail(view: SequenceView, table: list[int], refs: list[int], size: int) -> int:
    """How many tables hold this sequence's part-full last block (1 when there is none)."""
    index = view.num_computed_tokens // size
    return refs[table[index]] if view.num_computed_tokens % size and table[index] != HOLE else 1


def memory_report(state: State, copied_bytes: int) -> MemoryReport:
    """This step's report, in tokens. O(running sequences)."""
    pool, size = state.pool, state.limits.block_size
    refs, sequences = pool.refs, state.sequences
    reserved = pool.num_used * size
    saved: float = pool.num_extra_refs * size  # as if shared blocks were full; part-full ones are put right below
    written, to_write = 0, 0.0
    sharing = pool.num_extra_refs > 0
    others = [*state.swapped(), *state.sessions.values(), *state.parked.values()]
    if not sharing and not others:
        written = sum(lengths := [view.num_computed_tokens for view in state.running])
        rooms = [view._room for view in state.running]
        to_write = sum([room - length for room, length in zip(rooms, lengths, strict=True) if room > length])
        tables = []
    else:
        tables = [(view, sequences[view.id].table) for view in state.running] + [(seq.view, seq.table) for seq in others]
    for view, table in tables:
        computed, capacity = view.num_computed_tokens, len(table) * size
        written += computed if view.where == "device" else _on_device(table, computed, size)
        if capacity <= computed:
            continue
        grows = view.where == "device" and view.idle_since_s is None
        growth = max(0, view._room - computed) if grows else 0
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
        external_waste=0,
        shared=shared,
        cached=0,
        copied_bytes=copied_bytes,
    )


def _on_device(table: list[int], computed: int, size: int) -> int:
    """Written tokens of a swapped sequence in the shared blocks that stayed on the device."""
    return sum(min(size, computed - i * size) for i, block in enumerate(table) if block != HOLE)
