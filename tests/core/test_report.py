"""``python -m core.report`` and the table at a sweep's end: what differs, the figures, what the times are worth, pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from core import report
from core.metrics import Metrics
from core.plot import draw
from core.types import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def record(clock="virtual", **figures):
    """A job's record with nothing measured but these dotted figures."""
    made = {"status": "ok", **Metrics().summary(), "manifest": {"executor": {"clock": clock}}}
    for key, value in figures.items():
        *path, last = key.split("__")
        node = made
        for name in path:
            node = node[name]
        node[last] = value
    return made


def job(number, overrides, **figures):
    return report.to_job(record(**figures), str(number), overrides)


@pytest.fixture
def jobs():
    grid = [(rate, name) for rate in (2, 32) for name in ("fcfs", "sjf")]
    return [
        job(
            i, ["executor=toy", f"workload.arrivals.rate_per_s={rate}", f"scheduler={name}"],
            ttft_s__p90=0.01 * rate + 0.002 * i, output_tokens_per_s=1234.5, kv__used_of_pool__mean=0.5,
            preemptions__swap=i,
        )
        for i, (rate, name) in enumerate(grid)
    ]  # fmt: skip


def write(folder: Path, records) -> Path:
    rows = [{"job": str(i), "overrides": words, **made} for i, (words, made) in enumerate(records)]
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(rows))
    return folder


def test_columns_are_what_the_jobs_differ_in_and_figures_in_units(jobs) -> None:
    heading, first, *_, last = report.cells(jobs, report.default_figures(jobs))
    assert heading == ["rate_per_s", "scheduler", "tokens/s", "preempted", "TTFT p90", "pool used"]
    assert first == ["2", "fcfs", "1,234", "0", "20 ms", "50.0 %"] and last[:2] == ["32", "sjf"] and last[3] == "3"


def test_fields_that_end_alike_keep_their_whole_name() -> None:
    assert report.short_names(["a.seed", "b.seed", "cache.num_blocks"]) == ["a.seed", "b.seed", "num_blocks"]


def test_a_failed_job_keeps_its_row(jobs) -> None:
    failed = report.to_job({"status": "failed", "error": "x"}, "9", ["executor=toy", "scheduler=mine"])
    assert report.cells([*jobs, failed], ["ttft_s.p90"])[-1] == ["-", "mine", "failed"]


def test_what_did_not_finish_is_shown_when_there_is_any(jobs) -> None:
    assert "not_finished" not in report.default_figures(jobs)
    assert "not_finished" in report.default_figures([*jobs, job(7, [], requests__refused=2)])


def test_times_say_which_clock_they_are_of(jobs) -> None:
    assert "virtual" in report.note(jobs)
    assert "virtual" in report.note([job(7, [], clock="virtual, 0.01 s a step")])
    assert "virtual" in report.note([*jobs, report.to_job({"status": "failed"}, "9", [])]), "it has no times"
    assert "noise" in report.note([*jobs, job(7, [], clock="wall")])


