"""frontend=replay on the toy model and a virtual clock: requests go in when due, come out whole, and are counted."""

import io
import json
import logging
import math
import os
import signal

import numpy as np
import pytest
from rich.console import Console

from core.config import compose, instantiate
from core.frontends.replay import ReplayFrontend, _take
from core.reports import check_record
from core.results import flatten, jsonable, table, write_result
from core.scratch import STAGES
from core.start import start
from core.types import ConfigError, PolicyError, SamplingParams
from core.workloads import WorkloadRequest
from core.workloads.synthetic import Synthetic

TOY = [
    "executor=toy",
    "frontend=replay",
    "executor.step_seconds=0.5",
    "cache.num_blocks=128",
    "cache.swap_gb=0.001",
    "checks=full",
]
RESULT_KEYS = [
    "status",
    "requests",
    "steps",
    "duration_s",
    "output_tokens",
    "output_tokens_per_s",
    "ttft_s",
    "ttft_terms_s",
    "tpot_s",
    "itl_s",
    "e2e_s",
    "service",
    "concurrency",
    "kv",
    "preemptions",
    "prefix",
    "forks",
    "stage_seconds",
    "manifest",
]
SPREAD = {"mean", "p50", "p90", "p99"}


class Fixed:
    """A workload that is a list of requests."""

    def __init__(self, requests, concurrency=None):
        self.concurrency, self.num_requests, self._requests = concurrency, len(requests), requests

    def requests(self, vocab_size, max_model_len):
        return iter(self._requests)


def a_request(arrival_s=None, num_prompt=4, num_output=3, **params):
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False, **params)
    return WorkloadRequest(prompt_token_ids=(7,) * num_prompt, params=params, arrival_s=arrival_s)


class Watched:
    """A started toy engine that keeps every report."""

    def __init__(self, overrides=()):
        self.config = compose([*TOY, *overrides])
        started = start(self.config)
        self.engine, self.manifest, self.reports = started.engine, started.manifest, []
        step = self.engine.step

        def keep():
            self.reports.append(step())
            return self.reports[-1]

        self.engine.step = keep

    @property
    def finished(self):
        return [f for report in self.reports for f in report.finished]


def run(workload=None, overrides=(), **options):
    """The record of a run, and the engine it ran on, which ends empty."""
    started = Watched(overrides)
    frontend = (
        instantiate(started.config.frontend, "frontend=replay")
        if workload is None
        else ReplayFrontend(workload, **options)
    )
    record = frontend.run(started)
    if started.engine.failure is None:
        started.engine.assert_idle()
    started.engine.close()
    return record, started


def test_result_keys_are_those_of_the_design(tmp_path):
    """result.json has exactly the promised keys, is strict JSON, and its leaves flatten to dotted columns."""
    record, _ = run()
    read = json.loads(write_result(record, tmp_path / "new").read_text(), parse_constant=pytest.fail)
    assert list(read) == RESULT_KEYS
    assert read["status"] == "ok"
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(read[name]) == SPREAD
    assert {name: set(spread) for name, spread in read["ttft_terms_s"].items()} == dict.fromkeys(
        ("scheduling", "queueing", "prefill"), SPREAD
    )
    assert all(set(part) == {"mean", "peak"} for part in read["kv"].values())
    assert set(read["stage_seconds"]) == set(STAGES)
    flat = flatten(read)
    assert flat["ttft_s.p50"] == read["ttft_s"]["p50"] and not any(key.startswith("manifest") for key in flat)
    assert os.listdir(tmp_path / "new") == ["result.json"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["workload.concurrency=3"],
        ["workload.arrivals.kind=poisson", "workload.arrivals.rate_per_s=2"],
        ["workload.arrivals.kind=burst", "cache.num_blocks=14", "preemption=recompute"],
        ["workload.arrivals.kind=burst", "cache.num_blocks=14", "preemption=swap"],
    ],
    ids=["closed", "poisson", "recompute", "swap"],
)
def test_sums_add_up(overrides):
    """Every request ends once, delivered tokens are those asked for, identities hold, preempted or not."""
    record, started = run(overrides=[*overrides, "workload.output_tokens={kind: uniform, low: 1, high: 40}"])
    finished = started.finished
    assert record["requests"] == {"finished": 16, "failed": 0, "refused": 0, "aborted": 0}
    for each in finished:
        check_record(each)
    asked = [r.params.max_tokens for r in started_workload(started).requests(320, 4096)]
    assert sorted(f.num_output_tokens for f in finished) == sorted(asked)
    assert record["output_tokens"] == sum(asked) == sum(r.num_sampled for r in started.reports)
    assert record["ttft_s"]["mean"] * 16 == pytest.approx(sum(f.ttft_s for f in finished))
    assert sum(t["mean"] for t in record["ttft_terms_s"].values()) == pytest.approx(record["ttft_s"]["mean"])
    assert record["output_tokens_per_s"] * record["duration_s"] == pytest.approx(record["output_tokens"])
    kinds = [p.kind for report in started.reports for p in report.preempted]
    assert record["preemptions"] == {kind: kinds.count(kind) for kind in record["preemptions"]}
    assert bool(kinds) == ("cache.num_blocks=14" in overrides), "the small pool must preempt"
    used, kv = record["kv"]["used_of_reserved"]["mean"], record["kv"]
    assert used == pytest.approx(
        kv["written"]["mean"] / sum(kv[k]["mean"] for k in ("written", "to_write", "internal_waste"))
    )


