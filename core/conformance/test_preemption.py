"""The preemption cases, for the option that the command line names."""

from core.conformance.preemption import PreemptionCases


class TestPreemption(PreemptionCases):
    """Collected by name."""
