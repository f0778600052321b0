"""What one step gathers while it runs: moves, what happened, and where the time went. Core's own; plugins get the StepReport."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from core.types import Finished, MemoryReport, Move, Output, Preempted, Request

STAGES = ("intake", "look", "plan", "reserve", "relieve", "pack", "move", "forward", "sample", "text", "commit")


class Step:
    """One step in the making. ``seconds`` are host seconds a stage, on the real clock also where the executor's is virtual."""

    __slots__ = (
        "number",
        "started_s",
        "moves",
        "late_moves",
        "outputs",
        "preempted",
        "finished",
        "refused",
        "memory",
        "num_tokens",
        "num_sampled",
        "num_forked",
        "num_started",
        "query_tokens",
        "hit_tokens",
        "seconds",
        "_mark",
    )

    def __init__(self, number: int, started_s: float, moves: list[Move]):
        self.number = number
        self.started_s = started_s
        self.moves = moves  # decided so far, those that an earlier step left included
        self.late_moves: list[Move] = []  # decided at commit: they run before the next forward pass
        self.outputs: list[Output | tuple[Any, int]] = []  # see core.reports.Outputs
        self.preempted: list[Preempted] = []
        self.finished: list[Finished] = []
        self.refused: list[Request] = []
        self.memory: MemoryReport | None = None  # at its fullest, before commit gives anything back
        self.num_tokens = 0
        self.num_sampled = 0
        self.num_forked = 0  # branches that started from their parent's blocks
        self.num_started = 0  # requests computed for the first time
        self.query_tokens = 0
        self.hit_tokens = 0
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._mark = perf_counter()

    def mark(self, stage: str) -> None:
        """The time since the last mark belongs to ``stage``."""
        now = perf_counter()
        self.seconds[stage] += now - self._mark
        self._mark = now

    def add_device_seconds(self, seconds: Mapping[str, float]) -> None:
        """Stages 7 to 9, as the executor measured them; what its call cost beyond them counts as forward."""
        now = perf_counter()
        spent = now - self._mark
        for stage, value in seconds.items():
            self.seconds[stage] += value
        self.seconds["forward"] += max(0.0, spent - sum(seconds.values()))
        self._mark = now

    def swap_out(self, block: int, host: int) -> None:
        self.moves.append(Move("swap_out", block, host))

    def swap_in(self, host: int, block: int) -> None:
        self.moves.append(Move("swap_in", host, block))

    @property
    def num_copies(self) -> int:
        return sum(1 for move in self.moves if move.kind == "copy") if self.moves else 0