def started_workload(started):
    return instantiate(started.config.workload, "workload=synthetic")


def test_closed_loop_keeps_the_concurrency():
    """Never more than asked in flight, and another is sent as soon as one ends."""
    record, started = run(overrides=["workload.concurrency=3", "workload.output_tokens=6"])
    assert record["concurrency"]["peak"] == 3
    assert record["concurrency"]["mean"] > 2.5
    assert max(r.num_running + r.num_waiting for r in started.reports) == 3


def test_open_loop_submits_when_due():
    """Arrival times are kept to the virtual second; the gap between two requests is not slept but passes."""
    workload = Fixed([a_request(0.0), a_request(0.6), a_request(100.0)])
    record, started = run(workload)
    first, second, third = sorted(started.finished, key=lambda f: f.arrival_s)
    assert (second.arrival_s - first.arrival_s, third.arrival_s - first.arrival_s) == pytest.approx((0.6, 100))
    assert second.first_seen_s == pytest.approx(first.arrival_s + 1.0), "seen by the step after it was due"
    assert third.first_seen_s == pytest.approx(third.arrival_s)
    assert record["duration_s"] == pytest.approx(101.5)
    assert record["ttft_terms_s"]["scheduling"]["mean"] == pytest.approx(0.4 / 3)
    assert record["concurrency"]["mean"] == pytest.approx(sum(3 * [1.5]) / 101.5)


def test_two_runs_are_equal():
    """One seed and a virtual clock: equal records but for the host's own stage times."""
    overrides = ["workload.arrivals.kind=gamma", "workload.arrivals.rate_per_s=1", "workload.arrivals.cv=3", "seed=5"]
    one, other = (run(overrides=overrides)[0] for _ in range(2))
    for record in (one, other):
        del record["stage_seconds"]
    assert one == other
    assert run(overrides=[*overrides, "seed=6"])[0]["ttft_s"] != one["ttft_s"]


def test_refused_requests_are_counted_not_fatal(caplog):
    """Refused by the engine at once (a bad token) and at admission (more than the pool): the others are served."""
    bad = WorkloadRequest(prompt_token_ids=(9999,), params=SamplingParams(max_tokens=2, detokenize=False))
    workload = Fixed([a_request(), bad, a_request(num_prompt=300, num_output=100), a_request()], concurrency=1)
    with caplog.at_level(logging.WARNING, logger="core.frontends.replay"):
        record, _ = run(workload, ["cache.num_blocks=8", "max_model_len=128"])
    assert record["status"] == "ok"
    assert record["requests"] == {"finished": 2, "failed": 0, "refused": 2, "aborted": 0}
    assert "not all requests were served; the first: refused: " in caplog.text


def test_nothing_served_is_a_failure():
    """A run without one finished request has measured nothing, and says why."""
    record, _ = run(Fixed([a_request(num_prompt=3000, num_output=3000)]))
    assert record["status"] == "failed" and record["requests"]["refused"] == 1
    assert record["error"].startswith("no request was served: refused: ")
    record, _ = run(Fixed([]))
    assert record["status"] == "failed" and record["error"].endswith("the workload is empty")


def test_branches_of_a_request_count_as_one():
    """n = 3: one request, three sequences; the closed loop waits for all of them."""
    record, started = run(Fixed([a_request(n=3), a_request(n=3)], concurrency=1))
    assert record["requests"]["finished"] == 2 and len(started.finished) == 6
    assert record["output_tokens"] == 18 and record["concurrency"]["peak"] == 3


