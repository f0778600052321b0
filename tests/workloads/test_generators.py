"""Generators with published statistics, and sessions whose next request follows the one before it."""

import itertools
import json

import attrs
import numpy as np
import pytest

from core.config import compose, instantiate
from core.frontends.replay import ReplayFrontend
from core.start import start
from core.types import ConfigError
from core.workloads.agent import Agent
from core.workloads.burstgpt import BurstGptTrace
from core.workloads.draws import draw
from core.workloads.fanout import FanOut
from core.workloads.prompts import Prompts
from core.workloads.published import TRACES, Published
from core.workloads.shared_prompt import SharedPrompt
from core.workloads.synthetic import Synthetic

NAMES = ["synthetic", "chat", "code", "long_context", "agent", "fanout", "shared_prompt"]


def session(workload, answer=(), vocab_size=50_000, max_model_len=20_000):
    """The requests of the first session, each answered with ``answer``; and the seconds between them."""
    request = next(workload.requests(vocab_size, max_model_len))
    requests, stalls = [request], []
    while (following := request.then(tuple(answer))) is not None:
        stall_s, request = following
        requests.append(request)
        stalls.append(stall_s)
    return requests, stalls


# ------------------------------------------------------------------------------------------------ lengths

STATISTICS = [  # trace, whether prompts or outputs; published mean, median, p90
    ("azure_conversation", 0, 1154.7, 1020, 2734),
    ("azure_conversation", 1, 211.1, 129, 424),
    ("azure_code", 0, 2047.8, 1469, 5188),
    ("azure_code", 1, 27.9, 13, 55),
    ("mooncake_conversation", 0, 12035, 6909, 27367),
]


@pytest.mark.parametrize("trace, which, mean, median, p90", STATISTICS)
def test_quantile_tables_have_the_published_statistics(trace, which, mean, median, p90):
    """Median and p90 are the table's own points; the mean of 100,000 draws is the published one to 1 %."""
    lengths = draw(TRACES[trace]["quantiles"][which], 100_000, np.random.default_rng(0))
    assert lengths.mean() == pytest.approx(mean, rel=0.015)
    assert np.percentile(lengths, [50, 90]) == pytest.approx([median, p90], rel=0.02)


def test_chat_answers_have_two_humps():
    """Tokens at 40 to 100 and at 395 to 430 are commoner than at 250 to 310 between them."""
    workload = Published(trace="azure_conversation", num_requests=20_000, scale=1)
    drawn = [r.recorded_output_tokens for r in itertools.islice(workload.requests(10, 20_000), 3000)]
    low, middle, high = (np.histogram(drawn, bins=[40, 100, 250, 310, 395, 430])[0] / [60, 150, 60, 85, 35])[[0, 2, 4]]
    assert low > 1.5 * middle and high > 3 * middle


@pytest.mark.parametrize("trace", TRACES)
def test_lognormal_and_fixed_are_there_for_every_trace(trace):
    """The published logarithms, cut at the trace's longest; one length for the ledger's arithmetic."""
    fixed = Published(trace=trace, lengths="fixed", num_requests=2)
    assert len({(len(r.prompt_token_ids), r.recorded_output_tokens) for r in fixed.requests(10, 200_000)}) == 1
    drawn = [len(r.prompt_token_ids) for r in Published(trace=trace, lengths="lognormal").requests(10, 200_000)]
    assert len(set(drawn)) > 100 and max(drawn) <= 123_192
    chat = next(Published(trace="azure_conversation", lengths="fixed").requests(10, 4096))
    assert (len(chat.prompt_token_ids), chat.recorded_output_tokens) == (512, 128)


def test_scale_divides_lengths():
    one, eighth = (
        [len(r.prompt_token_ids) for r in Synthetic(prompt_tokens=160, scale=s).requests(10, 1000)] for s in (1, 8)
    )
    assert set(one) == {160} and set(eighth) == {20}


