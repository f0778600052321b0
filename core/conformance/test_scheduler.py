"""The scheduler cases, for the option that the command line names."""

from core.conformance.scheduler import SchedulerCases


class TestScheduler(SchedulerCases):
    """Collected by name."""