def test_warm_up_is_left_out():
    """Warm-up requests are served first and not counted; arrival times then start again at 0."""
    requests = [a_request(float(i)) for i in range(6)]
    record, started = run(Fixed(requests), warmup_requests=2)
    assert record["requests"]["finished"] == 4 and record["output_tokens"] == 12
    assert len(started.finished) == 6
    arrivals = [f.arrival_s for f in started.finished][2:]
    assert np.diff(arrivals).tolist() == pytest.approx([1, 1, 1])
    with pytest.raises(ConfigError, match="warmup_requests must be an integer of at least 0"):
        ReplayFrontend(Fixed([]), warmup_requests=-1)


def test_take_leaves_the_next_one():
    rest = iter(range(5))
    assert list(_take(rest, 2)) == [0, 1] and list(rest) == [2, 3, 4]


@pytest.mark.parametrize("where", ["step", "wait"])
def test_ctrl_c_gives_a_partial_result(where, monkeypatch):
    """Between two steps, or in a wait: what is in flight is cut off and counted, and the engine ends empty."""
    before = signal.getsignal(signal.SIGINT)
    started = Watched()
    executor, act = started.engine.executor, "execute" if where == "step" else "wait_until"
    original = getattr(executor, act)

    def interrupted(*args):
        if len(started.reports) >= 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(type(executor), act, lambda _, *args: interrupted(*args))
    record = ReplayFrontend(Fixed([a_request(0.0), a_request(0.0, num_output=50), a_request(1000.0)])).run(started)
    assert record["status"] == "aborted" and "error" not in record
    aborted = 1 if where == "step" else 0
    assert record["requests"] == {"finished": 2 - aborted, "failed": 0, "refused": 0, "aborted": aborted}
    started.engine.assert_idle()
    assert signal.getsignal(signal.SIGINT) is before
    started.engine.close()


def test_a_policy_fault_gives_a_failed_record(monkeypatch):
    """The engine stopped: status failed with the reason, and what was in flight counts as failed."""
    started = Watched()
    original = started.engine.executor.execute

    def broken(*args):
        if len(started.reports) == 2:
            raise PolicyError("mine 1.0: scheduler=mine plan_step: it broke")
        return original(*args)

    monkeypatch.setattr(type(started.engine.executor), "execute", lambda _, *args: broken(*args))
    record = ReplayFrontend(Fixed([a_request(), a_request(num_output=1)])).run(started)
    assert record["status"] == "failed" and record["error"] == "mine 1.0: scheduler=mine plan_step: it broke"
    assert record["requests"] == {"finished": 1, "failed": 1, "refused": 0, "aborted": 0}
    started.engine.close()


# ------------------------------------------------------------------------------------------------ what people read


def shown(record):
    screen = io.StringIO()
    Console(file=screen, width=80).print(table(record), highlight=False)
    return screen.getvalue()


def test_table_fits_80_columns_and_has_units(capsys):
    """The figures a newcomer looks for, in words with units; printed by the run itself."""
    record, _ = run(overrides=["workload.concurrency=4"])
    text = shown(record)
    assert all(len(line) <= 80 for line in text.splitlines())
    for said in (
        "16 finished",
        "512 tokens in",
        "tokens/s",
        "first token (TTFT)",
        "computing the prompt",
        "p99",
        "KV pool in use",
        "%",
    ):
        assert said in text
    assert "first token (TTFT)" in capsys.readouterr().out


def test_table_of_an_empty_run_has_dashes():
    """No figure is made up."""
    record, _ = run(Fixed([]))
    assert "0 finished" in shown(record) and "nan" not in shown(record).lower()


def test_result_is_strict_json_and_replaces_whole(tmp_path):
    """Non-finite numbers become null, unknown values their text; a value that cannot be written leaves the old file."""
    odd = {"a": math.nan, "b": [np.float64(2.5), np.int32(3), math.inf], "c": {1: {"x", "y"}}, "d": tmp_path}
    path = write_result(odd, tmp_path)
    assert json.loads(path.read_text()) == {"a": None, "b": [2.5, 3, None], "c": {"1": ["x", "y"]}, "d": str(tmp_path)}
    write_result({"a": 1}, tmp_path)
    assert json.loads(path.read_text()) == {"a": 1} == jsonable({"a": 1})
    assert os.listdir(tmp_path) == ["result.json"]
    assert flatten({"a": {"b": {"c": 1}}, "l": [1, 2], "manifest": {"x": 1}}) == {"a.b.c": 1, "l": "[1, 2]"}


def test_synthetic_is_the_default_workload():
    """conf composes: the frontend gets the workload group, with the root's seed."""
    frontend = instantiate(compose([*TOY, "seed=3"]).frontend, "frontend=replay")
    assert isinstance(frontend.workload, Synthetic) and frontend.workload.seed == 3
    assert frontend.workload.num_requests == 16
