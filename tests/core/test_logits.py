"""What parameters do to logits: transformers' own processors agree, numpy and torch agree, and histories are what count."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from core.logits import apply, edits_for
from core.sampler import NO_TOKEN, Sampler, cumulative, edited
from core.types import UNSAMPLABLE, SamplingBatch, SamplingParams

V, EOS = 200, frozenset({7, 11})
PROMPT, OUTPUT = [1, 2, 3, 2, 50], [9, 9, 4, 2, 9]


def batch(*params: SamplingParams, output: list[int] | None = None, constraints: tuple = ()) -> SamplingBatch:
    history = PROMPT + (OUTPUT if output is None else output)
    count = len(params)
    return SamplingBatch(
        rows=list(range(count)),
        params=params,
        seeds=[1] * count,
        branches=[0] * count,
        positions=[len(history)] * count,
        histories=[history] * count,
        num_prompt_tokens=[len(PROMPT)] * count,
        recorded_output_tokens=[None] * count,
        constraints=constraints,
    )


def row(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 4


def changed(params: SamplingParams, output: list[int] | None = None) -> np.ndarray:
    edits = edits_for(batch(params, output=output), 0, V, EOS)
    assert edits is not None
    by_numpy, by_torch = apply(row().numpy(), edits), edited(row(), edits).double().numpy()
    np.testing.assert_allclose(by_torch, by_numpy, rtol=1e-5)
    return by_torch


IDS = torch.tensor([PROMPT + OUTPUT])


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        (SamplingParams(repetition_penalty=1.7), RepetitionPenaltyLogitsProcessor(1.7)),
        (SamplingParams(repetition_penalty=0.5), RepetitionPenaltyLogitsProcessor(0.5)),
        (SamplingParams(min_tokens=6), MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, sorted(EOS))),
        (SamplingParams(bad_words=((5,), (2, 9, 8), (4, 2, 9, 6), (9,), (1, 1))),
         NoBadWordsLogitsProcessor([[5], [2, 9, 8], [4, 2, 9, 6], [9], [1, 1]])),
        (SamplingParams(logit_bias={3: 2.5, 9: -100.0}), SequenceBiasLogitsProcessor([[[3], 2.5], [[9], -100.0]])),
    ],
    ids=["repetition", "repetition below 1", "min_tokens", "bad_words", "logit_bias"],
)  # fmt: skip
def test_transformers_processors_agree(params, processor) -> None:
    expected = processor(IDS, row()[None].clone())[0].double().numpy()
    np.testing.assert_allclose(changed(params), expected, rtol=1e-6)


@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_min_p_leaves_what_transformers_leaves(min_p: float, temperature: float) -> None:
    scaled = row()[None].double() / temperature
    expected = MinPLogitsWarper(min_p)(IDS, scaled)[0].softmax(-1) if min_p else scaled[0].softmax(-1)
    sums = cumulative(row(), float(row().max()), SamplingParams(temperature=temperature, min_p=min_p))
    np.testing.assert_allclose(np.diff(sums.numpy(), prepend=0) / float(sums[-1]), expected.numpy(), atol=1e-12)


def test_presence_and_frequency_count_the_output_alone() -> None:
    """OpenAI's formula: mu - count * frequency - (count > 0) * presence."""
    found = changed(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25))
    expected = row().double().numpy()
    for token, count in ((9, 3), (4, 1), (2, 1)):
        expected[token] -= 0.5 - 0.25 * count
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_min_tokens_ends_exactly() -> None:
    """Five tokens are there: the sixth may end it with min_tokens=5, not with 6; the request's own stop tokens count."""
    params = SamplingParams(min_tokens=5, stop_token_ids=(60,))
    assert not len(edits_for(batch(params), 0, V, EOS).banned)
    longer = edits_for(batch(attrs.evolve(params, min_tokens=6)), 0, V, EOS)
    assert set(longer.banned.tolist()) == {7, 11, 60}


def test_plain_requests_have_no_edits() -> None:
    assert edits_for(batch(SamplingParams(temperature=0.3, top_p=0.5, seed=3)), 0, V, EOS) is None


KINDS = [
    {}, {"repetition_penalty": 1.3}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"logit_bias": {3: 5.0}},
    {"min_tokens": 9},
    {"allowed_token_ids": (5, 6, 7, 100)}, {"bad_words": ((9,), (9, 4))}, {"min_p": 0.2}, {"top_k": 3, "repetition_penalty": 2.0},
]  # fmt: skip
MIXES = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([0.0, 0.7, 1.5])), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(mix=MIXES)
def test_a_row_is_drawn_alike_alone_and_in_any_company(mix) -> None:
    params = [SamplingParams(temperature=t, logprobs=2, **fields) for fields, t in mix]
    logits = torch.stack([row(i) for i in range(len(params))])
    raw = logits.clone()
    tokens, logprobs, errors = Sampler(EOS).sample(logits, batch(*params))
    assert not errors and torch.equal(raw, logits), "edits must not touch the batch's logits"
    for i, one in enumerate(params):
        alone, own, _ = Sampler(EOS).sample(logits[i : i + 1], batch(one))
        assert (alone, own) == ([tokens[i]], [logprobs[i]])


class Broken:
    def allowed(self, vocab_size: int) -> np.ndarray:
        raise ZeroDivisionError


def test_one_rows_failure_is_its_own() -> None:
    """A mask that raises, one that leaves nothing, NaN logits: three errors, and the fourth row is drawn as ever."""
    params = (SamplingParams(temperature=0),) * 4
    params = (params[0], attrs.evolve(params[1], allowed_token_ids=(5,), bad_words=((5,),)), *params[2:])
    logits = torch.stack([row(0), row(1), torch.full((V,), float("nan")), row(3)])
    tokens, _, errors = Sampler(EOS).sample(logits, batch(*params, constraints=(Broken(), None, None, None)))
    assert tokens == [NO_TOKEN] * 3 + [int(row(3).argmax())]
    assert errors[0] == "sampling failed: ZeroDivisionError"
    assert errors[1].startswith(UNSAMPLABLE)
    assert "no usable logits" in errors[2]
