"""The soak and the benchmark of HTTP: a minute of the first in the slow set, the smallest run of the second in the fast one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def said_by(*words: str, seconds: float) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_minute_of_random_clients_leaves_nothing() -> None:
    assert said_by("tests.soak", "--minutes", "1", seconds=170).endswith("\n0 faults\n")


def test_the_benchmark_of_http_serves_everything_both_ways() -> None:
    said = said_by(
        "benchmarks.serving", "--model", "toy", "--requests", "4", "--tokens", "8", "--repeat", "1", seconds=60
    )
    assert re.search(r"^http_share: -?\d+\.\d+$", said, re.MULTILINE)
