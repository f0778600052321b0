"""Other people's judges: OpenAI's client with strict validation of what it gets, and schemathesis on our own OpenAPI document."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import BaseModel

from core.frontends.openapi import document
from core.frontends.protocol import ChatRequest, CompletionRequest
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import CHAT, TEXT, Reply, spelled

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def strict(server: Server) -> Iterator[openai.OpenAI]:
    """Refuses answers that do not fit OpenAI's types exactly."""
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20, _strict_response_validation=True
    ) as it:
        yield it


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"n": 3}, {"best_of": 3, "n": 2}, {"logprobs": 5}, {"logprobs": 0}, {"echo": True}, {"stop": ["wör", "x"]},
        {"suffix": ""},
        {"logit_bias": {"72": -100}, "presence_penalty": 1, "frequency_penalty": -1, "seed": 3, "user": "me", "top_p": 0.5},
        {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"prompt": [[1], [2, 3]]}, {"max_tokens": 3, "temperature": 0},
    ],
    ids=str,
)  # fmt: skip
def test_completions_fit_openais_types(strict: openai.OpenAI, fields: dict[str, Any]) -> None:
    """Every parameter of OpenAI's completions."""
    answer = strict.completions.create(**{"model": "toy", "prompt": "hi", **fields})
    assert isinstance(answer, BaseModel)
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    assert (
        answer.usage is not None
        and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    )
    if "logprobs" in fields:
        lists = answer.choices[0].logprobs
        assert lists is not None and len(lists.tokens or []) == 16 == len(lists.top_logprobs or [])


CHATS: list[dict[str, Any]] = [
    {}, {"n": 3}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 20}, {"stop": "wör", "max_tokens": 40}, {"seed": 1},
    {"response_format": {"type": "json_object"}}, {"response_format": {"type": "text"}},
    {"max_completion_tokens": 3, "max_tokens": 3},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, "max_tokens": 40},
    {"logit_bias": {"72": -100}, "presence_penalty": 1, "frequency_penalty": 1, "metadata": {"a": "b"}, "service_tier": "auto"},
]  # fmt: skip


@pytest.mark.parametrize("fields", CHATS, ids=str)
def test_chats_fit_openais_types(strict: openai.OpenAI, fields: dict[str, Any]) -> None:
    """Every parameter of OpenAI's chats that is about text; the stream joins to the same."""
    asked = {**CHAT, **fields}
    answer = strict.chat.completions.create(**asked)
    texts = [""] * len(answer.choices)
    contents: list[Any] = [[] for _ in texts]
    reasons: list[list[str]] = [[] for _ in texts]
    *chunks, last = list(strict.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
            contents[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
    assert texts == [choice.message.content for choice in answer.choices]
    assert reasons == [[choice.finish_reason] for choice in answer.choices]
    assert (last.choices, last.usage) == ([], answer.usage)
    for choice, content in zip(answer.choices, contents, strict=True):
        expected = [] if choice.logprobs is None else choice.logprobs.content or []
        assert [one.token for one in content] == [one.token for one in expected]
        assert [one.logprob for one in content] == [one.logprob for one in expected]


def test_the_clients_parse_helper_gets_objects(strict: openai.OpenAI) -> None:
    """``chat.completions.parse`` with a pydantic class: the schema it sends is kept to."""

    class Weather(BaseModel):
        hot: bool
        kind: str

    with serving(toy_engine(eos_every=30)) as hashed:
        client = openai.OpenAI(base_url=hashed.url + "/v1", api_key="none", max_retries=0, timeout=20)
        for seed in range(20):
            asked = {"model": "toy", "messages": CHAT["messages"], "seed": seed, "max_tokens": 400}
            answer = client.chat.completions.create(
                **asked, response_format=openai.lib._parsing._completions.type_to_response_format_param(Weather)
            )  # type: ignore[arg-type]
            if answer.choices[0].finish_reason == "stop":
                assert Weather.model_validate_json(answer.choices[0].message.content or "")
                break
        else:
            pytest.fail("no answer was complete")


def test_streams_of_completions_join(strict: openai.OpenAI, client: openai.OpenAI) -> None:
    """The loose client: OpenAI's own type has no null finish_reason, which its own service sends."""
    chunks = list(client.completions.create(model="toy", prompt="hi", max_tokens=30, logprobs=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == spelled(30)
    tokens = [token for chunk in chunks for token in (chunk.choices[0].logprobs.tokens or [])]  # type: ignore[union-attr]
    whole = strict.completions.create(model="toy", prompt="hi", max_tokens=30, logprobs=1)
    assert tokens == whole.choices[0].logprobs.tokens  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ the document


def test_the_document_says_what_is_served(server: Server) -> None:
    """The route gives what is built; every field of the classes is in it, and every route exists."""
    served = Reply(server, "GET", "/openapi.json").json()
    assert served["openapi"] == "3.1.0" and served["paths"].keys() == document("x")["paths"].keys()
    schemas = served["components"]["schemas"]
    for name, model in (("CompletionRequest", CompletionRequest), ("ChatRequest", ChatRequest)):
        assert set(model.model_fields) <= set(schemas[name]["properties"])
    for path, methods in served["paths"].items():
        for method in methods:
            reply = Reply(server, method.upper(), path.replace("{model}", "toy"), None if method == "get" else {})
            assert reply.status not in (404, 405), path


def judge(server: Server, mode: str, examples: int) -> dict[str, int]:
    """Run schemathesis over every operation: no 5xx, answers as documented, and what does not fit is refused."""
    import schemathesis
    from schemathesis.checks import CHECKS, load_all_checks
    from schemathesis.generation import GenerationMode

    names = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    load_all_checks()
    checks = CHECKS.get_by_names(names + ["negative_data_rejection"] * (mode == "negative"))
    seen: dict[str, int] = {}

    def one(case: Any) -> None:
        response = case.call(timeout=20)
        case.validate_response(response, checks=checks)
        key = f"{case.operation.label} {response.status_code}"
        seen[key] = seen.get(key, 0) + 1

    tries = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for result in schemathesis.openapi.from_url(server.url + "/openapi.json").get_all_operations():
        operation = result.ok()
        if mode == "positive" or (
            operation.method == "post" and operation.body
        ):  # there must be something to get wrong
            tries(given(operation.as_strategy(generation_mode=GenerationMode(mode)))(one))()
    return seen


def judged() -> Any:
    """A server whose answers are short, however long they may be, and that answers to any name."""
    return serving(toy_engine(text=TEXT, checks="cheap", max_model_len=256), accept_any_model=True)


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis_finds_nothing(mode: str) -> None:
    """A small run; the slow set has the large one."""
    with warnings.catch_warnings(), judged() as server:
        warnings.simplefilter("ignore")
        seen = judge(server, mode, 60)  # of which about a quarter is served: a whole float is no integer here
        assert any(key.endswith("400") for key in seen)
        assert mode == "negative" or any(key == "POST /v1/completions 200" for key in seen), seen
        server.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_schemathesis_finds_nothing_in_a_thousand_tries(mode: str) -> None:
    """Per operation."""
    with warnings.catch_warnings(), judged() as server:
        warnings.simplefilter("ignore")
        judge(server, mode, 1000)
        server.wait_idle()
