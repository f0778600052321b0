"""What a body may say: served as asked, or refused by the parameter's name; never an exception of another kind."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.frontends.protocol import ApiError, read_chat, read_completion
from core.types import SamplingParams

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: Any) -> Any:
    return read_completion(orjson.dumps({**COMPLETION, **fields}))


def chat(**fields: Any) -> Any:
    return read_chat(orjson.dumps({**CHAT, **fields}))


READERS = pytest.mark.parametrize("read", [completion, chat])


def refused(read: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults() -> None:
    """Completions: 16 tokens, as OpenAI's; chats: as many as fit."""
    assert completion().params() == SamplingParams(max_tokens=16)
    assert chat().params() == SamplingParams()


@READERS
def test_every_served_field_reaches_the_engine(read: Any) -> None:
    """What is accepted is used."""
    asked = {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": -3, "stop": ["a", "b"],
        "stop_token_ids": [1, 2], "ignore_eos": True,
    }  # fmt: skip
    expected = SamplingParams(**{**asked, "stop": ("a", "b"), "stop_token_ids": (1, 2)})
    assert read(**asked).params() == expected


@READERS
def test_null_is_absent(read: Any) -> None:
    """For every optional field."""
    names = (
        "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options",
        "n", "logprobs", "response_format", "user", "logit_bias", "store", "echo",
    )  # fmt: skip
    assert read(**dict.fromkeys(names)) == read()


@READERS
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.7"), ("temperature", True), ("temperature", -1), ("temperature", 2.1), ("temperature", [1]),
        ("top_p", 0), ("top_p", -0.1), ("top_p", 1.1), ("top_p", "1"), ("top_p", False),
        ("top_k", -2), ("top_k", 1.5), ("top_k", "3"), ("top_k", True),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True), ("max_tokens", 2.0),
        ("seed", 2**63), ("seed", 1.5), ("seed", "1"), ("seed", True),
        ("stop", ""), ("stop", [""]), ("stop", 5), ("stop", [5]), ("stop", ["a", "b", "c", "d", "e"]), ("stop", {}),
        ("stop_token_ids", 5), ("stop_token_ids", ["5"]), ("stop_token_ids", [1.0]), ("stop_token_ids", [True]),
        ("stop_token_ids", [1] * 129),
        ("ignore_eos", 1), ("ignore_eos", "true"), ("stream", "true"), ("stream", 1), ("stream_options", True),
        ("model", 5), ("model", None), ("model", ["m"]),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(read: Any, name: str, value: Any) -> None:
    """Wrong type or range: 400 with ``param``."""
    error = refused(read, **{name: value})
    assert error.param is not None
    assert error.param.split("[")[0] == name
    assert name in error.message


@READERS
@pytest.mark.parametrize(
    ("name", "unused", "used"),
    [
        ("n", 1, 2), ("n", 1, 0), ("n", 1, -1), ("n", 1, 100000), ("n", 1, True), ("best_of", 1, 3), ("echo", False, True),
        ("presence_penalty", 0, 0.5), ("presence_penalty", 0.0, False), ("frequency_penalty", 0, -1),
        ("repetition_penalty", 1.0, 1.1), ("logit_bias", {}, {"5": 1}), ("min_p", 0, 0.1),
        ("store", False, True), ("response_format", {"type": "text"}, {"type": "json_object"}),
    ],
)  # fmt: skip
def test_what_is_not_served_yet(read: Any, name: str, unused: Any, used: Any) -> None:
    """A value that means "not used" is fine; any other is refused by name."""
    assert read(**{name: unused}) == read()
    error = refused(read, **{name: used})
    assert (error.param, "not supported yet" in error.message) == (name, True)


@pytest.mark.parametrize(
    ("name", "unused", "used"),
    [
        ("tools", [], [{"type": "function"}]), ("tool_choice", "auto", "required"), ("logprobs", False, True),
        ("top_logprobs", 0, 5), ("modalities", ["text"], ["audio"]), ("audio", None, {}), ("functions", [], [1]),
        ("reasoning_effort", None, "high"),
    ],
)  # fmt: skip
def test_what_chat_does_not_serve_yet(name: str, unused: Any, used: Any) -> None:
    """The chat route's own."""
    assert chat(**{name: unused}) == chat(**{name: None}) == chat()
    assert refused(chat, **{name: used}).param == name


@pytest.mark.parametrize(("name", "used"), [("logprobs", 0), ("logprobs", 5), ("suffix", "x")])
def test_what_completions_do_not_serve_yet(name: str, used: Any) -> None:
    """The completion route's own."""
    assert completion(**{name: None}) == completion()
    assert refused(completion, **{name: used}).param == name


