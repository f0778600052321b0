"""``python -m core.ledger``: what a model costs on a machine, by arithmetic that can be checked on paper.

    from core.ledger import ledger
    rows = ledger(shape, machine, Inputs(block_size=32))

Every figure is a ``Row``: a value in bytes, seconds, tokens or a fraction, the formula, and the formula with its numbers.
The arithmetic itself is core/arithmetic.py, which the simulator uses too. No torch.
"""

from __future__ import annotations

from core.arithmetic import Machine, Shape
from core.ledger.inputs import Case, Inputs, Row
from core.ledger.memory import memory_rows
from core.ledger.scenarios import scenario_rows
from core.ledger.timing import timing_rows

__all__ = ["Case", "Inputs", "Row", "ledger"]


def ledger(shape: Shape, machine: Machine, inputs: Inputs | None = None) -> dict[str, Row]:
    """Every row by its key, in the order in which they are shown. ConfigError for bad inputs."""
    case = Case(shape=shape, machine=machine, inputs=inputs or Inputs())
    rows = [*memory_rows(case), *timing_rows(case), *scenario_rows(case)]
    return {row.key: row for row in rows}
