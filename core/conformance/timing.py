"""How long the hooks of a policy take in a step: medians, since a machine is seldom alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from core.engine import Engine


class Clock:
    """Times an engine's hooks. ``microseconds(hooks)`` is the median over steps of what they took together in a step."""

    def __init__(self, engine: Engine, hooks: Sequence[str]):
        self.steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = {}
        for hook in hooks:
            if engine.hooks.has(hook):
                self._spent[hook] = 0.0
                setattr(engine.hooks, hook, self._timed(hook, getattr(engine.hooks, hook)))

    def _timed(self, hook: str, call: Any) -> Any:
        def timed(**kwargs: Any) -> Any:
            started = perf_counter()
            answer = call(**kwargs)
            self._spent[hook] += perf_counter() - started
            return answer

        return timed

    def next_step(self) -> None:
        self.steps.append(dict(self._spent))
        self._spent.update(dict.fromkeys(self._spent, 0.0))

    def microseconds(self, hooks: Sequence[str]) -> float:
        return 1e6 * statistics.median(sum(step.get(hook, 0.0) for hook in hooks) for step in self.steps)