@pytest.mark.parametrize(
    "points", [[], [[0, 1]], [[0, 1], [0.5, 9]], [[0, 5], [1, 4]], [[0, 0], [1, 4]], [[0, 1], [1]], "ab"]
)
def test_bad_quantiles_say_what_is_needed(points):
    with pytest.raises(
        ConfigError, match="kind quantiles needs points, a list of \\[quantile, tokens\\] from quantile 0 to 1"
    ):
        Synthetic(prompt_tokens={"kind": "quantiles", "points": points})


# ------------------------------------------------------------------------------------------------ agent


@pytest.mark.parametrize("reuse", [True, False])
def test_an_agent_submits_97000_tokens_of_which_7700_are_distinct(reuse):
    """2,000 tokens and 300 more a step, 20 steps; every prompt begins with the one before it."""
    requests, stalls = session(Agent(reuse_output=reuse), answer=range(100))
    lengths = [len(r.prompt_token_ids) for r in requests]
    assert lengths == [2000 + 300 * k for k in range(20)] and sum(lengths) == 97_000
    for before, after in itertools.pairwise(requests):
        assert after.prompt_token_ids[: len(before.prompt_token_ids)] == before.prompt_token_ids
    assert len({r.prompt_token_ids[:i] for r in requests[-1:] for i in range(1, lengths[-1] + 1)}) == 7700
    assert stalls == [2.0] * 19 and len({r.session_id for r in requests}) == 1


def test_an_answer_is_part_of_the_next_prompt_or_made_up():
    """reuse_output: what the model said, then the tool's text; false: the same prompts whatever it said."""
    said, other = tuple(range(100)), tuple(range(200, 300))
    used = session(Agent(), answer=said)[0][1].prompt_token_ids
    assert used[2000:2100] == said and used[2100:2103] not in (said[:3], other[:3])
    assert used[2100:] == session(Agent(), answer=other)[0][1].prompt_token_ids[2100:], "the tool says the same"
    assert len(session(Agent(), answer=range(5))[0][1].prompt_token_ids) == 2300, (
        "a short answer leaves more to the tool"
    )
    recorded = [session(Agent(reuse_output=False), answer=a)[0][-1].prompt_token_ids for a in (said, other)]
    assert recorded[0] == recorded[1]


def test_agent_sessions_differ_but_for_what_they_share():
    one, two = itertools.islice(Agent(shared_tokens=500).requests(50_000, 20_000), 2)
    assert one.prompt_token_ids[:500] == two.prompt_token_ids[:500]
    assert one.prompt_token_ids[500:510] != two.prompt_token_ids[500:510]


def test_stalls_have_the_mean_and_variation_they_say():
    """Drawn by session and step, so in whatever order sessions end they are the same."""
    workload = Agent(num_steps=500, tokens_per_step=1, output_tokens=1, first_tokens=1, stall_s=3.0, stall_cv=0.5)
    stalls = [workload._stall(session, step) for session in range(4) for step in range(500)]
    assert np.mean(stalls) == pytest.approx(3, rel=0.05) and np.std(stalls) == pytest.approx(1.5, rel=0.1)
    assert stalls == [workload._stall(session, step) for session in range(4) for step in range(500)]


def test_an_agent_that_outgrows_the_model_is_refused():
    with pytest.raises(
        ConfigError, match="the last step of a session needs 7800 tokens, max_model_len is 4096; raise workload.scale"
    ):
        next(Agent().requests(100, 4096))
    assert len(session(Agent(scale=8), max_model_len=1000)[0][-1].prompt_token_ids) == 962


# ------------------------------------------------------------------------------------------------ the others


def test_fanout_asks_for_n_answers():
    requests = list(FanOut(num_requests=3, n=5, scale=32).requests(1000, 4096))
    assert {(len(r.prompt_token_ids), r.params.n, r.params.max_tokens, r.params.temperature) for r in requests} == {
        (128, 5, 8, 1.0)
    }
    assert len({r.prompt_token_ids for r in requests}) == 3


