"""Sessions that stall: a turn ends, its client says that the next one comes soon (``stall_s``), and its KV may be kept until then.

    running --end--> idle --next turn--> waiting, with the KV as its own (where: device or swap)
                       \\--discarded----> nothing, and the next turn computes its prompt

A turn is kept when its request names a session and a stall, has one branch and ended by itself, a policy answers ``plan_idle``,
and the allocator can go on with a table that another sequence began (``extends_tables``). The next turn of the session takes
over as many tokens as its prompt shares with what was computed, but no part of a block that others can find by its content;
one that shares none begins anew. Core holds the KV and does what ``plan_idle`` says; when the plan is short of blocks, what
idles gives way before anything that runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from core.scratch import Step
from core.state import Sequence, State, Status
from core.types import HOLE, IdleChoice, Release


class Sessions:
    """Owns the KV between turns. ``counts`` are events since the start: kept, resumed, swapped, discarded."""

    def __init__(self, state: State, hooks: Any):
        self.state, self.hooks = state, hooks
        chosen = getattr(hooks, "chosen", ())
        extends = any(getattr(one.plugin, "extends_tables", False) for one in chosen if one.kind == "allocator")
        self.enabled = extends and hooks.has("plan_idle")
        self.counts = dict.fromkeys(("kept", "resumed", "swapped", "discarded"), 0)
        self._newest_before_reset = -1  # sequence id

    # ------------------------------------------------------------------------------------------- between turns

    def keep(self, step: Step, seq: Sequence, now: float) -> bool:
        """Keep an ended sequence's KV for its session; False when nobody wants it. An older turn of the session is forgotten."""
        request = seq.request
        if not (self.enabled and request.session_id and request.stall_s is not None):
            return False
        if seq.params.n > 1 or seq.params.prompt_logprobs is not None or seq.status is not Status.RUNNING:
            return False  # scored prompts have a namespace each: no turn comes after them
        if seq.id <= self._newest_before_reset:
            return False
        older = self.state.sessions.get(seq.session)
        if older is not None:
            self.discard(step, older)
        spare = seq.table[self._blocks(seq.view.num_computed_tokens) :]
        del seq.table[self._blocks(seq.view.num_computed_tokens) :]
        self._release(seq, spare, "finish")
        self.state.begin_session(seq, now)
        self.counts["kept"] += 1
        return True

    def resume(self, step: Step, new: Sequence) -> None:
        """Give a session's next turn, not yet in the queue, the KV that its prompt shares with the turn before."""
        old = self.state.sessions.get(new.session) if new.request.session_id else None
        if old is None:
            return
        shared = _common(old.tokens, new.tokens, min(old.view.num_computed_tokens, len(new.tokens) - 1))
        shared = self._writable(old, shared)
        if not shared or new.params.n > 1:
            self.discard(step, old)
            return
        wanted = self._blocks(shared)
        self._end(old, [block for block in old.table[wanted:] if block != HOLE])
        extra = [index for index in old.host_blocks if index >= wanted]
        self.state.swap.give([old.host_blocks.pop(index) for index in extra])
        new.table.extend(old.table[:wanted])
        new.host_blocks.update(old.host_blocks)
        old.table.clear()
        old.host_blocks.clear()
        new.set_computed(shared)
        new.set_tokens_at_end(self.state.limits.block_size)
        self.state.move(old, Status.FINISHED)
        self.counts["resumed"] += 1

    def _writable(self, old: Sequence, shared: int) -> int:
        """So many of ``shared`` tokens that the next one may be written behind them: not into a block that others can find."""
        index, inside = divmod(shared, self.state.limits.block_size)
        return shared - inside if inside and old.table[index] in self.state.pool.kept else shared

    def tend(self, step: Step) -> None:
        """Once a step while any session idles: ask the policy, and do what it says."""
        self._apply(step, self.hooks.plan_idle(view=self.state.view) or ())
        self.state.refresh_free()

    def make_room(self, step: Step, blocks_missing: int) -> bool:
        """On a shortage: ask again, then forget the session that is away longest; True when a block became free."""
        state = self.state
        if not any(view.where == "device" for view in state.idle):
            return False
        before = state.pool.num_free
        state.set_blocks_missing(blocks_missing)
        try:
            self._apply(step, self.hooks.plan_idle(view=state.view) or ())
        finally:
            state.set_blocks_missing(0)
        for view in list(state.idle):
            if state.pool.num_free > before:
                break
            if view.where == "device":
                self.discard(step, self._seq(view.id))
        return state.pool.num_free > before

    # ------------------------------------------------------------------------------------------- acting

    def _seq(self, id: int) -> Sequence:
        return next(seq for seq in self.state.sessions.values() if seq.id == id)

    def _apply(self, step: Step, choices: Iterable[IdleChoice]) -> None:
        idle = {view.id for view in self.state.idle}
        for choice in choices:
            if (
                not isinstance(choice, IdleChoice)
                or choice.sequence not in idle
                or choice.kind not in ("keep", "swap", "discard")
            ):
                raise self.hooks.policy_error(
                    "plan_idle", f"{choice!r}: not an idle sequence, or none of keep, swap, discard"
                )
            seq = self._seq(choice.sequence)
            if choice.kind == "discard":
                self.discard(step, seq)
                idle.discard(choice.sequence)
            elif choice.kind == "swap" and seq.view.where == "device":
                self._swap_out(step, seq)

    def _swap_out(self, step: Step, seq: Sequence) -> None:
        """To host memory what this session alone holds; without room there it stays, and the policy may think again."""
        refs, swap = self.state.pool.refs, self.state.swap
        private = [(i, b) for i, b in enumerate(seq.table) if refs[b] == 1]
        if len(private) > swap.num_free or not private:
            return
        for (index, block), host in zip(private, swap.take(len(private)), strict=True):
            step.swap_out(block, host)
            seq.host_blocks[index] = host
            seq.table[index] = HOLE
        self._release(seq, [block for _, block in private], "swap")
        self.state.set_where(seq, "swap")
        self.counts["swapped"] += 1

    def discard(self, step: Step, seq: Sequence) -> None:
        """Forget an idle turn's KV: its blocks go back, where an allocator may find their content again."""
        self._end(seq, list(seq.device_blocks()))
        self.state.swap.give(tuple(seq.host_blocks.values()))
        seq.host_blocks.clear()
        seq.table.clear()
        self.state.move(seq, Status.FINISHED)
        self.counts["discarded"] += 1

    def drop_all(self, step: Step) -> None:
        for seq in list(self.state.sessions.values()):
            self.discard(step, seq)

    def reset(self, step: Step) -> None:
        """Forget what is kept; what was computed so far is not kept at the end of those that compute it either."""
        self.drop_all(step)
        self._newest_before_reset = max(self.state.sequences, default=-1)

    def _release(self, seq: Sequence, blocks: list[int], reason: Any) -> None:
        if blocks:
            self.hooks.release(releases=(Release(seq.id, tuple(blocks), reason),))

    def _end(self, seq: Sequence, blocks: list[int]) -> None:
        """The allocator is told that a sequence is over, whether it gives blocks back or not."""
        self.hooks.release(releases=(Release(seq.id, tuple(blocks), "finish"),))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.state.limits.block_size)


def _common(a: list[int], b: list[int], longest: int) -> int:
    """Leading tokens that both have, at most ``longest``."""
    if a[:longest] == b[:longest]:
        return longest
    return next(i for i in range(longest) if a[i] != b[i])
