"""Calibration: the fit recovers what made the steps, a file is read or refused with the command, a small model goes all the way."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest

from core import calibrate
from core.arithmetic import Machine, StepModel, Work
from core.config import compose
from core.fit import Point, errors, fit, nnls
from core.machines import Local, calibrated, calibration_path, read_calibration, write_json
from core.sources import SmolLM2
from core.start import start
from core.types import ConfigError

SHAPE = SmolLM2().shape("float32")
BARE = Machine(
    name="bare",
    memory_gb=16.0,
    bandwidth_bytes_per_s=20e9,
    flop_per_s=150e9,
    prefill_efficiency=0.8,
    link_bytes_per_s=8e9,
    linear_curve=[[1, 8e9], [8, 60e9], [128, 120e9]],
)
TRUTH = attrs.evolve(
    BARE,
    step_overhead_s=2e-3,
    sequence_overhead_s=3e-4,
    token_overhead_s=2e-5,
    attention_bytes_per_s=6e9,
    attention_flop_per_s=40e9,
)


def steps_of(machine: Machine, noise: float = 0.0) -> list[Point]:
    model, rng, points = StepModel(SHAPE, machine), np.random.default_rng(1), []
    for parts in calibrate.plan(8192, 16384):
        work = Work()
        for begin, end in parts:
            work.add(begin, end, sampled=True)
        points.append(Point(work, model.seconds(work) * (1 + noise * rng.standard_normal())))
    return points


def test_the_fit_finds_the_machine_that_made_the_steps() -> None:
    points = steps_of(TRUTH)
    found = fit(SHAPE, BARE, points)
    for name in (
        "step_overhead_s",
        "sequence_overhead_s",
        "token_overhead_s",
        "attention_bytes_per_s",
        "attention_flop_per_s",
    ):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert errors(SHAPE, found, points)["worst"] < 1e-6


def test_noise_of_five_percent_leaves_an_error_of_about_that_and_nothing_negative() -> None:
    points = steps_of(TRUTH, noise=0.05)
    found = fit(SHAPE, BARE, points)
    assert errors(SHAPE, found, points)["median"] < 0.06
    assert min(found.step_overhead_s, found.sequence_overhead_s, found.token_overhead_s) >= 0


def test_what_would_be_negative_becomes_zero_and_the_rest_fits_as_well_as_it_can() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix, wanted = rng.standard_normal((12, 4)), rng.standard_normal(12)
        x = nnls(matrix, wanted)
        gradient = matrix.T @ (matrix @ x - wanted)
        assert (x >= 0).all()  # the conditions of Karush, Kuhn and Tucker, which make it the optimum
        assert (gradient > -1e-9).all() and np.allclose(gradient * x, 0, atol=1e-9)


def test_without_a_calibration_the_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"has not been measured .* run: python -m core.calibrate"):
        start(compose(["executor=roofline", "machine=local"]), say=lambda line: None)
    assert calibrate.main(["--show"]) == 2


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 1}', '{"format": 9}', '{"format": 1, "machine": {"name": "x"}, "setup": {}, "fit": {}}'],
)
def test_a_file_that_cannot_be_used_is_named_with_the_command(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x.json.*run: python -m core.calibrate"):
        Local(file=str(tmp_path / "x.json")).read()


def test_a_calibration_speaks_only_for_the_kernels_and_threads_it_was_made_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    setup = {"model": "m", "dtype": "float32", "kernels": {"case": "torch"}, "linears": "none", "threads": 2}
    record = {"format": 1, "machine": attrs.asdict(TRUTH), "setup": setup, "fit": {"median": 0.0}}
    write_json(calibration_path("m", "float32"), record)
    assert calibrated("m", "float32", setup) == (8e9, 120e9)
    assert calibrated("m", "float32", {**setup, "threads": 1}) is None
    assert calibrated("other", "float32", setup) is None
    differences = read_calibration(calibration_path("m", "float32")).differences({**setup, "threads": 1})
    assert differences == ["threads is 1, calibrated with 2"]


def test_a_simulation_says_what_it_was_measured_with(tmp_path: Path) -> None:
    setup = {
        "model": SHAPE.name,
        "dtype": "float32",
        "kernels": {"case": "torch"},
        "linears": "linears: plain",
        "threads": 2,
    }
    record = {"format": 1, "machine": attrs.asdict(TRUTH), "setup": setup, "fit": {"median": 0.0}}
    write_json(tmp_path / "m.json", record)
    words = ["executor=roofline", "machine=local", f"machine.file={tmp_path / 'm.json'}", "cache.num_blocks=64"]
    started = start(compose(words), say=lambda line: None)
    assert "calibrated with kernel torch; linears: plain; 2 threads" in started.lines
    assert started.engine.model.dtype == "float32"
    other = start(compose([*words, "model=llama2-7b"]), say=lambda line: None)
    assert any("extrapolated" in line for line in other.lines)


def test_a_small_model_is_measured_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The whole way on the tiny model: steps run, the file is there, the table shows it, machine=local reads it."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    words = ["model=tiny", "num_threads=1", "cache.num_blocks=64", "cache.swap_gb=0.001", "max_num_seqs=16"]
    assert calibrate.main(["--rounds", "1", *words]) == 0
    assert "GFLOP/s" in capsys.readouterr().out
    kept = json.loads(calibration_path("tiny", "float32").read_text())
    assert kept["setup"]["threads"] == 1 and kept["machine"]["linear_curve"]
    assert calibrate.main(["--show"]) == 0
    started = start(
        compose(["executor=roofline", "machine=local", "machine.model=tiny", "model=tiny", "cache.num_blocks=64"]),
        say=lambda line: None,
    )
    assert started.engine.executor.describe()["machine"]["linear_curve"]
