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
from core.fit import Point, curves, errors, fit, nnls
from core.machines import Company, Local, calibrated, calibration_path, read_calibration, write_json
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
    head_curve=[[1, 10e9], [32, 90e9]],
)
TRUTH = attrs.evolve(
    BARE,
    step_overhead_s=2e-3,
    sequence_overhead_s=3e-4,
    token_overhead_s=2e-5,
    attention_bytes_per_s=6e9,
    attention_flop_per_s=40e9,
)


FITTED = (
    "step_overhead_s",
    "sequence_overhead_s",
    "token_overhead_s",
    "attention_bytes_per_s",
    "attention_flop_per_s",
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
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert errors(SHAPE, found, points)["worst"] < 1e-6


def alone_on(machine: Machine, bump_s: dict[int, float]) -> list[Point]:
    """Steps without attention: r tokens of one sequence, then r sequences of one token, then one token that is not sampled;
    ``bump_s`` is added at so many tokens.
    """
    model, points = StepModel(SHAPE, machine), []
    for parts in [[(0, r)] for r in calibrate.ROWS] + [[(0, 1)] * r for r in calibrate.HEAD_ROWS if r > 1]:
        work = Work()
        for i, (begin, end) in enumerate(parts):
            work.add(begin, end, sampled=i < len(parts))
        phases = model.phases(work)
        points.append(Point(work, phases.linear + phases.head + bump_s.get(work.tokens, 0.0)))
    work = Work()
    work.add(0, 1, sampled=False)
    return [*points, Point(work, model.phases(work).linear + bump_s.get(1, 0.0))]


def stepped_machine() -> Machine:
    """Layers whose seconds are flat, jump and rise, a head of another shape and faster than its bytes: neither is max(bytes, FLOP)."""
    head_s = SHAPE.head_parameters * 4 / BARE.bandwidth_bytes_per_s / 3
    layers = {r: 0.020 + (0.004 if r > 3 else 0.0) + 0.0006 * r for r in calibrate.ROWS}
    heads = {r: head_s + 0.0002 * (r - 1) for r in calibrate.HEAD_ROWS}
    return attrs.evolve(
        BARE,
        linear_curve=[(r, 2 * SHAPE.body_parameters * r / s) for r, s in layers.items()],
        head_curve=[(r, 2 * SHAPE.head_parameters * r / s) for r, s in heads.items()],
    )


def test_curves_give_back_the_layers_and_the_head_that_made_the_steps() -> None:
    truth = stepped_machine()
    linear, head = curves(SHAPE, alone_on(truth, {}))
    assert np.allclose(linear, truth.linear_curve, rtol=1e-9) and np.allclose(head, truth.head_curve, rtol=1e-9)


def test_more_rows_never_take_less_time_and_between_two_of_them_seconds_lie_on_a_line() -> None:
    truth = stepped_machine()
    linear, _ = curves(SHAPE, alone_on(truth, {2: 0.008}))  # a slow moment at 2 rows
    seconds = [rows / rate for rows, rate in linear]
    assert seconds == sorted(seconds)
    machine = attrs.evolve(BARE, linear_curve=[[4, 4.0], [8, 2.0], [16, 8.0]])  # 1 s, 4 s, 2 s
    assert [n / machine.linear_rate(n) for n in (2, 4, 6, 8, 12, 32)] == pytest.approx([0.5, 1.0, 2.5, 4.0, 3.0, 4.0])


def test_a_calibrated_machine_foresees_steps_it_was_not_fitted_to() -> None:
    """The whole fit against a machine that has its own laws, on decodes, chunks and mixed steps of other sizes than the plan's."""
    truth = attrs.evolve(stepped_machine(), **{n: getattr(TRUTH, n) for n in FITTED})
    linear, head = curves(SHAPE, alone_on(truth, {}))
    found = fit(SHAPE, attrs.evolve(BARE, linear_curve=linear, head_curve=head), steps_of(truth))
    others = []
    for parts in ([(99, 100)] * 5, [(300, 301)] * 10, [(0, 144)], [(64, 128)], [(99, 100)] * 9 + [(0, 70)]):
        work = Work()
        for begin, end in parts:
            work.add(begin, end, sampled=True)
        others.append(Point(work, StepModel(SHAPE, truth).seconds(work)))
    assert errors(SHAPE, found, others)["worst"] < 1e-6


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
    ["", "[]", '{"format": 3}', '{"format": 9}', '{"format": 3, "machine": {"name": "x"}, "setup": {}, "fit": {}}'],
)
def test_a_file_that_cannot_be_used_is_named_with_the_command(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x.json.*run: python -m core.calibrate"):
        Local(file=str(tmp_path / "x.json")).read()


def test_a_calibration_speaks_only_for_the_kernels_and_threads_it_was_made_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    chosen = "linears: q packed (packed 0.15 / onednn 0.2 ms), o onednn (packed inf / onednn 0.1 ms); merged"
    setup = {"kernels": {"case": "torch"}, "linears": chosen, "threads": 2, "block_bytes": 8_000_000}
    machine = attrs.evolve(TRUTH, move_overhead_s=1e-3)  # a block takes 1 ms on the link and 1 by itself
    path = calibration_path("m", "float32")
    write_json(path, {"format": 3, "machine": attrs.asdict(machine), "setup": setup, "fit": {"median": 0.0}})
    assert calibrated("m", "float32", setup) == (pytest.approx(4e9), 120e9)
    measured_again = "linears: q packed (packed 0.25 / onednn 0.3 ms), o onednn (packed 0.3 / onednn 0.1 ms); merged"
    assert calibrated("m", "float32", {**setup, "linears": measured_again}) is not None
    assert calibrated("m", "float32", {**setup, "linears": chosen.replace("q packed", "q onednn")}) is None
    assert calibrated("m", "float32", {**setup, "threads": 1}) is None
    assert calibrated("other", "float32", setup) is None
    differences = read_calibration(calibration_path("m", "float32")).differences({**setup, "threads": 1})
    assert differences == ["threads is 1, calibrated with 2"]
    path.write_text('{"format": 1}')  # of an older version: the engine starts all the same, and measures by itself
    assert calibrated("m", "float32", setup) is None


def test_what_others_used_is_what_was_busy_and_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Company().share()
    assert share is None or 0 <= share <= 1  # this machine's own figures
    ticks = iter([(100.0, 50.0, 20.0), (110.0, 57.0, 24.0), (200.0, 90.0, 60.0), (200.0, 90.0, 60.0)])
    monkeypatch.setattr(Company, "_ticks", staticmethod(lambda: next(ticks)))
    assert Company().share() == pytest.approx(0.3)  # of 10 s, 7 were busy and 4 of them ours
    assert Company().share() == 0.0  # no time has passed


def test_a_simulation_says_what_it_was_measured_with(tmp_path: Path) -> None:
    setup = {
        "model": SHAPE.name,
        "dtype": "float32",
        "kernels": {"case": "torch"},
        "linears": "linears: plain",
        "threads": 2,
    }
    record = {"format": 3, "machine": attrs.asdict(TRUTH), "setup": setup, "fit": {"median": 0.0}}
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
    assert kept["setup"]["threads"] == 1 and kept["machine"]["linear_curve"] and kept["machine"]["head_curve"]
    assert calibrate.main(["--show"]) == 0
    started = start(
        compose(["executor=roofline", "machine=local", "machine.model=tiny", "model=tiny", "cache.num_blocks=64"]),
        say=lambda line: None,
    )
    assert started.engine.executor.describe()["machine"]["linear_curve"]
