"""The figures of result.json: their identities, and what they are over time, on made-up steps."""

import itertools
import json
import math

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.metrics import KV_TOKENS, Metrics, Series
from core.reports import check_record
from core.scratch import STAGES
from core.types import Finished, MemoryReport, Output, Plan, Preempted, StepReport

KEYS = {
    "requests": {"finished", "failed", "refused", "aborted"},
    "steps": None,
    "duration_s": None,
    "output_tokens": None,
    "output_tokens_per_s": None,
    "ttft_s": {"mean", "p50", "p90", "p99"},
    "ttft_terms_s": {"scheduling", "queueing", "prefill"},
    "tpot_s": {"mean", "p50", "p90", "p99"},
    "itl_s": {"mean", "p50", "p90", "p99"},
    "e2e_s": {"mean", "p50", "p90", "p99"},
    "service": {"attainment", "goodput_per_s", "goodput_tokens_per_s", "classes", "clients"},
    "concurrency": {"mean", "peak"},
    "kv": {"used_of_pool", "used_of_reserved", *KV_TOKENS},
    "preemptions": {"swap", "recompute", "turned", "forced"},
    "prefix": {"query_tokens", "hit_tokens"},
    "forks": {"branches", "copied_bytes", "copied_bytes_per_branch"},
    "stage_seconds": set(STAGES),
}


def a_record(*, waits=(0.0, 0.0, 0.5), gaps=(), arrival_s=1.0, reason="length", **changes) -> Finished:
    """A sequence that waited for the next step, in the queue, for its first token, and then between tokens."""
    seen, scheduled, *times = itertools.accumulate((*waits, *gaps), initial=arrival_s)
    seen, scheduled, times = scheduled, times[0], tuple(times[1:])
    values = {
        "request_id": 0,
        "sequence_id": 0,
        "branch": 0,
        "client_id": "",
        "num_prompt_tokens": 4,
        "num_cached_tokens": 0,
        "num_output_tokens": len(times),
        "finish_reason": reason,
        "arrival_s": arrival_s,
        "first_seen_s": seen,
        "first_scheduled_s": scheduled,
        "token_times_s": times,
        "finished_s": times[-1],
    }
    return Finished(**{**values, **changes})


def a_step(started_s=0.0, ended_s=0.0, *, num_tokens=1, num_running=1, finished=(), **changes) -> StepReport:
    values = {
        "step": 0,
        "plan": Plan(),
        "outputs": (),
        "preempted": (),
        "num_sampled": 0,
        "num_waiting": 0,
        "stage_seconds": dict.fromkeys(STAGES, 0.0),
    }
    step = {"started_s": started_s, "ended_s": ended_s, "num_tokens": num_tokens, "num_running": num_running}
    return StepReport(**{**values, **step, "finished": tuple(finished), **changes})


def some_memory(**changes) -> MemoryReport:
    values = {"pool": 100, "reserved": 50, "written": 30, "to_write": 15, "internal_waste": 5}
    return MemoryReport(**{**values, "external_waste": 0, "shared": 0, "cached": 10, **changes})


seconds = st.floats(0, 1e4, allow_subnormal=False)
records = st.builds(
    a_record,
    waits=st.tuples(seconds, seconds, seconds),
    gaps=st.lists(seconds, max_size=12),
    arrival_s=seconds,
    reason=st.sampled_from(["stop", "length"]),
)


