"""What a body may say: served as asked, or refused by the parameter's name; never an exception of another kind."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.frontends.protocol import ApiError, read_chat, read_completion
from core.types import SamplingParams, Structure

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
        "stop_token_ids": [1, 2], "ignore_eos": True, "n": 3, "min_tokens": 4, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": -1, "frequency_penalty": 1, "logit_bias": {"5": 1, "07": -100}, "allowed_token_ids": [5, 7],
        "prompt_logprobs": 3, "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    changed = {
        "stop": ("a", "b"),
        "stop_token_ids": (1, 2),
        "logit_bias": {5: 1.0, 7: -100.0},
        "allowed_token_ids": (5, 7),
    }
    expected = SamplingParams(**{**asked, **changed})
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
        ("n", 0), ("n", -1), ("n", 129), ("n", 100000), ("n", True), ("n", 1.5), ("n", "2"),
        ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", ["a"]), ("cache_salt", True), ("cache_salt", "x" * 257),
        ("ignore_eos", 1), ("ignore_eos", "true"), ("stream", "true"), ("stream", 1), ("stream_options", True),
        ("model", 5), ("model", None), ("model", ["m"]),
        ("n", 0), ("n", -1), ("n", 129), ("n", True), ("n", 1.0), ("min_tokens", -1), ("min_tokens", 1.5), ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0), ("repetition_penalty", "1"), ("repetition_penalty", 101), ("presence_penalty", 2.1),
        ("presence_penalty", True), ("frequency_penalty", -2.1), ("logit_bias", {"abc": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.5": 1}), ("logit_bias", {"1": "x"}), ("logit_bias", {"1": True}), ("logit_bias", {"1": 101}),
        ("logit_bias", [1]), ("logit_bias", {"1": 1, "01": 2}), ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", 5), ("bad_words", [""]), ("bad_words", "x"),
        ("bad_words", ["x"] * 129), ("bad_words", ["x" * 257]), ("prompt_logprobs", -1), ("prompt_logprobs", 21),
        ("skip_special_tokens", 1), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("cache_salt", ""),
        ("cache_salt", "a b"), ("cache_salt", "x" * 257), ("cache_salt", "\x00"), ("priority", 1.5), ("priority", 2**31),
        ("echo", "yes"),
        ("return_token_ids", 1), ("session_id", ""), ("session_id", 5), ("session_id", "a b"), ("session_id", "x" * 257),
        ("session_id", "🙂"), ("service_class", ""), ("service_class", ["a"]), ("service_class", "a\n"),
        ("stall_s", 1.0), ("stall_s", "1"), ("stall_s", -1), ("stall_s", True), ("stall_s", 86_401), ("stall_s", 1e308),
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
        ("store", False, True),
        ("spaces_between_special_tokens", True, False), ("guided_regex", None, "a+"),
    ],
)  # fmt: skip
def test_what_is_not_served(read: Any, name: str, unused: Any, used: Any) -> None:
    """A value that means "not used" is fine; any other is refused by name."""
    assert read(**{name: unused}) == read()
    error = refused(read, **{name: used})
    assert (error.param, "not supported" in error.message) == (name, True)


@pytest.mark.parametrize(
    ("name", "unused", "used"),
    [
        ("tools", [], [{"type": "function"}]), ("tool_choice", "auto", "required"), ("best_of", 1, 2), ("modalities", ["text"],
        ["audio"]), ("audio", None, {}), ("functions", [], [1]),
        ("reasoning_effort", None, "high"),
    ],
)  # fmt: skip
def test_what_chat_does_not_serve(name: str, unused: Any, used: Any) -> None:
    """The chat route's own."""
    assert chat(**{name: unused}) == chat(**{name: None}) == chat()
    assert refused(chat, **{name: used}).param == name


@READERS
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": 1}, "use_beam_search"), ({"length_penalty": 2}, "length_penalty"),
        ({"length_penalty": True, "use_beam_search": True}, "length_penalty"),
        ({"length_penalty": 11, "use_beam_search": True}, "length_penalty"),
        ({"length_penalty": "1", "use_beam_search": True}, "length_penalty"), ({"use_beam_search": True, "n": 2, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 33}, "n"),
    ],
)  # fmt: skip
def test_beam_searches_that_cannot_be(read: Any, fields: dict[str, Any], param: str) -> None:
    """Neither the switch nor the penalty is guessed at, and there is nothing to stream."""
    assert refused(read, **fields).param == param


@READERS
def test_n_is_the_number_of_beams(read: Any) -> None:
    """As vLLM has it: n beams, n answers."""
    assert read(use_beam_search=False, length_penalty=1.0) == read()
    params = read(use_beam_search=True, n=4, length_penalty=0.5).params()
    assert (params.beam_width, params.n, params.length_penalty) == (4, 4, 0.5)
    assert read().params().beam_width is None


def test_best_of_is_the_number_of_beams_where_it_is_given() -> None:
    """The completion route's own: of best_of beams the n best answers, ranked by the search itself, not by mean probability."""
    request = completion(use_beam_search=True, n=2, best_of=5)
    assert (request.params().beam_width, request.params().n, request.num_branches, request.num_logprobs) == (
        5,
        2,
        2,
        None,
    )


def test_what_completions_do_not_serve() -> None:
    """The completion route's own."""
    assert completion(suffix=None) == completion(suffix="") == completion()
    assert refused(completion, suffix="x").param == "suffix"
    assert refused(completion, top_logprobs=1).param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 21}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"), ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"), ({"logprobs": "5"}, "logprobs"),
    ],
)  # fmt: skip
def test_completions_that_contradict_themselves(fields: dict[str, Any], param: str) -> None:
    """Fields that depend on each other."""
    assert refused(completion, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logprobs": 1},
        "logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)  # fmt: skip
def test_chats_that_contradict_themselves(fields: dict[str, Any], param: str) -> None:
    """Fields that depend on each other."""
    assert refused(chat, **fields).param == param


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@READERS
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure("json_object", "")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
         Structure("json_schema", orjson.dumps(SCHEMA).decode())),
        ({"structured_outputs": {"json": SCHEMA}}, Structure("json_schema", orjson.dumps(SCHEMA).decode())),
        ({"structured_outputs": {"json": "{}"}}, Structure("json_schema", "{}")),
        ({"structured_outputs": {"json_object": True}}, Structure("json_object", "")),
        ({"structured_outputs": {"regex": "a+"}}, Structure("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structure("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "start: x"}, "response_format": {"type": "text"}}, Structure("grammar", "start: x")),
    ],
)  # fmt: skip
def test_structured_output(read: Any, fields: dict[str, Any], expected: Structure | None) -> None:
    """Two ways to ask for it; the order of a schema's properties is kept."""
    assert read(**fields).params().structure == expected


@READERS
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"), ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"), ({"structured_outputs": {"x": 1}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_wrong_structured_output(read: Any, fields: dict[str, Any], param: str) -> None:
    """Refused by name."""
    assert (refused(read, **fields).param or "").split(".")[0] == param


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
    assert not read(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage
    assert read(stream=True, stream_options={"continuous_usage_stats": True, "include_usage": True}).continuous_usage
    error = refused(read, stream=True, stream_options={"include_obfuscation": True})
    assert error.param == "stream_options.include_obfuscation"
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
    "ignore_eos n logprobs tools response_format logit_bias user role content x best_of echo top_logprobs prompt_logprobs "
    "structured_outputs bad_words allowed_token_ids min_tokens truncate_prompt_tokens cache_salt priority "
    "use_beam_search length_penalty".split()
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
