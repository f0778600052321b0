"""The allocator cases, for the option that the command line names."""

from core.conformance.allocator import AllocatorCases


class TestAllocator(AllocatorCases):
    """Collected by name."""
