"""``python -m core.serve`` as a person meets it: output, files left behind, exit codes."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from core.serve import main
from tests.dists import HEADER, add_dist, offers

ROOT = Path(__file__).resolve().parents[2]
TOY = ["executor=toy", "frontend=replay", "frontend.progress=false", "workload.num_requests=4", "cache.num_blocks=64"]


FAULTY = """
class Faulty:
    def __init__(self, **fields):
        pass

    @hookimpl
    def plan_step(self, view):
        raise ValueError("bug")
"""


def environment(tmp_path, *paths):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, paths)]),
        "QUIRE_CACHE": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def serve(tmp_path, *words, paths=(), cwd=None):
    cwd = cwd or tmp_path / "cwd"
    cwd.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "core.serve", *words],
        cwd=cwd,
        env=environment(tmp_path, *paths),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """For commands run inside this process: its own current folder and cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def only(pattern, folder):
    found = list(folder.glob(pattern))
    assert len(found) == 1, found
    return found[0]


# ------------------------------------------------------------------------------------------------ help


def test_help_lists_everything_quickly_and_without_torch(tmp_path):
    site = tmp_path / "site"
    add_dist(site, "fine", offers("allocator", "fine", "fine.X", "costs $5"), version="0.4")
    add_dist(site, "bad", HEADER + "import torch\nraise ImportError('gone')\n")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    started = time.perf_counter()
    done = serve(tmp_path, "--help", paths=[site])
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 10  # 0.5 s on an idle machine
    assert "allocator=paged" in done.stdout and "observers=[recorder]" in done.stdout
    assert "costs $5  [fine 0.4]" in done.stdout
    assert "! broken: bad 1.0 (entry point bad): SystemExit: torch was imported" in done.stdout
    assert "block_size: 16" in done.stdout
    assert not list((tmp_path / "cwd").iterdir())


# ------------------------------------------------------------------------------------------------ one run


