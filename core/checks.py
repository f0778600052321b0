"""Core checks every decision. A policy that is wrong fails here, loudly and named, before it can touch a request's KV."""

from __future__ import annotations

from functools import partial
from typing import Any

from core.batch import Run
from core.state import State
from core.types import HOLE, Plan


def check_plan(plan: object, state: State, hooks: Any) -> bool:
    """Budget, ownership, progress: raises the scheduler's ``PolicyError``. True when newcomers need rows that are taken."""
    wrong = partial(hooks.policy_error, "plan_step")
    if not isinstance(plan, Plan):
        raise wrong(f"gave {plan!r}: a Plan is needed in every step with work")
    sequences, limits = state.sequences, state.limits
    if not plan.chunks:
        if plan.wait_until is None:
            work = f"{len(state.running)} running and {len(state.waiting)} waiting sequences"
            raise wrong(f"gave an empty plan without wait_until although there are {work}")
        if not state.view.now < plan.wait_until < float("inf"):
            raise wrong(f"waits until {plan.wait_until}: now is {state.view.now}, it must be later")
        return False
    ids = {chunk.sequence for chunk in plan.chunks}
    lengths = [chunk.num_tokens for chunk in plan.chunks]
    total = sum(lengths)
    if type(total) is not int:
        raise wrong(f"planned {total!r} tokens: num_tokens of a chunk is an int")
    if min(lengths) < 1 or not ids <= sequences.keys() or not state.held.keys().isdisjoint(ids):
        bad = next(
            c for c in plan.chunks if c.num_tokens < 1 or c.sequence not in sequences or c.sequence in state.held
        )
        raise wrong(f"planned {bad}: unknown sequence, a beam that is held, or less than one token")
    if total > limits.max_num_batched_tokens:
        raise wrong(f"planned {total} tokens, max_num_batched_tokens is {limits.max_num_batched_tokens}")
    if len(ids) != len(plan.chunks):
        raise wrong(f"planned a sequence twice: {plan.chunks}")
    newcomers = len(new := ids - state.running_ids)
    plain = newcomers
    if len(state.running) + newcomers > limits.max_num_seqs:
        # a newcomer that may preempt may take the row of a running sequence
        plain = sum(1 for chunk in plan.chunks if chunk.sequence in new and not chunk.may_preempt)
    if len(state.running) + plain > limits.max_num_seqs or newcomers > limits.max_num_seqs:
        running = f"{len(state.running)} running sequences, max_num_seqs is {limits.max_num_seqs}"
        raise wrong(f"planned {newcomers} newcomers beside {running}")
    return len(state.running) + newcomers > limits.max_num_seqs


def check_leases(runs: list[Run], state: State, hooks: Any, *, full: bool) -> None:
    """Each table covers its run without a hole; a block that is written has one owner and cannot be found by its content: raises
    the allocator's ``PolicyError``."""
    wrong = partial(hooks.policy_error, "reserve")
    refs, kept, size = state.pool.refs, state.pool.kept, state.limits.block_size
    for seq, start, end in runs:
        table = seq.table
        index = start // size
        if end - start == 1 and index < len(table) and not seq.host_blocks:
            block = table[index]
            if refs[block] == 1 and block != HOLE and block not in kept:
                continue  # most runs: one token into a block of its own
        if len(table) * size < end:
            raise wrong(f"left sequence {seq.id} with {len(table)} blocks of {size} tokens, {end} tokens must fit")
        if seq.host_blocks:
            raise wrong(f"left holes at table indices {sorted(seq.host_blocks)} of sequence {seq.id}")
        for index in range(start // size, (end - 1) // size + 1):
            block = table[index]
            if block == HOLE or refs[block] != 1 or block in kept:
                found = " and can be found by what it holds" if block in kept else ""
                owned = "no device block" if block == HOLE else f"block {block}, which has {refs[block]} owners{found}"
                raise wrong(f"lets sequence {seq.id} write tokens {start}..{end - 1} into {owned}")
    if full:
        try:
            state.check_owners()
        except AssertionError as error:
            raise wrong(str(error)) from error
