"""What every scheduler must do; ``python -m core.conformance --scheduler NAME`` runs these cases."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import attrs
from hypothesis import strategies as st

from core.conformance.common import PolicyCases, needs_whole_prefill, tight_sizes
from core.conformance.machine import run_machine
from core.conformance.strategies import PREFIXES, contests, fixed_works
from core.conformance.subject import Subject
from core.conformance.timing import check_growth, check_time
from core.conformance.toy import Served, Sizes, Work, serve, take_step
from core.engine import Engine

RUNNING = 256
STALL = 40
"""Most steps in which a running sequence may get no token while the pool has room for everyone."""
FLOOD_STEPS, OLD_STEPS = 200, 20
"""Starvation: requests arrive twice as fast as they can be served for 200 steps; those of the first 20 steps must
have ended by then."""


class PurePlan:
    """Between core and the scheduler: planning changes neither the pool nor the queues."""

    def __init__(self, engine: Engine):
        self.engine, self._call = engine, engine.hooks.plan_step
        engine.hooks.plan_step = self._plan

    def _facts(self) -> Any:
        state = self.engine.state
        views = [
            (v.id, v.num_tokens, v.num_computed_tokens, v.where, list(v.block_table))
            for v in [*state.running, *state.waiting]
        ]
        return list(state.pool.refs), list(state.pool._free), views

    def _plan(self, view: Any) -> Any:
        before = self._facts()
        plan = self._call(view=view)
        assert self._facts() == before, (
            "plan_step changed the pool or a sequence: it may only read and answer with a Plan"
        )
        return plan


class SchedulerCases(PolicyCases):
    kind: ClassVar[str] = "scheduler"

    def test_same_tokens_as_alone(self, subject: Subject) -> None:
        """However tight pool and budget are: plans stay within max_num_batched_tokens and max_num_seqs, name known
        sequences once, compute something in every step, and every request gets the tokens it gets alone."""
        whole = needs_whole_prefill(subject)

        def holds(contest: tuple[list[Work], Sizes], preemption: str) -> None:
            works, sizes = contest
            engine = subject.engine(sizes, preemption=preemption)
            PurePlan(engine)
            serve(engine, works).check_tokens()

        subject.holds(
            holds, contest=contests(small_budget=not whole), preemption=st.sampled_from(["recompute", "swap"])
        )
        subject.note("needs a step as large as the longest prompt" if whole else "takes any max_num_batched_tokens")

    def test_any_company(self, subject: Subject) -> None:
        """Requests come, are aborted, forked and preempted in any way and at any time; plans stay right and everything ends."""
        seen = run_machine(subject, lambda work, sizes: False, whole_prefill=needs_whole_prefill(subject))
        subject.note(", ".join(f"{name} {count}" for name, count in sorted(seen.items())) or "nothing was preempted")

    def test_decodes_go_on(self, subject: Subject) -> None:
        """While long prompts keep arriving and there is room for all, a running sequence waits at most 40 steps for
        its next token."""
        sizes = Sizes(block_size=4, num_blocks=1024, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=64)
        engine = subject.engine(sizes)
        works = [Work(PREFIXES[i % 3][:4], 24, seed=i) for i in range(3)]
        works += [Work((*PREFIXES[i % 3], i), 2, seed=i, arrives=2 + 2 * i) for i in range(24)]
        served = Served(works)
        pending, last = list(range(len(works))), dict[int, tuple[int, int]]()
        longest = 0
        for step in range(4000):
            while pending and works[pending[0]].arrives <= step:
                i = pending.pop(0)
                served.index[works[i].submit(engine)] = i
            if not engine.has_work() and not pending:
                break
            if engine.has_work():
                take_step(engine, served)
            for view in engine.state.running:
                computed, since = last.get(view.id, (-1, step))
                last[view.id] = (view.num_computed_tokens, step if view.num_computed_tokens != computed else since)
                longest = max(longest, step - last[view.id][1])
                assert longest <= STALL, f"{view!r} runs and got no token for {longest} steps, the limit is {STALL}"
        served.check_tokens()
        subject.note(f"at most {longest} steps without a token (limit {STALL})")

    def test_no_request_starves(self, subject: Subject) -> None:
        """Requests arrive twice as fast as they can be served, for 200 steps: all that arrived in the first 20 have
        ended by then. A scheduler that lets some wait on purpose says so in its docs and is run with --known
        no_request_starves=REASON."""
        sizes = Sizes(block_size=4, num_blocks=256, max_num_batched_tokens=32, max_num_seqs=8, max_model_len=32)
        engine = subject.engine(sizes)
        served, rng = Served([]), random.Random(0)
        for step in range(FLOOD_STEPS):
            for _ in range(2):
                i = len(served.works)
                prompt = tuple(rng.choices(range(300), k=rng.randint(4, 12)))
                served.works.append(Work(prompt, 4 + 4 * (i % 2), seed=i, arrives=step))
                served.index[served.works[i].submit(engine)] = i
            take_step(engine, served, content=False)
        left = [i for i, work in enumerate(served.works) if work.arrives < OLD_STEPS and (i, 0) not in served.reason]
        ended = len(served.reason)
        assert not left, (
            f"{len(left)} of the {2 * OLD_STEPS} requests that arrived in the first {OLD_STEPS} steps have not ended after "
            f"{FLOOD_STEPS} steps, although {ended} have; the oldest of them arrived at step {served.works[left[0]].arrives}"
        )
        subject.note(f"{ended} of {len(served.works)} ended, the first {2 * OLD_STEPS} among them")

    def test_a_burst_ends(self, subject: Subject) -> None:
        """60 requests at once, in a pool for a few: all end, in a number of steps that does not explode."""
        works = [attrs.evolve(work, arrives=0) for work in fixed_works(60)]
        sizes = tight_sizes(subject, works)
        served = serve(subject.engine(sizes, preemption="swap"), works)
        served.check_tokens()
        tokens = sum(work.num_tokens * work.n for work in works)
        subject.note(f"{tokens} tokens in {len(served.reports)} steps of at most {sizes.max_num_batched_tokens}")

    def test_time_per_call(self, subject: Subject) -> None:
        """A plan takes at most 50 times what chunked's takes with the same 256 running and 1,024 waiting sequences."""
        check_time(subject, busy, RUNNING, ("plan_step",), f"{RUNNING} running and {4 * RUNNING:,} waiting", steps=20)

    def test_time_grows_with_the_sequences_not_their_square(self, subject: Subject) -> None:
        """Eight times as many running and waiting sequences: at most 16 times the time a plan."""
        check_growth(subject, busy, ("plan_step",), steps=20)


def busy(subject: Subject, count: int) -> Engine:
    """``count`` running sequences and four times as many that wait."""
    sizes = Sizes(
        block_size=16, num_blocks=16 * count, max_num_seqs=count, max_num_batched_tokens=8 * count, max_model_len=64,
        num_swap_blocks=8,
    )  # fmt: skip
    engine = subject.engine(sizes, checks="cheap")
    for i in range(5 * count):
        Work((i % 300, 1, 2, 3), 40, seed=i).submit(engine)
    for _ in range(10):
        engine.step()
    return engine
