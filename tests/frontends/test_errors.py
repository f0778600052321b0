"""What a newcomer reads after a mistake: which field, what is allowed, what came."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontends.toys import Server
from tests.frontends.web import CHAT, COMPLETION, Reply, post

KINDS = "must be a string, a list of strings, a list of token ids or a list of token id lists"
SAID: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "unrecognized request argument: temprature (did you mean temperature?)"),
    ({"messages": []}, "messages",
     "unrecognized request argument: messages (a completion takes a prompt; chats go to /v1/chat/completions)"),
    ({"temperature": "hot"}, "temperature", "temperature: must be a number, got 'hot'"),
    ({"temperature": 3}, "temperature", "temperature: must be at least 0 and at most 2, got 3"),
    ({"top_p": 0}, "top_p", "top_p: must be above 0 and at most 1, got 0"),
    ({"n": 129}, "n", "n: must be at least 1 and at most 128, got 129"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens: must be an integer, got 1.5"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: must be at least 1, or 0 with echo=true, got 0"),
    ({"max_tokens": 8191}, "max_tokens", "max_tokens is 8191, but a prompt of 2 tokens leaves 8190 of the 8192 tokens of max_model_len"),
    ({"seed": 2**63}, "seed", "seed: must be below 9223372036854775808, got 9223372036854775808"),
    ({"stream": "yes"}, "stream", "stream: must be true or false, got 'yes'"),
    ({"stop": ["a"] * 5}, "stop", "stop: at most 4 stop strings, got 5"),
    ({"prompt": {}}, "prompt", f"prompt: {KINDS}, got {{}}"),
    ({"prompt": ["x"] * 129}, "prompt", "prompt: at most 128 prompts, got 129"),
    ({"prompt": [400]}, "prompt", "prompt token ids must be integers from 0 to 319, got 400"),
    ({"logit_bias": {"400": 1}}, "logit_bias", "logit_bias must be by token ids from 0 to 319, got 400"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids: cannot be empty, got []"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "stop_token_ids: must have at most 128 items, got 129"),
    ({"cache_salt": "a b"}, "cache_salt", "cache_salt: must have only printable characters without space, got 'a b'"),
    ({"stall_s": -1, "session_id": "s"}, "stall_s", "stall_s: must be at least 0 and at most 86400, got -1"),
    ({"suffix": "x"}, "suffix", "suffix='x' is not supported; allowed is \"\" or null"),
    ({"guided_regex": "a"}, "guided_regex", "guided_regex='a' is not supported; allowed is null; structured_outputs takes its place"),
    ({"response_format": "json"}, "response_format", "response_format: must be an object, got 'json'"),
    ({"response_format": {"type": "xml"}}, "response_format.type",
     "response_format.type: must be 'text', 'json_object' or 'json_schema', got 'xml'"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "structured_outputs.json: must be an object, got 5"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), SAID, ids=lambda value: str(value)[:40])
def test_messages_of_completions(server: Server, fields: dict[str, Any], param: str, message: str) -> None:
    error = post(server, "/v1/completions", {**COMPLETION, **fields}).error()
    assert (error["param"], error["message"]) == (param, message)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": "x"}, "prompt", "unrecognized request argument: prompt (a chat takes messages)"),
        ({"messages": "hi"}, "messages", "messages: must be a list, got 'hi'"),
        ({"messages": []}, "messages", "messages: cannot be empty, got []"),
        ({"messages": [5]}, "messages[0]", "messages[0]: must be an object, got 5"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing required parameter: messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role",
         "messages[0].role: must be 'system', 'developer', 'user' or 'assistant', got 'king'"),
        ({"tools": [1]}, "tools", "tools=[1] is not supported; allowed is [] or null"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "top_logprobs: must be at least 0 and at most 20, got 21"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages",
         "the prompt has 9018 tokens, but max_model_len is 8192 tokens and at least one must be left for the answer"),
    ],
    ids=str,
)  # fmt: skip
def test_messages_of_chats(server: Server, fields: dict[str, Any], param: str, message: str) -> None:
    error = post(server, "/v1/chat/completions", {**CHAT, **fields}).error()
    assert (error["param"], error["message"]) == (param, message)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "Expected token ':'"),
        ({"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs.json", "Invalid type: foo"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}},
         "response_format.json_schema", "Invalid type: foo"),
    ],
    ids=str,
)  # fmt: skip
def test_grammars_say_what_is_wrong_with_them(server: Server, fields: dict[str, Any], param: str, said: str) -> None:
    """By the field that the client wrote, in one line."""
    error = post(server, "/v1/completions", {**COMPLETION, **fields}).error()
    assert error["param"] == param
    assert said in error["message"] and "\n" not in error["message"]


def test_an_unknown_model_is_told_which_there_are(server: Server) -> None:
    message = "the model 'gpt-4' is not served here; allowed: toy, default"
    assert post(server, "/v1/completions", COMPLETION, model="gpt-4").error()["message"] == message
    assert Reply(server, "GET", "/v1/models/gpt-4").error()["message"] == message


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("POST", "/completions", "there is no route /completions (did you mean /v1/completions?); GET /openapi.json has them all"),
        ("POST", "/v1/completions/", "there is no route /v1/completions/ (did you mean /v1/completions?); GET /openapi.json has them all"),
        ("GET", "/", "there is no route /; GET /openapi.json has them all"),
        ("GET", "/v1/completions", "the route /v1/completions does not take GET; allowed: POST"),
    ],
)  # fmt: skip
def test_wrong_routes_say_where_to_look(server: Server, method: str, path: str, message: str) -> None:
    assert Reply(server, method, path).error()["message"] == message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty, not a JSON object"),
        (b"[1]", "the body must be a JSON object, got [1]"),
        (b'{"model": "toy",}', "the body is not valid JSON: trailing comma"),
        (b"model=toy", "the body is not valid JSON: unexpected character"),
    ],
)
def test_wrong_bodies(server: Server, body: bytes, said: str) -> None:
    assert Reply(server, "POST", "/v1/completions", body).error()["message"].startswith(said)
    message = Reply(server, "POST", "/v1/completions", body, headers={}).error()["message"]
    assert message == "Content-Type must be application/json, got none"


def test_a_compressed_body_is_told_that_it_cannot_be(server: Server) -> None:
    """415, not bad JSON."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    reply = Reply(server, "POST", "/v1/completions", b"\x1f\x8b\x08", headers)
    assert (reply.status, reply.error()["message"]) == (
        415,
        "Content-Encoding must be identity or left out, got 'gzip'",
    )