@given(records)
def test_a_consistent_record_passes_the_check(record):
    """TTFT is the sum of its terms, and E2E is TTFT and the gaps, whatever the waits were."""
    check_record(record)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_output_tokens": 3},
        {"first_scheduled_s": None},
        {"first_seen_s": 0.5},
        {"first_scheduled_s": 9.0},
        {"token_times_s": (1.5, 2.5, 2.25, 3.0)},
        {"finished_s": 2.0},
        {"finish_reason": "refused"},
        {"finished_s": math.nan},
        {"token_times_s": (), "num_output_tokens": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_check_record_finds_what_is_wrong(wrong):
    """A record that loses a token or whose times run backwards is named with its numbers."""
    record = a_record(gaps=(1.0, 0.5, 0.25))
    check_record(record)
    with pytest.raises(AssertionError, match="sequence 0 of request 0"):
        check_record(attrs.evolve(record, **wrong))


@given(st.lists(records, max_size=20))
def test_identities_hold_over_a_run(finished):
    """mean x count is the sum; the TTFT terms add up; E2E total = TTFT total + all gaps; gaps = tokens - sequences."""
    metrics = Metrics()
    metrics.update(a_step(finished=finished, num_sampled=sum(f.num_output_tokens for f in finished)))
    summary = metrics.summary()
    assert summary["requests"]["finished"] == len(finished)
    if not finished:
        return
    ttft, e2e = [f.ttft_s for f in finished], [f.token_times_s[-1] - f.arrival_s for f in finished]
    assert summary["ttft_s"]["mean"] * len(finished) == pytest.approx(sum(ttft))
    terms = summary["ttft_terms_s"]
    assert sum(term["mean"] for term in terms.values()) == pytest.approx(summary["ttft_s"]["mean"])
    assert metrics.e2e.total == pytest.approx(metrics.ttft.total + metrics.itl.total)
    assert metrics.itl.count == summary["output_tokens"] - len(finished)
    assert metrics.tpot.count == sum(f.num_output_tokens > 1 for f in finished)
    for name, values in (("ttft_s", ttft), ("e2e_s", e2e)):
        expected = np.percentile(values, [50, 90, 99])
        assert [summary[name][p] for p in ("p50", "p90", "p99")] == pytest.approx(expected.tolist())


def test_a_preemption_shows_in_one_gap_and_not_in_ttft():
    """Two requests of 8 tokens, B preempted for 5 s after 3: TTFT(B) stays, its largest gap and E2E have the wait."""
    a = a_record(waits=(0, 0, 1), gaps=[1] * 7)
    b = a_record(waits=(0, 0, 1), gaps=[1, 1, 5, 1, 1, 1, 1], request_id=1, sequence_id=1, num_preemptions=1)
    metrics = Metrics()
    metrics.update(a_step(finished=[a, b], num_sampled=16, preempted=(Preempted(1, "recompute", 19, 5),)))
    summary = metrics.summary()
    assert summary["ttft_s"] == {"mean": 1, "p50": 1, "p90": 1, "p99": 1}
    assert summary["itl_s"]["mean"] == pytest.approx(18 / 14)
    assert summary["itl_s"]["p50"] == 1 and summary["itl_s"]["p99"] > 4
    assert summary["e2e_s"]["mean"] == pytest.approx((8 + 12) / 2)
    assert summary["tpot_s"]["mean"] == pytest.approx((7 / 7 + 11 / 7) / 2)
    assert summary["output_tokens"] == 16
    assert summary["preemptions"] == {"swap": 0, "recompute": 1, "turned": 0, "forced": 0}


def test_keys_are_those_of_the_design_and_empty_is_none():
    """Nothing measured: the same keys, None where no value stands behind a figure, and strict JSON."""
    summary = Metrics().summary()
    assert list(summary) == list(KEYS)
    for key, names in KEYS.items():
        assert names is None or set(summary[key]) == names
    assert summary["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert summary["output_tokens_per_s"] is None and summary["concurrency"] == {"mean": None, "peak": None}
    assert all(part == {"mean": None, "peak": None} for part in summary["kv"].values())
    json.dumps(summary, allow_nan=False)


def test_each_way_to_end_is_counted_once_a_request():
    """By the parent branch; only stop and length give latencies."""
    reasons = ["stop", "length", "error", "abort"]
    ended = [a_record(reason=reason, request_id=i, sequence_id=i) for i, reason in enumerate(reasons)]
    child = a_record(reason="stop", request_id=0, sequence_id=9, branch=1)
    metrics = Metrics()
    metrics.update(a_step(finished=[*ended, child], num_running=0))
    metrics.count_refused(2)
    assert metrics.summary()["requests"] == {"finished": 2, "failed": 1, "refused": 2, "aborted": 1}
    assert metrics.ttft.count == 3


def test_a_failed_sample_is_no_output_token():
    """The engine drew two tokens, one failed: one is delivered."""
    outputs = (Output(0, 0, 0, (7,), ""), Output(1, 1, 0, (), "", "error", error="NaN logits"))
    failed = a_record(
        reason="error", request_id=1, sequence_id=1, token_times_s=(), num_output_tokens=0, finished_s=2.0
    )
    metrics = Metrics()
    metrics.update(a_step(finished=[failed], outputs=outputs, num_sampled=2))
    assert metrics.summary()["output_tokens"] == 1


def test_means_over_time_weigh_by_seconds():
    """4 sequences for 1 s, 2 for 3 s, a gap of 4 s with 1: (4 + 6 + 4) / 8; memory holds until the next step begins."""
    metrics = Metrics()
    metrics.update(
        a_step(10, 11, num_running=4, num_sampled=4, memory=some_memory(written=40, to_write=10, internal_waste=0))
    )
    done = a_record(arrival_s=9.0)
    metrics.update(a_step(11, 14, num_running=1, finished=[done], num_sampled=4, memory=some_memory(written=10)))
    metrics.update(a_step(18, 18, num_tokens=0, num_running=1, memory=some_memory(written=10)))
    summary = metrics.summary()
    assert summary["duration_s"] == 8 and summary["steps"] == 2
    assert summary["concurrency"] == {"mean": pytest.approx(14 / 8), "peak": 4}
    assert summary["output_tokens_per_s"] == 1
    kv = summary["kv"]
    assert kv["written"] == {"mean": pytest.approx((40 + 7 * 10) / 800), "peak": 0.4} == kv["used_of_pool"]
    assert kv["used_of_reserved"] == {"mean": pytest.approx(110 / 400), "peak": 0.8}
    assert kv["cached"] == {"mean": pytest.approx(0.1), "peak": 0.1}


def test_time_begins_with_the_first_step_that_computes():
    """Steps that only wait, before anything was computed, are no part of the run."""
    metrics = Metrics()
    metrics.update(a_step(0, 0, num_tokens=0, num_running=0))
    assert metrics.summary()["concurrency"] == {"mean": None, "peak": None}
    metrics.update(a_step(100, 101))
    assert metrics.summary()["duration_s"] == 1


def test_a_step_without_a_memory_report_is_left_out():
    """The mean is over the time that was measured, not diluted by zeros."""
    metrics = Metrics()
    metrics.update(a_step(0, 1, memory=some_memory()))
    metrics.update(a_step(1, 9))
    assert metrics.summary()["kv"]["written"] == {"mean": pytest.approx(0.3), "peak": 0.3}


def test_summary_can_be_asked_again():
    """Asking changes nothing: twice is equal, and in the middle does not disturb the end."""
    asked, quiet = Metrics(), Metrics()
    for start in range(3):
        for metrics in (asked, quiet):
            metrics.update(a_step(start, start + 0.5, memory=some_memory(written=start)))
        assert asked.summary() == asked.summary()
    assert asked.summary() == quiet.summary()


def test_reset_forgets_everything():
    """After warm-up the figures are those of a new engine."""
    metrics = Metrics()
    metrics.update(a_step(0, 1, finished=[a_record()], memory=some_memory(), num_sampled=3, prefix_query_tokens=9))
    metrics.count_refused(1)
    metrics.reset()
    assert metrics.summary() == Metrics().summary()


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=7), max_size=30), st.integers(2, 16))
def test_series_keeps_few_values_and_exact_sums(parts, max_kept):
    """Past max_kept a systematic sample stays: every 2^k-th value, however the values came in."""
    series, values = Series(max_kept), []
    for part in parts:
        if len(part) == 1:
            series.add(part[0])
        else:
            series.extend(part)
        values += part
    assert series.count == len(values) and series.total == pytest.approx(sum(values), abs=1e-3)
    assert len(series._kept) <= max_kept
    assert list(series._kept) == values[:: series._stride]
    assert series._stride == 1 or len(series._kept) >= max_kept // 2


def test_stage_seconds_and_prefix_are_sums():
    metrics = Metrics()
    for _ in range(2):
        step = a_step(stage_seconds={"plan": 0.25, "forward": 1.0}, prefix_query_tokens=10, prefix_hit_tokens=4)
        metrics.update(step)
    summary = metrics.summary()
    assert summary["stage_seconds"] == {**dict.fromkeys(STAGES, 0.0), "plan": 0.5, "forward": 2.0}
    assert summary["prefix"] == {"query_tokens": 20, "hit_tokens": 8}
