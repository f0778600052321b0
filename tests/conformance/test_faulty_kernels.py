"""Planted faults in kernels: each kind is caught by the case that protects it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from core.conformance import KernelCases
from tests.conformance.kit import failure, subject_for

HERE = "tests.conformance.faulty_kernels"
EQUALS, WRITES = "test_equals_the_reference", "test_writes_its_slots_and_nothing_else"
FAULTS = {
    "TablesInOrderPlugin": (EQUALS, "rows are wrong"),
    "ReadsUnusedPlugin": (EQUALS, "rows are wrong"),
    "OneTooManyPlugin": (EQUALS, "rows are wrong"),
    "NoCausalMaskPlugin": (EQUALS, "rows are wrong"),
    "WrongHeadsPlugin": ("test_head_groups", "rows are wrong"),
    "NoWindowPlugin": ("test_windows_and_soft_caps", "rows are wrong"),
    "NoCapPlugin": ("test_windows_and_soft_caps", "rows are wrong"),
    "WritesPaddingPlugin": (WRITES, "numbers of the pool changed"),
    "OtherLayerPlugin": (WRITES, "numbers of the pool changed"),
    "ForgetsPlugin": (WRITES, "rows are wrong|V of the new tokens is not in the slots"),
    "WrongTypePlugin": (EQUALS, "the output is .* torch.float32, q is"),
    "SharedPlugin": ("test_one_batch_after_another", "another output after a kernel of another engine|rows are wrong"),
    "Silent": ("test_strange_cases_are_refused_with_a_reason", "gave None"),
    "RefusesAll": ("test_it_serves_every_phase", "nothing was proved: .*not on this machine"),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_kit_catches(fault: str, tmp_path: Path) -> None:
    case, message = FAULTS[fault]
    caught = failure(KernelCases, subject_for(tmp_path, "kernel", f"{HERE}.{fault}"), case)
    assert caught is not None and re.search(message, caught), caught
