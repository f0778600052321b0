"""What can be told from a request alone is refused at once, naming the field, the value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from core.types import RequestError, SamplingParams, Structure
from tests.toy import VOCAB, Work, make_engine, run

GOOD = SamplingParams(max_tokens=4)


@pytest.fixture
def engine():
    return make_engine(max_model_len=32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, -0.01, "0.7", True, None])
def test_a_temperature_must_be_finite_and_not_negative(engine, value: Any) -> None:
    with pytest.raises(RequestError, match="temperature must be a finite number") as caught:
        engine.submit((1,), attrs.evolve(GOOD, temperature=value))
    assert caught.value.param == "temperature"
    engine.assert_idle()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("top_p", [0, -0.1, 1.1, math.nan, "1"]),
        ("top_k", [-2, 1.5, "3", True]),
        ("max_tokens", [-1, 0, 1.5, 10**12, "4"]),
        ("n", [0, -1, 1.5, 100_000]),
        ("seed", [1.5, 2**63, "1"]),
        ("logprobs", [-1, 21, VOCAB, 1.5]),
        ("stop", [("",), ("a", "b", "c", "d", "e"), ("x" * 2000,), (5,)]),
        ("stop_token_ids", [(VOCAB,), (-1,), (1.5,), 5]),
        ("allowed_token_ids", [(VOCAB,), (-1,), (), (True,), 5]),
        (
            "logit_bias",
            [{VOCAB: 1}, {-1: 1}, {"1": 1}, {1: math.nan}, {1: 101}, {1: True}, [1], dict.fromkeys(range(1025), 1)],
        ),
        ("bad_words", [((VOCAB,),), ((),), (5,), "x", ((1,),) * 1025, ((1,) * 1025,)]),
        ("min_p", [-0.1, 1.1, math.nan, True]),
        ("repetition_penalty", [0, -1, math.inf, math.nan, 101, "1"]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("min_tokens", [-1, 1.5, True, 5]),
        ("prompt_logprobs", [-1, 21, 1.5]),
        ("structure", ["x", Structure("xml", "x"), Structure("regex", 5)]),
    ],
)
def test_values_out_of_range_are_refused(engine, field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=field) as caught:
            engine.submit((1,), attrs.evolve(GOOD, **{field: value}))
        assert caught.value.param == field


@pytest.mark.parametrize("prompt", [(), (VOCAB,), (-1,), (1.5,), (True,), tuple(range(32)), tuple(range(300))])
def test_prompts_that_cannot_be_served_are_refused(engine, prompt: tuple) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(prompt, GOOD)
    assert caught.value.param == "prompt"


def test_the_longest_prompt_and_answer_that_fit_are_served(engine) -> None:
    result = run(engine, [Work(tuple(range(31)), 1), Work((1,), 31)])
    assert set(result.reason.values()) == {"length"}


def test_max_tokens_beyond_max_model_len_is_refused_with_the_numbers(engine) -> None:
    with pytest.raises(RequestError, match="max_tokens is 23, but a prompt of 10 tokens leaves 22 of the 32 tokens"):
        engine.submit(tuple(range(10)), attrs.evolve(GOOD, max_tokens=23))


def test_an_absent_max_tokens_means_up_to_max_model_len(engine) -> None:
    request = engine.submit(tuple(range(10)), SamplingParams(temperature=0))
    tokens = 0
    while engine.has_work():
        tokens += sum(len(o.token_ids) for o in engine.step().outputs if o.request_id == request)
    assert tokens == 22


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1, 9_999_999])
def test_top_k_that_filters_nothing_is_accepted(engine, top_k: int) -> None:
    engine.submit((1,), attrs.evolve(GOOD, top_k=top_k))
