"""Before a request runs: the bounded queue, predictions, and what admission refuses or moves back."""

from __future__ import annotations

from typing import Any

import pytest

import core
from core.app import serve
from core.config import check_root, compose
from core.frontends.http import HttpFrontend
from core.hookspecs import hookimpl
from core.levels import ServiceLevel, ServiceLevels, read_levels
from core.types import ConfigError, PolicyError, QueueFull, RequestError, SamplingParams, Triage
from plugins.admission.deadline import Deadline
from plugins.allocators.prefix import PrefixAllocator
from plugins.predictors.declared import Declared
from plugins.predictors.oracle import Oracle
from plugins.predictors.quantile import Quantile
from plugins.schedulers.chunked import ChunkedScheduler
from plugins.schedulers.sjf import SjfScheduler
from tests.core.test_engine import assert_as_alone
from tests.toy import Work, chosen, make_engine, run

PARAMS = SamplingParams(max_tokens=5, detokenize=False)


# ---------------------------------------------------------------------------------------------------- the queue's bound


def test_one_more_than_may_wait_is_told_so_with_the_numbers_and_when_to_come_back() -> None:
    engine = make_engine(max_queue=3, max_num_seqs=1)
    ids = [engine.submit([1, 2, i], PARAMS) for i in range(3)]
    with pytest.raises(QueueFull, match=r"3 requests are waiting and max_queue is 3") as full:
        engine.submit([9], PARAMS)
    assert isinstance(full.value, RequestError)
    assert (full.value.num_waiting, full.value.max_queue) == (3, 3) and full.value.retry_after_s >= 1
    engine.step()  # one begins to run: a place is free
    engine.submit([1, 2, 9], PARAMS)
    with pytest.raises(QueueFull):
        engine.submit([9], PARAMS)
    while engine.has_work():
        engine.step()
    engine.assert_idle()
    assert len(ids) == 3


def test_the_hint_follows_how_fast_places_become_free() -> None:
    engine = make_engine(max_queue=4, max_num_seqs=1)
    for round in range(30):
        while len(engine.state.waiting) < 3 and round < 20:
            engine.submit([1, 2, round], PARAMS)
            engine.step()
        engine.step()
    for i in range(8):
        try:
            engine.submit([1, i], PARAMS)
        except QueueFull as full:
            assert 3 <= full.retry_after_s <= 7  # a request of five tokens takes five steps of a second
            return
    raise AssertionError("the queue never filled")


def test_what_was_aborted_or_refused_before_a_step_takes_no_place_for_ever() -> None:
    engine = make_engine(max_queue=2, num_blocks=4)
    for _ in range(5):
        ids = [engine.submit([1] * 9, PARAMS), engine.submit([1] * 9, SamplingParams(max_tokens=7, detokenize=False))]
        engine.abort(ids[0])
        engine.abort(ids[1])
        engine.step()
        engine.step()
    engine.assert_idle()


# ---------------------------------------------------------------------------------------------------- labels and levels


@pytest.mark.parametrize(
    "label",
    [{"priority": 1.5}, {"stall_s": -1}, {"deadline_s": float("nan")}, {"tpot_s": 0}, {"service_class": "gold"}],
)
def test_a_bad_label_is_refused_by_name(label: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(label))):
        make_engine().submit([1, 2], PARAMS, **label)


def test_targets_come_from_the_class_unless_the_request_has_its_own() -> None:
    levels = ServiceLevels(ServiceLevel(10.0, None), {"fast": ServiceLevel(2.0, 0.5), "any": ServiceLevel()})
    engine = make_engine(levels=levels)
    for labels in (
        {},
        {"service_class": "fast"},
        {"service_class": "any"},
        {"service_class": "fast", "tpot_s": 3.0, "deadline_s": 7.0},
    ):
        engine.submit([1, 2], PARAMS, arrival_s=0.0, **labels)
    engine.step()
    seen = [(view.deadline_s, view.tpot_s) for view in engine.state.running]
    assert seen == [(10.0, None), (2.0, 0.5), (None, None), (7.0, 3.0)]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"ttft_s": 0}, "slo.ttft_s=0"),
        ({"tttft_s": 1}, "slo.tttft_s"),
        ({"classes": {"a": {"tpot_s": "fast"}}}, "slo.classes.a.tpot_s='fast'"),
        ({"classes": 3}, "slo.classes=3"),
    ],
)
def test_a_bad_level_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        read_levels(values)


