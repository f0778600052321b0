"""benchmarks.validate_sim: what is counted as agreement, and the whole way on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import validate_sim
from benchmarks.validate_sim import Row, ranking, summary
from core.types import ConfigError


def row(policy: str, real: tuple[float, ...], simulated: float) -> Row:
    return Row(policy, "closed=4", "E2E p50", real, simulated, (0.0,) * len(real))


def test_pairs_are_ranked_only_where_the_real_runs_can_tell_them_apart() -> None:
    alike = [row("a", (1.0, 1.1), 1.0), row("b", (2.0, 2.1), 1.9)]
    otherwise = [row("a", (1.0, 1.1), 2.0), row("b", (2.0, 2.1), 1.9)]
    close = [row("a", (1.0, 2.05), 1.0), row("b", (2.0, 2.1), 0.5)]
    assert [ranking(pair) for pair in (alike, otherwise, close)] == [(1, 0, 0), (0, 1, 0), (0, 0, 1)]


def test_errors_are_against_the_mean_of_the_real_runs_and_the_spread_stands_beside_them() -> None:
    found = summary([row("a", (1.0, 1.0), 1.04), row("b", (2.0, 4.0), 2.7)])
    assert found["worst_error"] == pytest.approx(0.1) and found["worst_spread"] == pytest.approx(1.0)
    assert (found["within_5_percent"], found["within_9_percent"]) == (0.5, 0.5)


def test_one_real_run_and_a_load_of_no_kind_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert validate_sim.main(["--repeat", "1"]) == 2
    assert "allowed is a number from 2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="give closed=N or rate=R"):
        validate_sim.load_overrides("open")


def test_a_tiny_model_is_served_calibrated_and_simulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Both policies, two real runs each, one simulation each; the calibration made between them speaks for the runs."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    words = ["model=tiny", "num_threads=1", "cache.swap_gb=0.001", "workload.num_requests=6", "kernel=torch"]
    policies = ["--policy", "chunked:", "--policy", "small:scheduler.max_chunk=16"]
    out = tmp_path / "found.json"
    arguments = [*policies, "--load", "closed=3", "--warm-up", "2", "--others", "1.0", "--json", str(out), *words]
    assert validate_sim.main(arguments) == 0
    found = json.loads(out.read_text())
    assert found["all"]["figures"] == len(found["rows"]) == 2 * len(validate_sim.FIGURES)
    assert all(len(each["real"]) == 2 and min(each["real"]) > 0 < each["simulated"] for each in found["rows"])
    assert "real engine against simulator" in capsys.readouterr().out
    assert not list(tmp_path.rglob("tiny-float32.json"))  # the kept calibration is nobody's business here
    assert validate_sim.main([*arguments, "--kept"]) == 2
    assert "has not been measured" in capsys.readouterr().err
