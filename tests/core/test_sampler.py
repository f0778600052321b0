"""A draw depends on its row, its parameters and its uniform number alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import sampler as sampler_module
from core.sampler import NO_TOKEN, Sampler, cumulative
from core.types import SamplingBatch, SamplingParams
from core.uniform import uniform

VOCAB = 1777  # no multiple of a vector's width


def rows_of(count: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def batch_of(params, rows=None, seeds=None, branches=None, positions=None) -> SamplingBatch:
    count = len(params)
    return SamplingBatch(
        rows=list(range(count)) if rows is None else rows,
        params=params,
        seeds=list(range(count)) if seeds is None else seeds,
        branches=[0] * count if branches is None else branches,
        positions=[9] * count if positions is None else positions,
        histories=[()] * count,
        num_prompt_tokens=[0] * count,
        recorded_output_tokens=[None] * count,
    )


def draw(logits, params, **columns):
    token_ids, _, errors = Sampler().sample(logits, batch_of(params, **columns))
    assert errors == {}
    return token_ids


def probabilities(row: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """What numpy makes of temperature, top-k and top-p, the slow way: a sort of the whole vocabulary."""
    logits = row.double().numpy()
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
        weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-logits, kind="stable")
    if 0 < params.top_k < len(row):
        order = order[: params.top_k]
    sums = np.cumsum(weights[order])
    order = order[: int(np.searchsorted(sums, params.top_p * sums[-1])) + 1] if params.top_p < 1 else order
    kept = np.zeros(len(row))
    kept[order] = weights[order]
    return kept / kept.sum()


@pytest.mark.parametrize("top_k", [0, 1, 5, 300])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_distribution_is_the_slow_one(temperature, top_p, top_k):
    row = rows_of(1)[0]
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    sums = cumulative(row, float(row.max()), params)
    found = np.diff(sums.numpy(), prepend=0) / float(sums[-1])
    np.testing.assert_allclose(found, probabilities(row, params), atol=1e-12)


def test_frequencies_follow_the_distribution():
    """20,000 draws at neighbouring positions: chi-square over the tokens."""
    count = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -math.inf]])
    params = [SamplingParams(temperature=0.7)] * count
    drawn = draw(logits, params, rows=[0] * count, seeds=[1] * count, positions=list(range(count)))
    seen = np.bincount(drawn, minlength=5)
    wanted = probabilities(logits[0], params[0]) * count
    assert seen[4] == 0
    assert ((seen[:4] - wanted[:4]) ** 2 / wanted[:4]).sum() < 16.3  # p = 0.001 for 3 degrees of freedom


def test_draw_is_the_inverse_cdf_at_the_requests_uniform_number():
    logits = rows_of(1, 50)
    token = draw(logits, [SamplingParams()], seeds=[11], branches=[2], positions=[33])[0]
    chances = np.cumsum(probabilities(logits[0], SamplingParams()))
    assert token == int(np.searchsorted(chances, uniform(11, 2, 33), side="right"))


KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=2.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.7, top_k=40),
]


def test_a_row_is_bitwise_the_same_alone_and_in_any_batch():
    logits = rows_of(24, 49_153)
    params = [KINDS[i % len(KINDS)] for i in range(24)]
    for i in range(24):
        whole = cumulative(logits[i], float(logits[i].max()), params[i]) if params[i].temperature else None
        alone = cumulative(logits[i].clone(), float(logits[i].max()), params[i]) if params[i].temperature else None
        assert whole is None or torch.equal(whole, alone)
    together = draw(logits, params)
    order = np.random.default_rng(0).permutation(24)
    shuffled = draw(logits[order], [params[i] for i in order], seeds=order.tolist())
    assert shuffled == [together[i] for i in order]
    for i in range(24):
        assert draw(logits[i : i + 1], [params[i]], seeds=[i]) == [together[i]]


def test_seeded_row_does_not_change_with_its_neighbours():
    logits = rows_of(3)
    seeded = SamplingParams(temperature=0.8, seed=42)
    alone = draw(logits[:1], [seeded], seeds=[42])
    for other in KINDS:
        assert draw(logits, [seeded, other, other], seeds=[42, 7, 8])[:1] == alone
        assert draw(logits[[1, 0]], [other, seeded], seeds=[7, 42])[1:] == alone


def test_branches_of_one_row_differ_and_repeat():
    logits = torch.zeros(1, 500)
    params = [SamplingParams(seed=1)] * 8
    columns = {"rows": [0] * 8, "seeds": [1] * 8, "branches": list(range(8))}
    first = draw(logits, params, **columns)
    assert len(set(first)) == 8
    assert draw(logits, params, **columns) == first


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-320])
def test_tiny_temperature_is_greedy(temperature):
    logits = rows_of(20)
    greedy = draw(logits, [SamplingParams(temperature=0)] * 20)
    assert greedy == logits.argmax(-1).tolist()
    assert draw(logits, [SamplingParams(temperature=temperature)] * 20) == greedy


def test_top_k_one_is_greedy_even_among_ties():
    logits = torch.zeros(1, 40)
    assert draw(logits, [SamplingParams(top_k=1)]) == [0]
    assert draw(logits, [SamplingParams(temperature=0)]) == [0]


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 9_999_999])
def test_top_k_off(top_k):
    logits = rows_of(30)
    assert draw(logits, [SamplingParams(top_k=top_k)] * 30) == draw(logits, [SamplingParams()] * 30)


def test_ties_at_the_edge_go_to_smaller_ids():
    row = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    sums = cumulative(row, 2.0, SamplingParams(top_k=3))
    assert (np.diff(sums.numpy(), prepend=0) > 0).tolist() == [True, True, True, False, False]


def test_masked_tokens_are_never_drawn():
    """-inf rows (a bias, a grammar) mixed with greedy ones: no NaN, and only what is allowed."""
    logits = torch.full((4, 100), -math.inf)
    logits[:, [7, 9]] = torch.tensor([1.0, 1.5])
    logits[0, 7] = -100.0
    for seed in range(50):
        drawn = draw(logits, KINDS[:4], seeds=[seed] * 4)
        assert drawn[0] == drawn[1] == 9
        assert set(drawn) <= {7, 9}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_is_its_own_error(bad):
    logits = rows_of(3)
    good = draw(logits, KINDS[:3])
    logits[1, 5] = bad
    token_ids, logprobs, errors = Sampler().sample(logits, batch_of([*KINDS[:1], SamplingParams(logprobs=2), KINDS[2]]))
    assert list(errors) == [1] and "logits" in errors[1]
    assert token_ids == [good[0], NO_TOKEN, good[2]]
    assert logprobs == [None, None, None]


def test_a_row_with_nothing_allowed_is_an_error():
    _, _, errors = Sampler().sample(torch.full((1, 9), -math.inf), batch_of([SamplingParams()]))
    assert list(errors) == [0]


def test_nothing_to_sample():
    assert Sampler().sample(torch.zeros(0, 9), batch_of([])) == ([], None, {})


def test_greedy_batch_touches_logits_once(monkeypatch):
    def never(*args):
        raise AssertionError("a greedy row was filtered")

    monkeypatch.setattr(sampler_module, "cumulative", never)
    logits = rows_of(32)
    assert draw(logits, [SamplingParams(temperature=0, top_k=3, top_p=0.2)] * 32) == logits.argmax(-1).tolist()


def test_no_sort_without_top_p(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("the vocabulary was sorted")

    monkeypatch.setattr(torch.Tensor, "sort", never)
    monkeypatch.setattr(torch, "sort", never)
    real = torch.Tensor.topk
    asked: list[int] = []
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, k, *rest: asked.append(k) or real(self, k, *rest))
    draw(rows_of(2), [SamplingParams(top_k=40), SamplingParams()])
    assert asked == [40]


def test_logprobs_come_from_the_raw_logits():
    logits = rows_of(3)
    params = [SamplingParams(temperature=0.5, top_k=1, logprobs=3), SamplingParams(), SamplingParams(logprobs=0)]
    token_ids, logprobs, _ = Sampler().sample(logits, batch_of(params))
    assert logprobs is not None
    expected = logits.double().log_softmax(-1)
    first, nothing, plain = logprobs
    assert nothing is None
    assert first.token_id == token_ids[0]
    assert first.logprob == pytest.approx(float(expected[0, token_ids[0]]), abs=1e-12)
    assert [i for i, _ in first.top] == expected[0].topk(3).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-12)
    assert plain.top == () and plain.logprob == pytest.approx(float(expected[2, token_ids[2]]), abs=1e-12)


def test_logprobs_of_more_tokens_than_there_are():
    _, logprobs, _ = Sampler().sample(torch.zeros(1, 4), batch_of([SamplingParams(temperature=0, logprobs=9)]))
    assert logprobs is not None and len(logprobs[0].top) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(dtype):
    logits = rows_of(2).to(dtype)
    assert draw(logits, [SamplingParams(temperature=0)] * 2) == logits.argmax(-1).tolist()
    draw(logits, [SamplingParams(top_k=3), SamplingParams(top_p=0.5)])


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30),
    temperature=st.floats(0.0, 100.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(-1, 40),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_finite_row_gives_one_of_its_likely_tokens(values, temperature, top_p, top_k, seed):
    row = torch.tensor([values])
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    token = draw(row, [params], seeds=[seed])[0]
    if temperature == 0:
        assert token == int(row[0].argmax())
    else:
        assert probabilities(row[0], params)[token] > 0
