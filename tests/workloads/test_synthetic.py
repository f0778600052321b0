"""workload=synthetic: the same for a seed, the lengths and arrivals asked for, and bad options refused in words."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types import ConfigError
from core.workloads.synthetic import Synthetic

lengths = st.one_of(
    st.integers(1, 40),
    st.builds(lambda value: {"kind": "fixed", "value": value}, st.integers(1, 40)),
    st.builds(
        lambda low, more: {"kind": "uniform", "low": low, "high": low + more}, st.integers(1, 20), st.integers(0, 20)
    ),
    st.builds(
        lambda centre, at, sigma, longest: {"kind": "lognormal", centre: at, "sigma": sigma, "max": longest},
        st.sampled_from(["mean", "median"]),
        st.floats(1, 50),
        st.floats(0.1, 2),
        st.integers(1, 100),
    ),
)
arrivals = st.one_of(
    st.sampled_from([{"kind": "closed"}, {"kind": "burst"}, {"kind": "poisson", "rate_per_s": 2}]),
    st.builds(lambda cv: {"kind": "gamma", "rate_per_s": 3.0, "cv": cv}, st.floats(0.2, 5)),
)
options = st.fixed_dictionaries(
    {
        "num_requests": st.integers(1, 12),
        "prompt_tokens": lengths,
        "output_tokens": lengths,
        "arrivals": arrivals,
        "seed": st.integers(0, 99),
    }
)


def facts(requests):
    return [(r.prompt_token_ids, r.params, r.arrival_s, r.recorded_output_tokens) for r in requests]


@given(options, st.integers(2, 60), st.integers(2, 500))
def test_requests_fit_and_are_the_same_for_a_seed(values, max_model_len, vocab_size):
    """Whatever the options: every request fits, in order of arrival, and a second object gives equal ones."""
    workload = Synthetic(**values)
    requests = facts(workload.requests(vocab_size, max_model_len))
    assert requests == facts(Synthetic(**values).requests(vocab_size, max_model_len))
    assert requests == facts(workload.requests(vocab_size, max_model_len)), "a workload may be read twice"
    assert len(requests) == values["num_requests"]
    for tokens, params, _, recorded in requests:
        assert tokens and params.max_tokens >= 1 and len(tokens) + params.max_tokens <= max_model_len
        assert all(0 <= token < vocab_size for token in tokens)
        assert recorded == params.max_tokens and params.ignore_eos and params.temperature == 0
    times = [arrival_s for _, _, arrival_s, _ in requests]
    if values["arrivals"]["kind"] == "closed":
        assert set(times) == {None}
    else:
        assert times[0] == 0 and times == sorted(times)


def test_seeds_differ_and_streams_are_apart():
    """Another seed gives other requests; another arrival process leaves lengths and tokens alone."""
    one, other = (facts(Synthetic(seed=seed).requests(1000, 100)) for seed in (1, 2))
    assert one != other
    later = Synthetic(seed=1, arrivals={"kind": "poisson", "rate_per_s": 5}).requests(1000, 100)
    assert [r[:2] for r in facts(later)] == [r[:2] for r in one]


@pytest.mark.parametrize("centre, sigma, mean", [("mean", 0.5, 200), ("median", 0.5, 200 * np.exp(0.125))])
def test_lognormal_has_the_mean_it_says(centre, sigma, mean):
    """``mean`` is the distribution's mean, ``median`` its middle."""
    workload = Synthetic(
        num_requests=20_000, prompt_tokens={"kind": "lognormal", centre: 200, "sigma": sigma}, output_tokens=1
    )
    drawn = [len(r.prompt_token_ids) for r in workload.requests(10, 100_000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert np.std(np.log(drawn)) == pytest.approx(sigma, rel=0.03)


@pytest.mark.parametrize(
    "process, cv", [({"kind": "poisson"}, 1), ({"kind": "gamma", "cv": 3}, 3), ({"kind": "gamma", "cv": 0.5}, 0.5)]
)
def test_gaps_have_the_rate_and_variation_they_say(process, cv):
    """Mean gap 1 / rate, and the coefficient of variation asked for."""
    workload = Synthetic(num_requests=20_000, prompt_tokens=1, output_tokens=1, arrivals={**process, "rate_per_s": 4})
    gaps = np.diff([r.arrival_s for r in workload.requests(10, 100)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_what_does_not_fit_is_cut_with_a_count(caplog):
    """Prompts keep room for one output token; one warning says how many requests were changed."""
    workload = Synthetic(num_requests=4, prompt_tokens=64, output_tokens=32)
    with caplog.at_level(logging.WARNING):
        requests = list(workload.requests(100, 70))
    assert {(len(r.prompt_token_ids), r.params.max_tokens) for r in requests} == {(64, 6)}
    assert [r.getMessage() for r in caplog.records] == [
        "synthetic: 4 of 4 requests were cut to max_model_len=70 tokens"
    ]
    assert len(next(workload.requests(100, 5)).prompt_token_ids) == 4


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"num_requests": 0}, "num_requests must be an integer of at least 1"),
        ({"prompt_tokens": 0}, "prompt_tokens must be an integer of at least 1"),
        ({"prompt_tokens": True}, "prompt_tokens must be an integer"),
        ({"output_tokens": {"kind": "zipf"}}, "output_tokens.kind must be one of fixed, uniform, lognormal"),
        ({"output_tokens": {"kind": "uniform", "low": 9, "high": 2}}, "needs low and high with low <= high"),
        ({"output_tokens": {"kind": "uniform", "low": 1, "top": 2}}, "kind uniform has no top; it takes high, low"),
        ({"output_tokens": {"kind": "lognormal", "sigma": 1}}, "needs sigma and one of mean, median"),
        ({"output_tokens": {"kind": "lognormal", "sigma": 1, "mean": 2, "median": 2}}, "one of mean, median"),
        ({"output_tokens": {"kind": "lognormal", "sigma": -1, "mean": 2}}, "sigma must be a finite number above 0"),
        ({"arrivals": {"kind": "pareto"}}, "arrivals.kind must be one of closed, burst, poisson, gamma"),
        ({"arrivals": {"kind": "poisson"}}, "kind poisson takes rate_per_s, got nothing"),
        ({"arrivals": {"kind": "gamma", "rate_per_s": 1}}, "kind gamma takes cv and rate_per_s, got rate_per_s"),
        ({"arrivals": {"kind": "poisson", "rate_per_s": 0}}, "rate_per_s must be a finite number above 0"),
        ({"arrivals": {"kind": "burst", "rate_per_s": 1}}, "kind burst takes nothing else, got rate_per_s"),
        ({"arrivals": {"kind": "burst"}, "concurrency": 4}, "concurrency belongs to arrivals.kind=closed"),
        ({"concurrency": 0}, "concurrency must be an integer of at least 1 or null"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
    ],
)
def test_bad_options_say_what_is_allowed(bad, says):
    """Each names the field, and what it takes or got."""
    with pytest.raises(ConfigError, match=says):
        Synthetic(**bad)


def test_nulls_of_the_yaml_are_as_good_as_absent():
    """conf lists every field; an unused one is null there."""
    workload = Synthetic(arrivals={"kind": "poisson", "rate_per_s": 2.0, "cv": None})
    assert workload.arrivals == {"kind": "poisson", "rate_per_s": 2.0}
