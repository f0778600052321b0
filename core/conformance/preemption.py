"""What every preemption policy must do; ``python -m core.conformance --preemption NAME`` runs these cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import pytest

from core.conformance.common import PolicyCases
from core.conformance.machine import run_machine
from core.conformance.strategies import contests, fixed_works
from core.conformance.subject import Subject
from core.conformance.timing import check_growth, check_time
from core.conformance.toy import Sizes, Work, serve
from core.engine import Engine
from core.types import HOLE, Eviction, Plan, Shortfall, View

RUNNING = 256


class Enough:
    """Between core and the policy: what it names must free enough, unless it has named everyone who may be pushed out."""

    def __init__(self, engine: Engine):
        self.engine, self._call = engine, engine.hooks.choose_victims
        self.seen: dict[str, int] = {"asked": 0, "none": 0, "victims": 0}
        engine.hooks.choose_victims = self._choose

    def _choose(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        before = list(self.engine.pool.refs), list(self.engine.pool._free)
        evictions = self._call(view=view, plan=plan, shortfall=shortfall)
        assert before == (list(self.engine.pool.refs), list(self.engine.pool._free)), (
            "choose_victims changed the pool: it may only read"
        )
        self.seen["asked"] += 1
        if evictions is None:
            self.seen["none"] += 1
            return None
        self.seen["victims"] += len(evictions)
        known = {s.id for s in view.running}
        if evictions and all(e.sequence in known for e in evictions):
            self._check(view, plan, shortfall, {e.sequence for e in evictions})
        return evictions

    def _check(self, view: View, plan: Plan, shortfall: Shortfall, named: set[int]) -> None:
        planned = {chunk.sequence: i for i, chunk in enumerate(plan.chunks)}
        first = max(1, shortfall.num_fitting)
        allowed = [s for s in view.running if planned.get(s.id, first) >= first]
        useful = [s for s in allowed if s.private_blocks or self._asks(plan, planned, s)]
        if all(s.id in named for s in useful):
            return
        held: dict[int, int] = {}
        asked = 0
        for sequence in view.running:
            if sequence.id in named:
                for block in sequence.block_table:
                    held[block] = held.get(block, 0) + 1
                # and one for the copy of a shared last block that its chunk may have asked for
                asked += self._asks(plan, planned, sequence) + (sequence.id in planned)
        freed = sum(1 for block, count in held.items() if block != HOLE and count >= self.engine.pool.refs[block])
        assert freed + asked >= shortfall.blocks_missing, (
            f"choose_victims named {len(named)} sequences that free {freed} blocks and ask for {asked} fewer; "
            f"{shortfall.blocks_missing} are missing and others may still be pushed out: name enough of them, or give None"
        )

    def _asks(self, plan: Plan, planned: dict[int, int], sequence: Any) -> int:
        """New blocks at the table's end that the victim's own chunk would have taken."""
        if sequence.id not in planned:
            return 0
        end = min(sequence.num_computed_tokens + plan.chunks[planned[sequence.id]].num_tokens, sequence.num_tokens)
        return max(0, -(-end // self.engine.pool.block_size) - len(sequence.block_table))


class PreemptionCases(PolicyCases):
    kind: ClassVar[str] = "preemption"

    def test_same_tokens_as_alone(self, subject: Subject) -> None:
        """However tight the pool and the swap space: victims are running sequences behind the first chunk that does
        not fit, enough of them, each once, by a known kind; nothing spins, and every request gets the tokens it gets alone."""
        seen: dict[str, int] = {}

        def holds(contest: tuple[list[Work], Sizes]) -> None:
            works, sizes = contest
            engine = subject.engine(sizes)
            enough = Enough(engine)
            served = serve(engine, works)
            served.check_tokens()
            for name, count in enough.seen.items():
                seen[name] = seen.get(name, 0) + count
            for preempted in (p for report in served.reports for p in report.preempted):
                seen[preempted.kind] = seen.get(preempted.kind, 0) + 1

        subject.holds(holds, contest=contests())
        assert seen["asked"], "no pool ever ran short: this case proved nothing (raise --examples)"
        subject.note(", ".join(f"{name} {count}" for name, count in seen.items()))

    def test_any_plan_any_company(self, subject: Subject) -> None:
        """Also when a scheduler plans in any order, and sequences are forked, share blocks, were swapped before or are aborted."""
        seen = run_machine(subject, lambda work, sizes: False)
        subject.note(", ".join(f"{name} {count}" for name, count in sorted(seen.items())))

    @pytest.mark.parametrize("num_swap_blocks", [0, 1, 64])
    def test_one_sequence_that_fits_alone_always_ends(self, subject: Subject, num_swap_blocks: int) -> None:
        """Progress: in a pool that holds exactly one of them, four requests end one after the other, with and
        without swap space."""
        works = [Work(tuple(range(i, i + 9)), 23, seed=i) for i in range(4)]
        sizes = Sizes(
            block_size=4, num_blocks=8, max_model_len=32, max_num_batched_tokens=16, num_swap_blocks=num_swap_blocks
        )
        served = serve(subject.engine(sizes), works, step_cap=1500)
        served.check_tokens()
        subject.note(f"{len(served.reports)} steps")

    def test_it_costs_little_where_little_is_missing(self, subject: Subject) -> None:
        """Termination: a load that is a little too large for the pool does not make sequences push each other out for ever."""
        works = [attrs.evolve(work, arrives=0) for work in fixed_works(24)]
        longest = max(work.num_tokens for work in works)
        sizes = Sizes(
            block_size=4,
            num_blocks=-(-longest // 4) + 4,
            max_num_batched_tokens=16,
            max_num_seqs=6,
            max_model_len=longest,
        )
        served = serve(subject.engine(sizes), works, step_cap=3000)
        served.check_tokens()
        needed = sum(work.num_tokens * work.n for work in works)
        computed = sum(report.num_tokens for report in served.reports)
        subject.note(f"computed {computed} tokens where {needed} are needed without preemption")
        assert computed <= 20 * needed, f"computed {computed} tokens for {needed}: preemption undoes its own work"

    def test_time_per_call(self, subject: Subject) -> None:
        """choose_victims takes at most 50 times what recompute's takes with the same 256 running sequences."""
        check_time(subject, busy, RUNNING, ("choose_victims",), f"up to {RUNNING} running")

    def test_time_grows_with_the_sequences_not_their_square(self, subject: Subject) -> None:
        """Eight times as many running sequences: at most 16 times the time a step."""
        check_growth(subject, busy, ("choose_victims",))


def busy(subject: Subject, count: int) -> Engine:
    """``count`` sequences in half of the blocks that they will need."""
    sizes = Sizes(
        block_size=4, num_blocks=3 * count, max_num_seqs=count, max_num_batched_tokens=8 * count, max_model_len=64
    )
    engine = subject.engine(sizes, checks="cheap")
    for i in range(count):
        Work((i % 300, 1, 2, 3), 20, seed=i).submit(engine)
    return engine
