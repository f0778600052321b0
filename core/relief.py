"""Reserve and relieve: ask the allocator until the plan fits, and make room when it does not.

On a ``Shortfall`` chunks that may not preempt leave the plan first; when none is left, the preemption policy names victims. Kinds of
preemption are counted by what happened: ``swap``, ``recompute``, ``turned`` (swap space was full, so it became recompute) and
``forced`` (nobody could help, so core preempted the newest running sequence).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import attrs

from core.scratch import Step
from core.sessions import Sessions
from core.state import Sequence, State, Status
from core.types import HOLE, Eviction, Lease, Plan, Preempted, Release, ReleaseReason, Shortfall


class Relief:
    """Owns the loop between the allocator's ``reserve`` and the preemption policy's ``choose_victims``."""

    def __init__(self, state: State, hooks: Any, fail: Callable[[Step, Sequence, str], None], sessions: Sessions):
        self.state, self.hooks, self.sessions = state, hooks, sessions
        self._fail = fail  # ends one sequence with an error that is its own

    def reserve(self, step: Step, plan: Plan, short_of_rows: bool = False) -> tuple[Plan, Seq[Lease]]:
        """The plan that fits and its leases. Bounded: every round shortens the plan or empties a table."""
        while plan.chunks:
            answer = (self._rows_missing(plan) if short_of_rows else None) or self.hooks.reserve(
                plan=plan, sequences=self.state.readonly_views
            )
            step.mark("reserve")
            if not isinstance(answer, Shortfall):
                if answer is None or len(answer) != len(plan.chunks):
                    raise self.hooks.policy_error(
                        "reserve", f"gave {answer!r} for {len(plan.chunks)} chunks: one lease each"
                    )
                return plan, answer
            if not 0 <= answer.num_fitting < len(plan.chunks) or answer.blocks_missing < 1:
                raise self.hooks.policy_error("reserve", f"gave {answer} for a plan of {len(plan.chunks)} chunks")
            plan = self._relieve(step, plan, answer)
            self.state.refresh_free()
            step.mark("relieve")
        return plan, ()

    def _rows_missing(self, plan: Plan) -> Shortfall | None:
        """Newcomers that may preempt can be more than there are rows: then somebody who runs has to go."""
        state = self.state
        free = state.limits.max_num_seqs - len(state.running)
        new = [i for i, chunk in enumerate(plan.chunks) if state.sequences[chunk.sequence].status is not Status.RUNNING]
        return Shortfall(new[free], 1, len(new) - free) if len(new) > free else None

    def _relieve(self, step: Step, plan: Plan, shortfall: Shortfall) -> Plan:
        chunks, fit = plan.chunks, shortfall.num_fitting
        keep = tuple([c for i, c in enumerate(chunks) if i < fit or c.may_preempt])
        if len(keep) == len(chunks):
            last = max((i for i, c in enumerate(chunks) if not c.may_preempt), default=None)
            if last is not None:
                keep = chunks[:last] + chunks[last + 1 :]
        if keep and len(keep) < len(chunks):
            return attrs.evolve(plan, chunks=keep)
        if not shortfall.rows_missing and self._take_parked(step, plan, shortfall):
            return plan
        if not self.state.running:
            return self._unblock(step, plan, shortfall)
        if not keep:
            raise self.hooks.policy_error(
                "plan_step",
                f"no chunk of {chunks} fits and none may preempt, although {len(self.state.running)} sequences run: "
                "set may_preempt on the chunks of running sequences",
            )
        return self._preempt(step, plan, shortfall)

    def _take_parked(self, step: Step, plan: Plan, shortfall: Shortfall) -> bool:
        """What nobody computes gives way first: idle sessions, held beams, then waiting sequences that hold blocks, the newest
        first."""
        if self.state.idle and self.sessions.make_room(step, shortfall.blocks_missing):
            return True
        planned = {chunk.sequence for chunk in plan.chunks}
        parked = [seq for seq in self.state.parked.values() if seq.id not in planned]
        held = [seq for seq in self.state.held.values() if seq.table]
        if held:  # its candidates are known: only a winner among its children will be computed again
            self._drop_kv(step, max(held, key=lambda seq: seq.order), "recompute")
            return True
        if not parked:
            return False
        self._drop_kv(step, max(parked, key=lambda seq: seq.order), "turned")
        return True

    def _preempt(self, step: Step, plan: Plan, shortfall: Shortfall) -> Plan:
        view = self.state.view
        evictions = self.hooks.choose_victims(view=view, plan=plan, shortfall=shortfall)
        if evictions is None:
            return self._force(step, plan, shortfall)
        self._check_evictions(evictions, plan, shortfall)
        pool = self.state.pool
        held_before = (pool.num_free, pool.num_extra_refs)
        for eviction in evictions:
            self._evict(step, self.state.sequences[eviction.sequence], eviction.kind)
        victims = {eviction.sequence for eviction in evictions}
        keep = tuple([c for c in plan.chunks if c.sequence not in victims])
        if not keep:
            raise self.hooks.policy_error(
                "choose_victims", f"{tuple(evictions)} leave nothing of the plan: no progress"
            )
        if (pool.num_free, pool.num_extra_refs) == held_before and len(keep) == len(plan.chunks):
            raise self.hooks.policy_error("choose_victims", f"{tuple(evictions)} freed no block and shortened no plan")
        return attrs.evolve(plan, chunks=keep)

    def _check_evictions(self, evictions: Seq[Eviction], plan: Plan, shortfall: Shortfall) -> None:
        fitting = {c.sequence for c in plan.chunks[: shortfall.num_fitting]}
        seen: set[int] = set()
        for eviction in evictions:
            seq = self.state.sequences.get(eviction.sequence)
            if seq is None or seq.status is not Status.RUNNING or eviction.kind not in ("swap", "recompute"):
                raise self.hooks.policy_error(
                    "choose_victims", f"{eviction}: not a running sequence, or an unknown kind"
                )
            if (eviction.sequence in fitting and not eviction.ahead) or eviction.sequence in seen:
                raise self.hooks.policy_error(
                    "choose_victims",
                    f"{eviction}: named twice, or ahead of the first chunk that does not fit ({shortfall})",
                )
            seen.add(eviction.sequence)
        if not evictions:
            raise self.hooks.policy_error("choose_victims", "gave no eviction: None says that it cannot help")

    def _force(self, step: Step, plan: Plan, shortfall: Shortfall) -> Plan:
        """Nobody could help: the newest running sequence but the most wanted one is computed again later."""
        first = plan.chunks[0].sequence
        newest = next((v for v in reversed(self.state.running) if v.id != first), None)
        if newest is None:
            return self._unblock(step, plan, shortfall)
        self._drop_kv(step, self.state.sequences[newest.id], "forced")
        return attrs.evolve(plan, chunks=tuple([c for c in plan.chunks if c.sequence != newest.id]))

    def _unblock(self, step: Step, plan: Plan, shortfall: Shortfall) -> Plan:
        """No victim is left: what does not fit waits. If nothing fits, swapped sequences give up the shared blocks they hold on the
        device; else the first cannot be served.
        """
        if shortfall.num_fitting:
            return attrs.evolve(plan, chunks=plan.chunks[: shortfall.num_fitting])
        for seq in reversed(self.state.swapped()):
            if seq.device_blocks():
                self._drop_kv(step, seq, "turned")
                return plan
        first = plan.chunks[0].sequence
        held = [seq for seq in self.state.parked.values() if seq.id != first]
        if held:
            self._drop_kv(step, max(held, key=lambda seq: seq.order), "turned")
            return plan
        chunk, pool = plan.chunks[0], self.state.pool
        seq = self.state.sequences[chunk.sequence]
        self._fail(
            step,
            seq,
            f"{chunk.num_tokens} more tokens of a sequence with {seq.view.num_computed_tokens} computed need at least "
            f"{shortfall.blocks_missing} KV blocks more than can be freed: {pool.num_free} of {pool.num_blocks} blocks are free",
        )
        # a beam does not fail alone: its siblings are gone, too
        return attrs.evolve(plan, chunks=tuple([c for c in plan.chunks[1:] if c.sequence in self.state.sequences]))

    # ------------------------------------------------------------------------------------------- evictions

    def _evict(self, step: Step, seq: Sequence, kind: str) -> None:
        if kind == "recompute":
            self._drop_kv(step, seq, "recompute")
            return
        size, refs = self.state.limits.block_size, self.state.pool.refs
        computed = -(-seq.view.num_computed_tokens // size)
        private = [(i, b) for i, b in enumerate(seq.table) if b != HOLE and refs[b] == 1]
        written = [(i, b) for i, b in private if i < computed]
        if not self._swap_room(step, seq, len(written)):
            self._drop_kv(step, seq, "turned")
            return
        for (index, block), host in zip(written, self.state.swap.take(len(written)), strict=True):
            step.swap_out(block, host)
            seq.host_blocks[index] = host
        for index, _ in private:
            seq.table[index] = HOLE
        del seq.table[computed:]
        self._count(step, seq, "swap", len(private))
        self._release(seq, tuple(b for _, b in private), "swap")
        self.state.move(seq, Status.SWAPPED)

    def _swap_room(self, step: Step, victim: Sequence, num_blocks: int) -> bool:
        """Make room in swap space by turning newer swapped sequences to recompute; False when the victim is the newest of them."""
        swap = self.state.swap
        if num_blocks > swap.num_blocks:
            return False
        while swap.num_free < num_blocks:
            newest = max([*self.state.swapped(), victim], key=lambda s: s.order)
            if newest is victim:
                return False
            self._drop_kv(step, newest, "turned")
        return True

    def _drop_kv(self, step: Step, seq: Sequence, kind: Any) -> None:
        """Forget a sequence's KV, on the device and in swap space: it will be computed again."""
        blocks = seq.device_blocks()
        self._count(step, seq, kind, len(blocks))
        if seq.host_blocks:
            self.state.swap.give(tuple(seq.host_blocks.values()))
            seq.host_blocks.clear()
        seq.table.clear()
        seq.set_computed(0)
        self._release(seq, blocks, kind)
        if seq.status in (Status.WAITING, Status.HELD):
            self.state.set_where(seq, "none")
        else:
            self.state.move(seq, Status.WAITING)

    def _count(self, step: Step, seq: Sequence, kind: Any, num_blocks: int) -> None:
        step.preempted.append(Preempted(seq.id, kind, seq.view.num_computed_tokens, num_blocks))
        self.state.count_preemption(seq)

    def _release(self, seq: Sequence, blocks: tuple[int, ...], reason: ReleaseReason) -> None:
        if blocks:
            self.hooks.release(releases=(Release(seq.id, blocks, reason),))
