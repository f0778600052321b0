"""How long the hooks of a policy take in a step. A machine may be slow and is seldom alone, so no limit is in seconds: the subject
takes turns with a shipped option, and with itself among more sequences, and only ratios are judged."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from core.conformance.subject import PARTNERS, Subject
from core.engine import Engine

MOST_TIMES = 50.0
"""What the hooks may take in a step, as a multiple of the shipped reference: paged, chunked or recompute."""
FEW, MANY = 64, 512
"""Sequences of the two loads whose times are compared."""
MOST_GROWTH = 2.0 * MANY / FEW
"""What eight times as many sequences may cost: twice as much each. With their square it would be eight times."""
TRIES = 3
"""Measurements before a limit that was missed by little counts as broken."""

Make = Callable[[Subject, int], Engine]
"""An engine around a subject, with a load of so many running sequences."""


class Clock:
    """Times an engine's hooks. ``microseconds()`` is the median of what they took together in a step in which they were called."""

    def __init__(self, engine: Engine, hooks: Sequence[str]):
        self.engine = engine
        self._steps: list[float] = []
        self._spent = 0.0
        for hook in hooks:
            if engine.hooks.has(hook):
                setattr(engine.hooks, hook, self._timed(getattr(engine.hooks, hook)))

    def _timed(self, call: Any) -> Any:
        def timed(**kwargs: Any) -> Any:
            started = perf_counter()
            answer = call(**kwargs)
            self._spent += perf_counter() - started
            return answer

        return timed

    def step(self) -> None:
        """One step of the engine, while it has work."""
        if self.engine.has_work():
            self._spent = 0.0
            self.engine.step()
            if self._spent:
                self._steps.append(self._spent)

    def microseconds(self) -> float:
        assert self._steps, "the hooks were never called: the load does not ask for them"
        return 1e6 * statistics.median(self._steps)


def in_turn(engines: Sequence[Engine], hooks: Sequence[str], steps: int) -> list[float]:
    """Microseconds a step of each engine's hooks; they step in turn, so that what disturbs one disturbs all."""
    clocks = [Clock(engine, hooks) for engine in engines]
    for _ in range(steps):
        for clock in clocks:
            clock.step()
    return [clock.microseconds() for clock in clocks]


def check_time(subject: Subject, make: Make, count: int, hooks: Sequence[str], what: str, steps: int = 30) -> None:
    """AssertionError when the hooks take many times what those of the reference take with the same load."""
    reference = Subject(subject.kind, PARTNERS[subject.kind])
    tries = []
    for _ in range(TRIES):
        took, usual = in_turn([make(subject, count), make(reference, count)], hooks, steps)
        tries.append((took / usual, took))
        if not MOST_TIMES < took / usual < 2 * MOST_TIMES:
            break
    times, took = min(tries)
    said = f"{took:,.0f} µs a step with {what}, {times:.1f} times {reference.option}"
    subject.note(f"{said} (limit {MOST_TIMES:.0f} times)")
    assert times <= MOST_TIMES, f"{'+'.join(hooks)} take {said}, the limit is {MOST_TIMES:.0f} times"


def check_growth(subject: Subject, make: Make, hooks: Sequence[str], steps: int = 30) -> None:
    """AssertionError when the hooks' time grows much faster than the number of sequences."""
    tries = []
    for _ in range(TRIES):
        few, many = in_turn([make(subject, FEW), make(subject, MANY)], hooks, steps)
        tries.append((many / few, few, many))
        if not MOST_GROWTH < many / few < 2 * MOST_GROWTH:
            break
    growth, few, many = min(tries)
    said = f"{few:,.0f} µs a step with {FEW} sequences and {many:,.0f} with {MANY}: {growth:.1f} times"
    subject.note(f"{said} (limit {MOST_GROWTH:.0f})")
    assert growth <= MOST_GROWTH, (
        f"{'+'.join(hooks)} take {said}, the limit is {MOST_GROWTH:.0f}: it grows with a square"
    )