def test_replay_writes_its_result_with_a_manifest(tmp_path):
    done = serve(tmp_path, *TOY, "observers=[recorder]")
    assert done.returncode == 0, done.stderr
    for line in ("allocator=paged  [quire", "KV pool: 64 blocks of 16 = 1024 tokens", "(measured)"):
        assert line in done.stdout
    folder = only("outputs/*/*", tmp_path / "cwd")
    assert (folder / "decisions.jsonl").exists()
    record = json.loads((folder / "result.json").read_text())
    assert record["status"] == "ok" and record["requests"]["finished"] == 4
    manifest = record["manifest"]
    assert [policy["option"] for policy in manifest["policies"]] == [
        "allocator=paged",
        "scheduler=chunked",
        "predictor=declared",
        "admission=open",
        "preemption=breakeven",
        "idle=breakeven",
    ]
    assert manifest["observers"][0]["option"] == "observers=recorder"
    assert manifest["wrappers"]["plan_step"] == ["quire 0.1.0: observers=recorder"]
    assert manifest["cost"]["link_bytes_per_s"]["from"] == "measured"
    assert manifest["config"]["cache"]["num_blocks"] == 64 and manifest["config"]["choices"]["executor"] == "toy"
    assert manifest["limits"]["max_model_len"] == 1024 and manifest["python"] and manifest["quire"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["allocator=pagd"], "error: allocator=pagd: no such option (did you mean paged?); allowed:"),
        (["scheduler.watermark=-1"], "error: scheduler.watermark=-1: 'watermark' must be >= 0"),
        (
            ["scheduler.watermrk=1"],
            "error: scheduler.watermrk: scheduler has no field watermrk (did you mean watermark?)",
        ),
        (["seed=x"], "error: seed='x': allowed is a whole number from 0"),
        (["max_model_len=5000"], "error: max_model_len=5000: toy was made for 4096 tokens at most"),
        (["max_model_len=2000"], "error: max_model_len=2000: the pool has 64 blocks of 16 = 1024 tokens"),
        (["cache.swap_gb=inf"], "error: cache.swap_gb=inf: allowed is a finite number"),
        (["allocator._target_=os.system"], "may not be built"),
        (["workload.num_requests=-1"], "workload.num_requests must be an integer of at least 1, got -1"),
        (["-m", "allocator=paged,slob"], "error: allocator=slob: no such option"),
        (["-m", "frontend=replay,http"], "error: http cannot be swept; use frontend=replay"),
        (["--config-dir", "nowhere"], "nowhere' not found"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(here, capfd, words, message):
    assert main([*TOY, *words]) == 2
    errors = capfd.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and message in errors[0]
    assert not list(here.glob("**/result.json"))


def test_a_flag_for_an_option_is_told_how_options_are_written(here, capfd):
    assert main(["--port", "8080"]) == 2
    assert capfd.readouterr().err.splitlines()[-2:] == [
        "quire: error: unrecognized arguments: --port",
        "options are name=value, without dashes: frontend.port=8080; --help lists them",
    ]


def test_a_broken_yaml_is_one_line_with_its_place(here, capfd):
    (here / "my" / "scheduler").mkdir(parents=True)
    (here / "my" / "scheduler" / "mine.yaml").write_text("_target_: mine.Mine\na: [1\n")
    assert main([*TOY, "--config-dir", "my", "scheduler=mine"]) == 2
    errors = capfd.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and 'scheduler/mine.yaml", line 2' in errors[0]


def test_help_lists_the_experiments(here, capfd):
    assert main(["--help"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  experiment=")]
    assert len(lines) == len(list((ROOT / "conf/experiment").glob("*.yaml")))
    assert all(len(line) <= 100 and len(line.split()) > 3 for line in lines)


def test_a_sweep_ends_with_its_jobs_beside_one_another(here, capfd):
    assert main([*TOY, "-m", "preemption=swap,recompute"]) == 0
    lines = capfd.readouterr().out.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("preemption") and "TTFT p50" in line)
    assert [line.split()[0] for line in lines[heading + 1 : heading + 3]] == ["swap", "recompute"]
    assert "noise" in lines[heading + 3], "the toy's clock is real unless it is given step_seconds"
    assert lines[heading + 4].startswith("2 jobs, 0 failed")


def test_http_cannot_be_swept(here, capfd):
    assert main(["executor=toy", "-m", "seed=0,1"]) == 2
    assert capfd.readouterr().err == "error: http cannot be swept; use frontend=replay\n"
    assert not list(here.glob("**/result.json"))


def test_a_plugins_fault_is_exit_code_1_and_names_it(tmp_path):
    site = tmp_path / "site"
    add_dist(site, "faulty", offers("scheduler", "faulty", "faulty.Faulty") + FAULTY)
    done = serve(tmp_path, *TOY, "scheduler._target_=faulty.Faulty", paths=[site])
    assert done.returncode == 1
    assert "faulty 1.0: scheduler=chunked plan_step: ValueError: bug" in done.stderr
    record = json.loads(only("outputs/*/*/result.json", tmp_path / "cwd").read_text())
    assert record["status"] == "failed"


def test_a_broken_plugin_is_warned_about_and_a_clash_stops(tmp_path):
    site, more = tmp_path / "site", tmp_path / "more"
    add_dist(site, "bad", HEADER + "raise ImportError('gone')\n")
    done = serve(tmp_path, *TOY, paths=[site])
    assert done.returncode == 0 and "warning: plugin not loaded: bad 1.0" in done.stderr
    add_dist(more, "one", offers("allocator", "mine", "one.X"))
    add_dist(more, "two", offers("allocator", "mine", "two.X"))
    done = serve(tmp_path, *TOY, paths=[more])
    assert done.returncode == 2 and "allocator=mine is given by both one 1.0 and two 1.0" in done.stderr
    assert "Traceback" not in done.stderr


def test_choosing_an_option_of_a_broken_plugin_says_why(tmp_path):
    add_dist(tmp_path / "site", "bad", HEADER + "raise ImportError('gone')\n")
    done = serve(tmp_path, *TOY, "allocator=bad", paths=[tmp_path / "site"])
    assert done.returncode == 2
    assert (
        "allocator=bad: no such option" in done.stderr
        and "broken: bad 1.0 (entry point bad): ImportError: gone" in done.stderr
    )


def test_two_minute_trial_without_a_package(tmp_path):
    cwd = tmp_path / "cwd"
    (cwd / "my" / "allocator").mkdir(parents=True)
    (cwd / "my" / "allocator" / "mine.yaml").write_text("_target_: mine.Mine\n")
    (cwd / "mine.py").write_text(
        "from plugins.allocators.paged import PagedAllocator\n\nclass Mine(PagedAllocator):\n    pass\n"
    )
    done = serve(tmp_path, "--config-dir", "my", *TOY, "allocator=mine", "trust=[mine]")
    assert done.returncode == 0, done.stderr
    assert "allocator=mine  [module mine unpackaged]" in done.stdout
    done = serve(tmp_path, "--config-dir", "my", *TOY, "allocator=mine")
    assert done.returncode == 2 and "trust=[its_name]" in done.stderr


def test_config_can_be_shown_without_running(here, capfd):
    assert main([*TOY, "--cfg", "job", "-p", "cache"]) == 0
    assert "num_blocks: 64" in capfd.readouterr().out


# ------------------------------------------------------------------------------------------------ http


def test_http_answers_leaves_nothing_here_and_ends_with_0(tmp_path):
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "core.serve", "executor=toy", "frontend.port=0", "cache.num_blocks=64"],
        cwd=cwd,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        address = next(line.split()[-1] for line in process.stdout if line.startswith("serving "))
        with urllib.request.urlopen(f"{address}/health", timeout=10) as answer:
            assert answer.status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert not list(cwd.iterdir())
    assert only("cache/runs/*/*", tmp_path).is_dir()


# ------------------------------------------------------------------------------------------------ signals before it serves

LOADS_LONG = """
import attrs, tempfile, time
from core.executors.toy import ToyExecutor

@attrs.define(eq=False)
class Slow(ToyExecutor):
    def load(self):
        with tempfile.TemporaryDirectory(dir="."), tempfile.NamedTemporaryFile():
            print("it loads", flush=True)
            time.sleep(60)
        return super().load()
"""
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def interrupted(tmp_path, number, words, after_line=None, after_s=0.0, **changes):
    """A command that gets a signal behind a line of its output or after a time: its exit code, output, and seconds to its end."""
    cwd, temp = tmp_path / "cwd", tmp_path / "temp"
    for folder in (cwd, temp):
        folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "core.serve", *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**environment(tmp_path, tmp_path), "TMPDIR": str(temp), **changes},
    )  # fmt: skip
    said = ""
    try:
        if after_line is not None:
            said = "".join(iter(process.stdout.readline, after_line + "\n"))
        time.sleep(after_s)
        process.send_signal(number)
        started = time.monotonic()
        rest, _ = process.communicate(timeout=30)
        took = time.monotonic() - started
    finally:
        process.kill()
        process.communicate()
    assert not list(temp.iterdir()), "it leaves no temporary files"
    assert not list(cwd.rglob("*")), "and nothing here"
    assert not list(tmp_path.rglob("*.partial-*"))
    return process.returncode, said + rest, took


