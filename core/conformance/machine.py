"""The state machine: requests come and go, steps run any plan the contract allows, and after each step everything must be right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from core.conformance.draws import same_draws
from core.conformance.puppets import AnyPlan, AnyVictims
from core.conformance.strategies import sizes_for, works
from core.conformance.subject import Subject
from core.conformance.toy import STEP_CAP, Served, Sizes, Work, take_step
from core.conformance.watch import Watch
from core.types import ConfigError

LONGEST = 48
"""Tokens of the longest request that ``works`` draws: the pool must hold one of them."""


def run_machine(
    subject: Subject,
    may_refuse: Callable[[Work, Sizes], bool],
    steps: int = 30,
    share: float = 1.0,
    whole_prefill: bool = False,
    **partners: Any,
) -> dict[str, int]:
    """Run the machine ``subject.examples`` times; gives how often each thing happened. ``partners`` replace the puppets."""
    seen: dict[str, int] = {}
    state = {
        "subject": subject,
        "may_refuse": staticmethod(may_refuse),
        "partners": partners,
        "seen": seen,
        "whole_prefill": whole_prefill,
    }
    machine = type("Machine", (EngineMachine,), state)
    with same_draws():
        run_state_machine_as_test(machine, settings=subject.settings(share, stateful_step_count=steps))
    return seen


class EngineMachine(RuleBasedStateMachine):
    """Drives the real core, in which everything but the subject does whatever the contract allows."""

    subject: Subject
    may_refuse: Callable[[Work, Sizes], bool]
    partners: dict[str, Any]
    seen: dict[str, int]
    whole_prefill: bool

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None
        self.broken = False

    @initialize(sizes=sizes_for(LONGEST, 6))
    def start(self, sizes: Sizes) -> None:
        if self.whole_prefill:
            sizes = attrs.evolve(sizes, max_num_batched_tokens=LONGEST)
        self.sizes, self.random = sizes, random.Random(0)
        self.puppets = {"scheduler": AnyPlan(self.random), "preemption": AnyVictims(self.random), **self.partners}
        self.puppets.pop(self.subject.kind, None)
        try:
            self.engine = self.subject.engine(sizes, **self.puppets)
        except ConfigError as error:
            self.subject.facts["refused sizes"] = str(error)
            return
        self.watch = Watch(self.engine).install() if self.subject.kind == "allocator" else None
        self.served = Served([])

    def _ready(self) -> bool:
        return self.engine is not None and not self.broken

    @precondition(_ready)
    @rule(work=works(may_abort=False))
    def submit(self, work: Work) -> None:
        self.served.works.append(work)
        self.served.index[work.submit(self.engine)] = len(self.served.works) - 1

    @precondition(_ready)
    @rule(seed=st.integers(0, 2**16), count=st.integers(1, 12))
    def steps(self, seed: int, count: int) -> None:
        self.random.seed(seed)
        for _ in range(count):
            self._step()

    @precondition(_ready)
    @rule(choice=st.integers(0, 20))
    def abort(self, choice: int) -> None:
        """Any request, ended ones included; its blocks come back at the next step."""
        if self.served.index:
            ids = sorted(self.served.index)
            self.engine.abort(ids[choice % len(ids)])
            self._step()

    @precondition(_ready)
    @rule(seed=st.integers(0, 2**16), wild=st.sampled_from([0, 40]))
    def drain(self, seed: int, wild: int) -> None:
        """Bring everything to its end, after ``wild`` more steps of any plan in order: nothing may be left, every
        answer must be right."""
        self.random.seed(seed)
        for step in range(STEP_CAP):
            if not self.engine.has_work():
                break
            self._wild(step < wild)
            self._step()
        else:
            self.broken = True
            raise AssertionError(
                f"the work has not ended after {STEP_CAP} steps: {self.engine.stats()} (no termination)"
            )
        self._wild(True)
        self.broken = True  # until the checks below have passed
        self.engine.assert_idle()
        self.served.check_tokens(lambda work: self.may_refuse(work, self.sizes))
        self.broken = False

    def _wild(self, wild: bool) -> None:
        for puppet in self.puppets.values():
            if isinstance(puppet, AnyPlan | AnyVictims):
                puppet.random = self.random if wild else None

    def _step(self) -> None:
        if self.engine.has_work():
            try:
                take_step(self.engine, self.served)
            except BaseException:
                self.broken = True
                raise

    def teardown(self) -> None:
        if self._ready():
            self.drain(seed=0, wild=0)
            for report in self.served.reports:
                for preempted in report.preempted:
                    self.seen[preempted.kind] = self.seen.get(preempted.kind, 0) + 1
            for name, count in (self.watch.seen if self.watch else {}).items():
                self.seen[name] = self.seen.get(name, 0) + count
