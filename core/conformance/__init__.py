"""The plugin author's kit: proves an allocator, a scheduler, a preemption policy or an attention kernel against the contract.

By name, on an installed package or on a YAML file in a folder of your own::

    python -m core.conformance --allocator mine
    python -m core.conformance --allocator mine --config-dir conf --trust mine allocator.reserve=oracle
    pytest -p core.conformance.plugin --pyargs core.conformance --allocator mine

Or in a test file of your own, which pytest collects like any other::

    from core.conformance import AllocatorCases

    class TestMine(AllocatorCases):
        option = "allocator=mine"

The kit needs pytest and hypothesis: ``pip install 'quire[test]'``.
"""

from __future__ import annotations

import importlib
from typing import Any

KINDS = ("allocator", "scheduler", "preemption", "kernel")
"""What the kit can prove."""

CASES = {
    "AllocatorCases": "allocator",
    "SchedulerCases": "scheduler",
    "PreemptionCases": "preemption",
    "KernelCases": "kernel",
}

__all__ = ["KINDS", *CASES]


def __getattr__(name: str) -> Any:
    """The case classes, imported when asked for: they need pytest, and the kernel's need torch."""
    if name not in CASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    pytest.register_assert_rewrite(f"{__name__}.kernel")  # the kernel's cases compare with plain asserts
    return getattr(importlib.import_module(f"{__name__}.{CASES[name]}"), name)
