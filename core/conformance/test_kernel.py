"""The kernel cases, for the option that the command line names."""

from core.conformance.kernel import KernelCases


class TestKernel(KernelCases):
    """Collected by name."""