def test_shared_prompts_are_shared_by_popularity():
    """One system prompt: all begin alike. Several: the second half as often as the first."""
    requests = list(SharedPrompt().requests(50_000, 4096))
    assert len({r.prompt_token_ids[:2000] for r in requests}) == 1
    assert len({r.prompt_token_ids[2000:] for r in requests}) == 64 and {len(r.prompt_token_ids) for r in requests} == {
        2128
    }
    several = SharedPrompt(num_shared=3, num_requests=3000, shared_tokens=5, prompt_tokens=1).requests(50_000, 4096)
    counts = np.unique([r.prompt_token_ids[:5] for r in several], axis=0, return_counts=True)[1]
    assert sorted(counts / 3000, reverse=True) == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.03)


@pytest.mark.parametrize(
    "cls, bad, says",
    [
        (Agent, {"output_tokens": 301}, "output_tokens=301: the answer is part of the 300 tokens"),
        (Agent, {"shared_tokens": 2001}, "shared_tokens=2001: the first prompt has 2000 tokens"),
        (Agent, {"stall_s": -1}, "stall_s must be a finite number of at least 0"),
        (Agent, {"reuse_output": None}, "reuse_output must be true or false"),
        (FanOut, {"n": 0}, "n must be an integer of at least 1"),
        (SharedPrompt, {"zipf": float("nan")}, "zipf must be a finite number"),
        (Published, {"trace": "mine"}, "trace must be one of azure_conversation, azure_code, mooncake_conversation"),
        (Published, {"trace": "azure_code", "lengths": "mean"}, "lengths must be one of quantiles, lognormal, fixed"),
    ],
)
def test_bad_options_say_what_is_allowed(cls, bad, says):
    with pytest.raises(ConfigError, match=says):
        cls(**bad)


@pytest.mark.parametrize("name", NAMES)
def test_yaml_and_class_have_the_same_fields(name):
    """conf lists every field with the class's own default, and the workload is the same twice."""
    config = compose([f"workload={name}"])
    made = instantiate(config.workload, f"workload={name}")
    needed = {"trace": made.trace} if hasattr(made, "trace") else {}
    default = type(made)(**needed)
    fields = [each.name for each in type(made).__attrs_attrs__]
    assert {f: getattr(made, f) for f in fields} == {f: getattr(default, f) for f in fields}
    assert set(config.workload) == {"_target_", *fields}
    first = [r.prompt_token_ids for r in itertools.islice(made.requests(320, 8192), 3)]
    assert first == [r.prompt_token_ids for r in itertools.islice(default.requests(320, 8192), 3)]


# ------------------------------------------------------------------------------------------------ sessions on an engine

TOY = ["executor=toy", "frontend=replay", "executor.step_seconds=0.25", "cache.num_blocks=256", "checks=full"]


def replay(workload, overrides=(), **options):
    """The record, the finished sequences, and for each request that was submitted: its label, prompt and time."""
    started = start(compose([*TOY, *overrides]))
    finished, sent, submit, step = [], [], started.engine.submit, started.engine.step

    def watch_submit(prompt, params, **labels):
        sent.append((labels["label"], prompt, labels["arrival_s"]))
        return submit(prompt, params, **labels)

    def watch_step():
        report = step()
        finished.extend(report.finished)
        return report

    started.engine.submit, started.engine.step = watch_submit, watch_step
    record = ReplayFrontend(workload, progress=False, **options).run(started)
    started.engine.assert_idle()
    started.engine.close()
    return record, finished, sent


def small(**options):
    values = {"num_sessions": 3, "num_steps": 4, "first_tokens": 20, "tokens_per_step": 10, "output_tokens": 4}
    return Agent(**{**values, "stall_s": 2.0, **options})


