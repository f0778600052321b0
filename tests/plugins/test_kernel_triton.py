"""``kernel=triton``: which cases it takes, and its kernels in Triton's interpreter (``triton_interpreted.py``, run here in a
process of its own) and through the compilers of other machines (``benchmarks/aot.py``).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.kernel import AttentionCase, AttentionKernel, CopiesBlocks
from core.types import Refusal
from plugins.kernels.triton import TritonAttention, TritonKernel, choose_sizes, power_of_two

ROOT = Path(__file__).resolve().parents[2]
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton has no wheel for this platform")


def case_of(**changes) -> AttentionCase:
    fields = {
        "phase": "decode",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "head_dim": 64,
        "group_size": 3,
        "window": None,
    }
    fields |= {"soft_cap": None, "block_size": 16, "device": "cuda"}
    return AttentionCase(**(fields | changes))


@needs_triton
def test_one_kernel_for_all_its_cases():
    plugin = TritonKernel()
    kernel = plugin.select_kernel(case_of())
    assert (
        isinstance(kernel, TritonAttention) and isinstance(kernel, AttentionKernel) and isinstance(kernel, CopiesBlocks)
    )
    assert kernel.graph_safe
    changes = {"phase": "mixed", "window": 7, "soft_cap": 30.0, "kv_dtype": "int8", "head_dim": 256, "block_size": 1}
    assert plugin.select_kernel(case_of(**changes)) is kernel
    assert TritonKernel().select_kernel(case_of()) is not kernel


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "runs on a GPU, not on cpu"),
        ({"dtype": "float64"}, "dtype=float64"),
        ({"kv_dtype": "float8_e5m2"}, "kv_dtype=float8_e5m2"),
        ({"head_dim": 257}, "head_dim 1 to 256, not 257"),
        ({"kv_dtype": "int8", "head_dim": 18}, "in fours with kv_dtype=int8, not 18"),
    ],
)
@needs_triton
def test_other_cases_are_refused_with_the_reason(changes, reason, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    answer = TritonKernel().select_kernel(case_of(**changes))
    assert isinstance(answer, Refusal) and reason in answer.reason


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = TritonKernel().select_kernel(case_of())
    assert isinstance(answer, Refusal) and "quire[gpu]" in answer.reason


def test_the_policy_does_not_import_triton():
    code = "import sys; import plugins.kernels.triton; assert 'triton' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", f"import torch, sys; sys.modules.pop('triton', None); {code}"], cwd=ROOT, check=True
    )


def test_sizes_hold_every_group_and_stay_small():
    for head_dim in (16, 64, 72, 80, 96, 128, 256):
        for item_bytes in (2, 4):
            for stored_bytes in (1, item_bytes):
                for num_rows in (1, 3, 20, 64):
                    one = choose_sizes(num_rows, head_dim, item_bytes, stored_bytes, True)
                    assert one.rows >= num_rows and one.piece % one.tile == 0
                    buffers = 2 if one.stages == 5 else 1
                    assert 2 * buffers * one.tile * power_of_two(head_dim) * item_bytes <= 32 * 1024
                    chunk = choose_sizes(num_rows * 512, head_dim, item_bytes, stored_bytes, False)
                    assert 16 <= chunk.rows <= 64 and chunk.rows * power_of_two(head_dim) <= 8192


@needs_triton
@pytest.mark.timeout(600)
def test_kernels_in_the_interpreter():
    """Every test of ``triton_interpreted.py``. One thread: its planted faults run in forked children."""
    one = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    path = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider", "-W", "default", "--tb=short"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | one, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout.splitlines()[-1])


def compile_for(*words: str) -> None:
    command = [sys.executable, "-W", "ignore", "benchmarks/aot.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "failures: 0"


@needs_triton
def test_kernels_compile_for_hopper():
    """No spills, at most 48 KB of shared memory, matrix instructions: for the shapes of the default model."""
    compile_for("--targets", "sm_90", "--cases", "SmolLM2 decode", "SmolLM2 chunks")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_for(target):
    compile_for("--targets", target)