@pytest.mark.parametrize("number", CODES)
def test_a_signal_while_the_model_loads_ends_it_at_once(tmp_path, number):
    (tmp_path / "slow.py").write_text(LOADS_LONG)
    (tmp_path / "conf" / "executor").mkdir(parents=True)
    (tmp_path / "conf" / "executor" / "slow.yaml").write_text("_target_: slow.Slow\n")
    words = ["--config-dir", str(tmp_path / "conf"), "trust=[slow]", "executor=slow", "frontend.port=0"]
    code, said, took = interrupted(tmp_path, number, words, after_line="it loads")
    assert code == CODES[number], said
    assert took < 5, "not the minute that the model would take"
    assert "Traceback" not in said and "rror" not in said


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.6, 0.9, 1.3, 1.8, 2.5, 3.5])
@pytest.mark.parametrize("number", CODES)
def test_a_signal_at_any_time_before_it_serves_ends_it(tmp_path, number, after_s):
    """A real model, wherever the start is: imports, weights, kernels, warm-up; or just after, when it serves."""
    code, said, took = interrupted(tmp_path, number, ["model=tiny", "frontend.port=0"], after_s=after_s)
    assert code == (0 if "serving " in said else CODES[number]), said
    assert took < 10
    assert "Traceback" not in said


# ------------------------------------------------------------------------------------------------ sweeps


def test_a_sweep_writes_numbered_folders_and_a_summary(here, capfd):
    assert main(["-m", *TOY, "preemption=recompute,swap", "seed=0,1"]) == 0
    sweep = only("multirun/*/*", here)
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1", "2", "3"]
    rows = read_csv(sweep / "summary.csv")
    assert [(row["job"], row["preemption"], row["seed"]) for row in rows] == [
        ("0", "recompute", "0"),
        ("1", "recompute", "1"),
        ("2", "swap", "0"),
        ("3", "swap", "1"),
    ]
    assert {row["status"] for row in rows} == {"ok"} and float(rows[0]["ttft_s.mean"]) > 0
    columns = list(rows[0])
    assert columns.index("seed") < columns.index("status")
    records = json.loads((sweep / "summary.json").read_text())
    assert len(records) == 4 and records[3]["manifest"]["config"]["choices"]["preemption"] == "swap"
    assert "4 jobs, 0 failed" in capfd.readouterr().out