def test_the_command_takes_the_newest_sweep(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "multirun/day/time", [(["scheduler=a"], record(ttft_s__p50=1.5)), (["scheduler=b"], record())])
    assert report.main(["--figures", "ttft_s.p50", "--markdown"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| scheduler | TTFT p50 |", "| --- | --- |", "| a | 1.5 s |", "| b | - |",
    ]  # fmt: skip
    assert report.main(["--plot", "ttft_s.p50"]) == 0
    assert Path(capsys.readouterr().out.strip()) == Path("multirun/day/time/ttft_s.p50.svg")


@pytest.mark.parametrize(
    "words, says",
    [
        (["nowhere"], "nowhere: no summary.json in it"),
        ([], "no sweep has ended under multirun/"),
        (["sweep", "--figures", "ttft_p90"], r"ttft_p90: no such figure (did you mean ttft_s.p90?)"),
        (["sweep", "--figures", "tpot"], "allowed: tpot_s.mean, tpot_s.p50"),
        (["sweep", "--plot", "ttft_s.p90"], "ttft_s.p90: no job of this sweep has a number there"),
        (["sweep", "--plot", "steps", "--x", "seed"], "--x seed: the jobs do not differ in it; allowed: scheduler"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, words, says) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sweep", [(["scheduler=a"], record()), (["scheduler=b"], record())])
    assert report.main(words) == 2
    assert says in capsys.readouterr().err


def test_numbers_become_lines_over_a_logarithmic_axis_where_they_are_wide(jobs) -> None:
    picture = ET.fromstring(draw(jobs, "ttft_s.p90"))
    words = [each.text for each in picture.iter(f"{SVG}text")]
    assert {"fcfs", "sjf", "2", "32", "workload.arrivals.rate_per_s", "TTFT p90  (ttft_s.p90)"} <= set(words)
    points = list(picture.iter(f"{SVG}circle"))
    assert len(points) == 4 and points[0][0].text == "fcfs workload.arrivals.rate_per_s=2: 20 ms"
    higher = [float(point.get("cy")) for point in points]
    assert higher[0] > higher[1] and higher[2] > higher[3], "a larger rate took longer"


def test_names_become_bars_as_long_as_their_figures(jobs) -> None:
    picture = ET.fromstring(draw(jobs[2:], "ttft_s.p90"))
    bars = [float(each.get("width")) for each in picture.iter(f"{SVG}rect")][1:]
    assert bars[0] / bars[1] == pytest.approx(0.324 / 0.326, rel=1e-3)


def test_a_figure_that_some_jobs_lack_is_said(jobs) -> None:
    assert "1 of 5 jobs have no such figure" in draw([*jobs, job(9, ["scheduler=x"])], "ttft_s.p90")


def test_all_zero_and_single_jobs_can_be_drawn() -> None:
    ET.fromstring(draw([job(0, ["seed=1"], ttft_s__p90=0.0), job(1, ["seed=2"], ttft_s__p90=0.0)], "ttft_s.p90"))
    ET.fromstring(draw([job(0, ["seed=1"], ttft_s__p90=0.1)], "ttft_s.p90"))


def test_a_label_cannot_break_the_picture() -> None:
    ET.fromstring(draw([job(i, [f"scheduler=<{i}&"], ttft_s__p90=0.1) for i in range(2)], "ttft_s.p90"))


def test_seeds_are_merged_to_a_mean_with_its_interval() -> None:
    runs = [
        job(i, [f"seed={seed}", f"scheduler={name}"], ttft_s__p90=seconds, tpot_s__p90=0.5)
        for i, (seed, name, seconds) in enumerate([(0, "a", 1.0), (1, "a", 3.0), (0, "b", 5.0), (1, "b", 5.0)])
    ]
    merged = report.merge(runs, "seed")
    assert report.cells(merged, ["ttft_s.p90"]) == [
        ["scheduler", "TTFT p90"], ["a", "2 s ± 12.7 s"], ["b", "5 s ± 0 s"],
    ]  # fmt: skip
    ET.fromstring(draw(merged, "ttft_s.p90"))
    with pytest.raises(ConfigError, match="--over x: the jobs do not differ in it; allowed: seed, scheduler"):
        report.merge(runs, "x")
    failed = report.to_job({"status": "failed"}, "9", ["seed=2", "scheduler=a"])
    assert report.cells(report.merge([*runs, failed], "seed"), ["ttft_s.p90"])[1] == ["a", "failed"]


def test_a_line_shows_its_interval_within_the_frame() -> None:
    runs = [
        job(0, [f"seed={s}", f"cache.num_blocks={n}"], ttft_s__p90=0.1 * n * (1 + s)) for s in (0, 1) for n in (1, 2)
    ]
    picture = ET.fromstring(draw(report.merge(runs, "seed"), "ttft_s.p90"))
    bars = [each.get("d") for each in picture.iter(f"{SVG}path") if each.get("stroke-width") == "1.5"]
    assert len(bars) == 2 and all(64 <= float(each.rpartition(" ")[2]) <= 384 for each in bars)


def test_more_than_one_figure_is_refused_for_a_picture(jobs) -> None:
    with pytest.raises(ConfigError, match="no such figure"):
        report.check_figures(jobs, ["ttft_s.p50,ttft_s.p90"])
