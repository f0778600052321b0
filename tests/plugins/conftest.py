"""For the tests of kernel=cpu and of the packed linears: every instruction set that its operators can run with here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from plugins.kernels import cpu_build


def instruction_sets() -> list[str]:
    """Widest first; none where the operators cannot be had, which the modules that need them say with the reason."""
    try:
        cpu_build.load()
    except cpu_build.Unavailable:
        return []
    found = []
    for name in ("avx512", "avx2", "generic"):
        try:
            found.append(torch.ops.quire_cpu.use_instructions(name))
        except RuntimeError:  # this processor has them not
            continue
    torch.ops.quire_cpu.use_instructions("auto")
    return found


@pytest.fixture(params=instruction_sets())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.ops.quire_cpu.use_instructions(request.param)
    yield request.param
    torch.ops.quire_cpu.use_instructions("auto")
