"""Where the pool's tokens are: one report a step, made by core from block tables and the pool, the same for every allocator.

For each sequence with device blocks: its capacity is ``blocks x block_size``; ``written`` is what is computed; ``to_write`` is what it
will still write into the blocks it has (up to its declared limit, or its recorded length in a replay; the last token of an answer is
never written); the rest is ``internal_waste``. Blocks with several owners are counted once: ``shared`` is what that saves.

Of the free blocks, ``cached`` is those whose content can be found (the pool knows: ``BlockPool.keep``); they can be taken at any
time, so they are not in use. ``external_waste`` is free blocks that no waiting sequence can use, as the allocator says (hook
``external_waste``): 0 while nothing waits, and for allocators that take any free block.
"""

from __future__ import annotations

from typing import Any

from core.state import Sequence, State
from core.types import HOLE, MemoryReport, SequenceView


def _owners_of_tail(view: SequenceView, table: list[int], refs: list[int], size: int) -> int:
    """How many tables hold this sequence's part-full last block (1 when there is none)."""
    index = view.num_computed_tokens // size
    return refs[table[index]] if view.num_computed_tokens % size and table[index] != HOLE else 1


def external_waste(state: State, hooks: Any) -> int:
    """Free tokens that no waiting sequence can use; see the module's docstring."""
    pool = state.pool
    if not state.waiting or not pool.num_free or not hooks.has("external_waste"):
        return 0
    blocks = hooks.external_waste(sequences=state.waiting[: state.limits.max_num_seqs])
    if blocks is None:
        return 0
    if not isinstance(blocks, int) or not 0 <= blocks <= pool.num_free:
        raise hooks.policy_error(
            "external_waste", f"gave {blocks!r}: of {pool.num_free} free blocks, how many are of no use"
        )
    return blocks * pool.block_size


def memory_report(state: State, copied_bytes: int, external: int = 0) -> MemoryReport:
    """This step's report, in tokens. O(running sequences)."""
    pool, size = state.pool, state.limits.block_size
    reserved = pool.num_used * size
    others = [*state.swapped(), *state.sessions.values(), *state.parked.values(), *state.held.values()]
    plain = not pool.num_extra_refs and not others
    written, to_write, shared = _plain_sums(state) if plain else _sums(state, others)
    return MemoryReport(
        pool=pool.num_blocks * size,
        reserved=reserved,
        written=written,
        to_write=to_write,
        internal_waste=reserved - written - to_write,
        external_waste=external,
        shared=shared,
        cached=pool.num_cached * size,
        copied_bytes=copied_bytes,
    )


def _plain_sums(state: State) -> tuple[int, int, int]:
    """(written, to_write, shared) where nobody shares and only running sequences hold blocks: the same as ``_sums``, sooner."""
    lengths = [view.num_computed_tokens for view in state.running]
    ends = [view._tokens_at_end for view in state.running]
    return sum(lengths), sum([end - n for end, n in zip(ends, lengths, strict=True) if end > n]), 0


def _sums(state: State, others: list[Sequence]) -> tuple[int, int, int]:
    """(written, to_write, shared) in tokens; ``others`` hold blocks without running: swapped out, or between two turns."""
    pool, size = state.pool, state.limits.block_size
    refs, sequences = pool.refs, state.sequences
    saved: float = pool.num_extra_refs * size  # as if shared blocks were full; part-full ones are put right below
    written, to_write, growth = 0, 0.0, 0.0
    sharing = pool.num_extra_refs > 0
    tables = [(view, sequences[view.id].table) for view in state.running] + [(seq.view, seq.table) for seq in others]
    for view, table in tables:
        computed, capacity = view.num_computed_tokens, len(table) * size
        written += computed if view.where == "device" else _on_device(table, computed, size)
        if capacity <= computed:
            continue
        grows = view.where == "device" and view.idle_since_s is None
        growth = max(0, view._tokens_at_end - computed) if grows else 0
        owners = _owners_of_tail(view, table, refs, size) if sharing else 1
        if owners > 1:  # each owner stands for its part of the block's unwritten tokens
            saved -= (size - computed % size) * (owners - 1) / owners
            growth /= owners
        to_write += growth
    shared = round(saved)
    return written - shared, int(to_write + 1e-6), shared


def _on_device(table: list[int], computed: int, size: int) -> int:
    """Written tokens of a swapped sequence in the shared blocks that stayed on the device."""
    return sum(min(size, computed - i * size) for i, block in enumerate(table) if block != HOLE)
