"""Log-likelihoods of SmolLM2 over HTTP are transformers' own to 1e-4, asked as lm-eval asks; grammars on a real vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import core
from core.fetch import FetchError, fetch_model
from tests.frontends.toys import Server
from tests.frontends.web import post

TEXT = (
    "Rivers carried timber to the mills, and mills turned rags into paper. Every town that had a press soon had a paper, "
    "and every paper a debate — naïve or not 🙂."
)
CASES = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a potato"),
    ("2 + 2 =", " 4"),
    ("", TEXT),
]


@pytest.fixture(scope="module")
def quire() -> Iterator[Any]:
    try:
        fetch_model()
    except FetchError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    with core.build(["cache.num_blocks=128", "num_threads=1", "max_num_batched_tokens=24"]) as built:
        yield built


@pytest.fixture(scope="module")
def server(quire: Any) -> Iterator[Server]:
    running = Server(quire.engine, served_model_name="default")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def expected(quire: Any) -> Any:
    """From token ids: for each but the first (log probability, whether it is the likeliest), in float64 from fp32 logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(fetch_model(), dtype=torch.float32).eval()

    @torch.inference_mode()
    def score(ids: list[int]) -> list[tuple[float, bool]]:
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return [(float(row[token]), int(row.argmax()) == token) for row, token in zip(logprobs, ids[1:], strict=False)]

    return score


def tokens_of(quire: Any, context: str, continuation: str) -> tuple[list[int], int]:
    encode = quire.engine.tokenizer.encode
    ids, num_context = encode(context + continuation), len(encode(context))
    return (ids, num_context) if num_context else ([0, *ids], 1)  # lm-eval puts eos before an empty context


def test_loglikelihoods_as_lm_eval_asks_for_them(quire: Any, server: Server, expected: Any) -> None:
    """A list of token prompts, max_tokens=1, logprobs=1, echo: slices of token_logprobs, and greedy by the best of top_logprobs."""
    asked = [tokens_of(quire, *case) for case in CASES]
    body = {
        "model": "default",
        "prompt": [ids for ids, _ in asked],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
    }
    for _ in range(2):  # again, when everything could have been cached
        choices = post(server, "/v1/completions", body).json()["choices"]
        for choice, (ids, num_context) in zip(choices, asked, strict=True):
            lists, truth = choice["logprobs"], expected(ids)
            assert len(lists["token_logprobs"]) == len(ids) + 1
            found = lists["token_logprobs"][num_context:-1]
            assert found == pytest.approx([value for value, _ in truth[num_context - 1 :]], rel=1e-4, abs=1e-4)
            greedy = [
                value == max(top.values())
                for value, top in zip(found, lists["top_logprobs"][num_context:-1], strict=True)
            ]
            assert greedy == [is_best for _, is_best in truth[num_context - 1 :]]


def test_offsets_cut_the_text_into_its_tokens(quire: Any, server: Server) -> None:
    body = {"model": "default", "prompt": TEXT, "max_tokens": 4, "logprobs": 0, "echo": True, "temperature": 0}
    choice = post(server, "/v1/completions", body).json()["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(TEXT) and offsets == sorted(offsets)
    for token, start in zip(choice["logprobs"]["tokens"], offsets, strict=True):
        assert token.startswith("bytes:") or choice["text"][start:].startswith(token)


def test_json_of_a_schema_on_a_real_vocabulary(server: Server) -> None:
    """Valid, complete, and the same alone and beside others; eos comes when the text is complete."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "minimum": 0, "maximum": 10**8},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Name a city and how many people live there, as JSON."}],
        "max_tokens": 60,
        "n": 3,
        "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    }
    choices = post(server, "/v1/chat/completions", body).json()["choices"]
    for choice in choices:
        data = json.loads(choice["message"]["content"])
        assert set(data) == {"city", "people"} and isinstance(data["people"], int) and choice["finish_reason"] == "stop"
    body |= {"response_format": None, "structured_outputs": {"regex": "[A-Z][a-z]{2,9} é🙂[0-9]"}}
    for choice in post(server, "/v1/chat/completions", body).json()["choices"]:
        assert re.fullmatch("[A-Z][a-z]{2,9} é🙂[0-9]", choice["message"]["content"])


def test_bad_words_do_not_come_in_either_spelling(server: Server) -> None:
    body = {"model": "default", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    plain = post(server, "/v1/completions", body).json()["choices"][0]["text"]
    assert "Paris" in plain
    assert "Paris" not in post(server, "/v1/completions", body, bad_words=["Paris"]).json()["choices"][0]["text"]