# ---------------------------------------------------------------------------------------------------- predictions


def _predictions(predictor: Any, work: list[Work], **sizes: Any) -> tuple[list[int], Any]:
    seen: dict[int, int] = {}

    class Notes(ChunkedScheduler):
        @hookimpl
        def plan_step(self, view: Any) -> Any:
            seen.update(
                {s.request_id: s.predicted_output_tokens for s in (*view.running, *view.waiting) if not s.branch}
            )
            return ChunkedScheduler.plan_step(self, view)

    engine = make_engine(policies=[chosen("predictor", predictor)], scheduler=Notes(), **sizes)
    result = run(engine, work)
    return [seen[i] for i in sorted(seen)], result


def test_predictors_say_what_they_are_named_for() -> None:
    work = [Work((1, 2, i), 10, labels={"recorded_output_tokens": n}) for i, n in enumerate((3, 8, 25))]
    assert _predictions(Declared(), work)[0] == [10, 10, 10]
    assert _predictions(Declared(scale=0.25), work)[0] == [2, 2, 2]
    assert _predictions(Oracle(), work)[0] == [3, 8, 10]  # never above max_tokens
    wrong = _predictions(Oracle(error=1.0), work)[0]
    assert wrong == _predictions(Oracle(error=1.0), work)[0] and wrong != [3, 8, 10]
    assert _predictions(Oracle(), [Work((1, 2), 10)])[0] == [10]  # live traffic has no recorded length


def test_the_quantile_predictor_learns_from_those_that_ended_themselves() -> None:
    early = [Work((1, 2, i), 4 + i % 3) for i in range(9)]
    late = [Work((1, 2, i), 50, arrives=40) for i in range(2)]
    longer = [Work(tuple(range(40)), 50, arrives=40)]
    predicted, _ = _predictions(Quantile(q=0.5), [*early, *late, *longer])
    assert predicted[-3:] == [5, 5, 50]  # the median of 4, 5, 6; a longer prompt is another kind
    cut_off = [Work((1, 2, i), 30, aborts=3) for i in range(9)]
    assert _predictions(Quantile(), [*cut_off, *late])[0][-1] == 50


def test_sjf_starts_the_shortest_by_prediction() -> None:
    work = [Work((1, 2, i), n) for i, n in enumerate((20, 4, 12))]
    engine = make_engine(scheduler=SjfScheduler(), max_num_seqs=1)
    result = run(engine, work)
    assert_as_alone(work, result)
    ended = [o.request_id for report in result.reports for o in report.outputs.ended]
    assert ended == [1, 2, 0]


def test_headroom_with_a_right_prediction_never_preempts() -> None:
    work = [
        Work(tuple(range(i, i + 6)), 10 + 3 * (i % 5), labels={"recorded_output_tokens": 10 + 3 * (i % 5)})
        for i in range(10)
    ]
    counts = {}
    for headroom in (0.0, 1.0):
        scheduler = ChunkedScheduler(watermark=0, headroom=headroom)
        engine = make_engine(
            policies=[chosen("predictor", Oracle())],
            scheduler=scheduler,
            num_blocks=14,
            max_model_len=56,
            max_num_seqs=10,
        )
        result = run(engine, work)
        assert_as_alone(work, result)
        counts[headroom] = sum(len(report.preempted) for report in result.reports)
    assert counts[0.0] > 0 == counts[1.0]


# ---------------------------------------------------------------------------------------------------- late requests


def _late(admission: Any) -> Any:
    """Four requests one after the other through one row, of which the last two cannot make their deadline."""
    work = [Work((1, 2, i), 6, labels={"deadline_s": 8.0, "client_id": "c"}) for i in range(4)]
    work.append(Work((1, 2, 9), 6, arrives=7))
    engine = make_engine(policies=[chosen("admission", admission)], max_num_seqs=1)
    return engine, work, run(engine, work)


def test_a_request_that_is_late_already_is_refused_with_the_times() -> None:
    engine, _, result = _late(Deadline())
    reasons = [result.reason[i, 0] for i in range(5)]
    assert reasons == ["length", "length", "refused", "refused", "length"]
    assert "first token was due 8 s after arrival" in (result.error[2, 0] or "")
    summary = engine.metrics.summary()
    assert summary["requests"]["refused"] == 2 and summary["service"]["clients"]["c"]["refused"] == 2