def test_a_failed_job_is_in_the_summary_and_the_exit_code(here, capfd):
    assert main(["-m", *TOY, "scheduler.watermark=0.1,-1,0.2"]) == 3
    sweep = only("multirun/*/*", here)
    rows = read_csv(sweep / "summary.csv")
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert "scheduler.watermark=-1" in rows[1]["error"]
    captured = capfd.readouterr()
    assert "3 jobs, 1 failed" in captured.out and "failed: ConfigError: scheduler.watermark=-1" in captured.err


def test_a_job_gives_the_same_in_a_sweep_and_alone(here, capfd):
    """A, B, A in one process, and A by itself: equal figures on the virtual clock, so no state leaks between jobs."""
    words = [*TOY, "executor.step_seconds=0.5"]
    assert main(["-m", *words, "preemption=recompute,swap,recompute", "cache.num_blocks=20"]) == 0
    assert main([*words, "preemption=recompute", "cache.num_blocks=20"]) == 0
    sweep = json.loads((only("multirun/*/*", here) / "summary.json").read_text())
    alone = json.loads(only("outputs/*/*/result.json", here).read_text())
    for record in (*sweep, alone):
        for key in ("job", "overrides", "manifest", "stage_seconds"):
            record.pop(key, None)
    assert sweep[0] == sweep[2] == alone


RUDE = """
import builtins, logging, random
import attrs, numpy
from prometheus_client import REGISTRY, Counter
from plugins.schedulers.chunked import ChunkedScheduler
from core.hookspecs import hookimpl

@attrs.define(eq=False)
class Rude(ChunkedScheduler):
    @hookimpl
    def setup(self, engine_info):
        random.seed(1), numpy.random.seed(1)
        logging.getLogger().addHandler(logging.NullHandler())
        logging.getLogger("core").setLevel(logging.CRITICAL)
        if not hasattr(builtins, "rude_counter"):
            builtins.rude_counter = Counter("vllm:prompt_tokens", "taken by a rude plugin")
    @hookimpl
    def plan_step(self, view):
        random.random(), numpy.random.random()
        if view.now > 6:
            raise ValueError("rude to the end")
        return ChunkedScheduler.plan_step(self, view)
"""


def test_a_job_behind_a_rude_one_that_fails_gives_what_it_gives_alone(tmp_path):
    """The first job of a sweep seeds the global generators, adds handlers, takes metric names, and fails half-way."""
    (tmp_path / "rude.py").write_text(RUDE)
    (tmp_path / "conf" / "scheduler").mkdir(parents=True)
    (tmp_path / "conf" / "scheduler" / "rude.yaml").write_text(
        "_target_: rude.Rude\nwatermark: 0.01\nmax_chunk: null\n"
    )
    words = [*TOY, "executor.step_seconds=0.5", "--config-dir", str(tmp_path / "conf"), "trust=[rude]"]
    words += ["workload.output_tokens=30", "executor.vocab_size=320"]
    swept = serve(
        tmp_path, "-m", *words, "scheduler=rude,chunked,fcfs", "max_num_batched_tokens=4096", paths=[tmp_path]
    )
    assert swept.returncode == 3, swept.stderr
    jobs = json.loads((only("multirun/*/*", tmp_path / "cwd") / "summary.json").read_text())
    assert [job["status"] for job in jobs] == ["failed", "ok", "ok"] and "rude to the end" in jobs[0]["error"]
    for job, scheduler in zip(jobs[1:], ("chunked", "fcfs"), strict=True):
        folder = tmp_path / scheduler
        single = serve(
            tmp_path, *words, f"scheduler={scheduler}", "max_num_batched_tokens=4096", paths=[tmp_path], cwd=folder
        )
        assert single.returncode == 0, single.stderr
        alone = json.loads(only("outputs/*/*/result.json", folder).read_text())
        for record in (job, alone):
            for key in ("job", "overrides", "manifest", "stage_seconds"):
                record.pop(key, None)
        assert job == alone


def test_launchers_can_send_the_task_by_reference():
    from core import app

    assert pickle.loads(pickle.dumps(app.task)) is app.task


def test_ctrl_c_keeps_what_was_measured_and_ends_the_sweep(here, monkeypatch):
    from core.frontends.replay import ReplayFrontend

    monkeypatch.setattr(ReplayFrontend, "run", lambda self, started: {"status": "aborted"})
    assert main(TOY) == 130
    assert json.loads(only("outputs/*/*/result.json", here).read_text()) == {"status": "aborted"}
    assert main(["-m", *TOY, "seed=0,1"]) == 130
    assert [path.name for path in here.glob("multirun/*/*/*") if path.is_dir()] == ["0"]