def test_a_step_follows_its_stall_after_the_one_before():
    """Sent exactly stall_s after the end of the step before it, with the answer that was really given in its prompt."""
    record, finished, sent = replay(small(num_sessions=1))
    assert record["status"] == "ok" and record["requests"]["finished"] == 4
    ends = [each.finished_s for each in finished]
    assert [when for _, _, when in sent][1:] == pytest.approx([end + 2.0 for end in ends[:-1]])
    assert [len(prompt) for _, prompt, _ in sent] == [20, 30, 40, 50]
    made_up = replay(small(num_sessions=1, reuse_output=False))[2]
    assert made_up[1][1][:20] == sent[1][1][:20] and made_up[1][1][20:24] != sent[1][1][20:24]
    assert made_up[1][1][24:] == sent[1][1][24:]
    assert record["duration_s"] == pytest.approx(ends[-1] - finished[0].arrival_s)


def test_stalled_sessions_count_as_open():
    """concurrency bounds sessions: the second begins when the first is over, not while it waits for a tool."""
    _, _, sent = replay(small(concurrency=1))
    assert [label for label, _, _ in sent] == [f"agent-{s} step {k}" for s in range(3) for k in range(4)]
    _, _, sent = replay(small(concurrency=None))
    assert [label for label, _, _ in sent][:3] == [f"agent-{s} step 0" for s in range(3)]


def test_sessions_may_arrive_by_time_and_two_runs_are_equal():
    """Open loop: sessions start when they arrive, their steps follow; a seed gives the same record."""
    workload = {"arrivals": {"kind": "poisson", "rate_per_s": 0.2}, "stall_cv": 1.0, "seed": 4}
    one, other = (replay(small(**workload)) for _ in range(2))
    assert one[2] == other[2] and len(one[2]) == 12
    for record in (one[0], other[0]):
        del record["stage_seconds"]
    assert json.dumps(one[0], default=str) == json.dumps(other[0], default=str)


def test_a_refused_step_ends_its_session():
    """What cannot be served has no successor; the other sessions go on, and the run ends."""
    record, _, sent = replay(Cut(), ["cache.num_blocks=5"])
    assert record["requests"] == {"finished": 3, "failed": 0, "refused": 1, "aborted": 0} and len(sent) == 4


class Cut:
    """Two sessions: the second's follower is longer than the pool."""

    concurrency = None

    def requests(self, vocab_size, max_model_len):
        ok, bad = itertools.islice(small(num_steps=2).requests(vocab_size, max_model_len), 2)
        yield ok

        def then(output):
            stall_s, request = bad.then(output)
            return stall_s, attrs.evolve(request, prompt_token_ids=request.prompt_token_ids * 40, then=lambda _: 1 / 0)

        yield attrs.evolve(bad, then=then)


def test_warm_up_sessions_do_not_stall():
    """Warm-up serves whole sessions without waiting; only the others are counted."""
    record, _, sent = replay(small(), warmup_requests=1)
    assert record["requests"]["finished"] == 8 and len(sent) == 12
    assert sent[3][2] - sent[0][2] < 6, "three stalls of 2 s were not waited for"


def test_a_bad_row_in_the_middle_keeps_what_was_measured(tmp_path):
    """After the first finished request a bad row ends the run as failed, with its figures; before it, it is a bad input."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": [1, 2], "max_tokens": 3}\n' * 3 + "oops\n")
    record, finished, _ = replay(Prompts(path=str(path), concurrency=1))
    assert record["status"] == "failed" and "p.jsonl line 4: it is no JSON" in record["error"]
    assert record["requests"]["finished"] + record["requests"]["aborted"] == 3 and len(finished) >= 2
    path.write_text("oops\n")
    with pytest.raises(ConfigError, match="p.jsonl line 1"):
        replay(Prompts(path=str(path)))


def test_rows_left_out_are_in_the_manifest(tmp_path):
    path = tmp_path / "b.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n1,5,5\n2,5,0\n3,5,0\n")
    record, _, _ = replay(BurstGptTrace(path=str(path)))
    assert record["manifest"]["workload_skipped"] == {"failed (0 response tokens)": 2}