def test_a_late_request_is_demoted_behind_those_that_wait_and_still_served() -> None:
    engine, work, result = _late(Deadline(late="demote"))
    assert_as_alone(work, result)
    ended = [o.request_id for report in result.reports for o in report.outputs.ended]
    assert ended == [0, 1, 4, 2, 3]  # the last to arrive was there when they became late
    engine.assert_idle()


def test_with_patience_the_queue_ahead_is_counted() -> None:
    """By the cost model a prefill of three tokens takes 6.1 s and two more tokens 4 s: the third of three cannot make 17 s, and
    is told."""
    work = [Work((1, 2, i), 2, labels={"deadline_s": 17.0}) for i in range(3)]
    for patience, refused in ((0.0, 0), (1.0, 1)):
        engine = make_engine(policies=[chosen("admission", Deadline(patience=patience))], prefill_flop_per_s=1e4)
        result = run(engine, work)
        assert sum(reason == "refused" for reason in result.reason.values()) == refused, patience


@pytest.mark.parametrize(
    "answer", [Triage(refused=((99, "no"),)), Triage(demoted=(0, 0)), "none", Triage(demoted=(0,), refused=((0, "x"),))]
)
def test_a_wrong_triage_fails_by_name(answer: Any) -> None:
    class Wrong:
        @hookimpl
        def triage(self, view: Any) -> Any:
            return answer

    engine = make_engine(policies=[chosen("admission", Wrong())])
    engine.submit([1, 2], PARAMS)
    with pytest.raises(PolicyError, match="admission=wrong triage"):
        engine.step()


def test_a_server_bounds_its_queue_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """``max_queue=auto``: a burst of more requests than a server would take loses none in a replay, nor from Python."""
    quick = ["executor=toy", "executor.step_seconds=0", "max_num_batched_tokens=1024", "observers=[]"]
    work = ["workload.num_requests=400", "workload.prompt_tokens=4", "workload.output_tokens=2"]
    record = serve(compose([*quick, *work, "frontend=replay", "frontend.progress=false"]))
    assert record is not None and record["requests"] == {"finished": 400, "failed": 0, "refused": 0, "aborted": 0}
    assert record["manifest"]["limits"]["max_queue"] is None
    with core.build(quick) as quire:
        assert len(quire.generate(["hi"] * 400, {"max_tokens": 1})) == 400
    bounds = []
    monkeypatch.setattr(HttpFrontend, "run", lambda self, started: bounds.append(started.engine.limits.max_queue))
    for words in ([], ["max_queue=null"], ["max_queue=7"]):
        serve(compose([*quick, "frontend=http", "frontend.port=0", *words]))
    assert bounds == [256, None, 7]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "true", "[1]"])
def test_bounds_of_the_queue_that_cannot_be(value: str) -> None:
    with pytest.raises(ConfigError, match=r"max_queue=.*: allowed is a whole number from 1, null or auto"):
        check_root(compose([f"max_queue={value}"]))


def test_admission_by_deadline_counts_what_the_cache_holds() -> None:
    """A prompt of 20 tokens takes 5 s, but 16 of them are cached: 3 s are enough. Nothing cached: they are not."""
    engine = make_engine(
        allocator=PrefixAllocator(), policies=[chosen("admission", Deadline())], prefill_flop_per_s=2 * 10_000 * 20 / 5
    )
    reasons = []
    for first, due_s in ((0, 50.0), (0, 3.0), (100, 3.0)):
        work = Work(tuple(range(first, first + 20)), 3, labels={"deadline_s": engine._now() + due_s})
        reasons.append(run(engine, [work]).reason[0, 0])
    assert reasons == ["length", "length", "refused"]


def test_admission_by_deadline_judges_the_head_of_a_long_queue() -> None:
    """Those that may stay, 512 of them a step; whoever is late among them or before them goes, and none of those starts."""
    engine = make_engine(policies=[chosen("admission", Deadline())], max_num_seqs=2)
    for i in range(1500):
        engine.submit((1, 2, i % 300), SamplingParams(max_tokens=2), deadline_s=1e6 if 600 <= i < 1200 else 0.0)
    assert sum(o.finish_reason == "refused" for o in engine.step().outputs) == 600
    while engine.has_work():
        engine.step()
    assert engine.metrics.requests == {"finished": 600, "failed": 0, "refused": 900, "aborted": 0}