@READERS
def test_harmless_and_unknown_fields(read: Any) -> None:
    """Labels are ignored; what nobody knows is refused, so that a misspelt parameter is not silently dropped."""
    assert (
        read(user="u", metadata={"a": "b"}, service_tier="auto", safety_identifier="x", prompt_cache_key="k") == read()
    )
    assert refused(read, temperatur=0.5).param == "temperatur"
    assert refused(read, **{"x" * 5000: None}).param == "x" * 61 + "..."


@READERS
def test_stream_options(read: Any) -> None:
    """Only with a stream; only what is served."""
    assert read(stream=True, stream_options={"include_usage": True}).include_usage
    assert not read(stream=True, stream_options={}).include_usage
    assert not read(stream=True, stream_options={"include_usage": None, "continuous_usage_stats": False}).include_usage
    assert refused(read, stream_options={"include_usage": True}).param == "stream_options"
    error = refused(read, stream=True, stream_options={"continuous_usage_stats": True})
    assert error.param == "stream_options.continuous_usage_stats"
    assert refused(read, stream=True, stream_options={"include_usage": "yes"}).param == "stream_options.include_usage"
    assert refused(read, stream=True, stream_options={"x": 1}).param == "stream_options.x"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("hi", ["hi"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]), ([""], [""]), ([[]], [[]]), (["a", [1]], ["a", [1]]),
    ],
)  # fmt: skip
def test_prompts(prompt: Any, read: list[Any]) -> None:
    """One or several, each a text or token ids. Whether one is empty only the tokenizer can tell (it may add BOS)."""
    assert completion(prompt=prompt).prompt == read


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [], [1.5], [1, "a"], [True], [[1.0]], [[True]], [{}], [None], ["a"] * 129]
)
def test_wrong_prompts(prompt: Any) -> None:
    """Refused, with ``prompt`` named."""
    assert refused(completion, prompt=prompt).param == "prompt"


def test_messages() -> None:
    """Roles, text parts and what an answer's own message carries along."""
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "", "name": "bob"},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None, "annotations": []},
    ]
    rendered = [message.rendered() for message in chat(messages=messages).messages]
    assert rendered == [
        {"role": "system", "content": "d"},
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "x"},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"), (None, "messages"), ("hi", "messages"), ({}, "messages"), ([5], "messages[0]"), ([None], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": [], "text": "x"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "extra": 1}], "messages[0].extra"),
        (CHAT["messages"] + [{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[1].tool_calls"),
    ],
)  # fmt: skip
def test_wrong_messages(messages: Any, param: str) -> None:
    """Refused, with the place named."""
    assert refused(chat, messages=messages).param == param


def test_two_names_of_one_limit() -> None:
    """``max_completion_tokens`` is ``max_tokens``; two different values are a contradiction."""
    assert chat(max_completion_tokens=5).params().max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params().max_tokens == 5
    assert refused(chat, max_completion_tokens=5, max_tokens=6).param == "max_completion_tokens"
    assert refused(completion, max_completion_tokens=5).param == "max_completion_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"a": 1, x}', b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model":"m","prompt":"x","temperature":NaN}', b'{"model":"m","prompt":"x","temperature":Infinity}',
        b'{"model":"m","prompt":"x","temperature":1e400}', b'{"model":"m","prompt":"x","seed":' + b"9" * 5000 + b"}",
        b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model":"m","prompt":"x","metadata":' + b"[" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [read_completion, read_chat])
def test_bodies_that_are_no_requests(read: Any, body: bytes) -> None:
    """400, whatever it is; the message stays short."""
    with pytest.raises(ApiError) as caught:
        read(body)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    "model prompt messages max_tokens max_completion_tokens temperature top_p top_k seed stop stop_token_ids stream stream_options "
    "ignore_eos n logprobs tools response_format logit_bias user role content x".split()
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "x"]), JSON, max_size=4), max_size=3
)
BODIES = st.dictionaries(NAMES, JSON | MESSAGES, max_size=8)


@settings(max_examples=300, deadline=None)
@given(body=BODIES, base=st.sampled_from([{}, COMPLETION, CHAT]))
def test_any_json_is_a_request_or_a_client_error(body: dict[str, Any], base: dict[str, Any]) -> None:
    """No JSON value raises anything but an ``ApiError`` of 400 whose body is OpenAI's shape."""
    data = orjson.dumps({**base, **body})
    for read in (read_completion, read_chat):
        try:
            read(data).params()
        except ApiError as error:
            assert error.status == 400
            assert set(orjson.loads(error.body())["error"]) == {"message", "type", "param", "code"}
