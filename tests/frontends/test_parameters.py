"""What each parameter does to an answer, over real sockets; whole answers and streams alike."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import CHAT, COMPLETION, TEXT, Reply, post, spelled

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ROUTES = pytest.mark.parametrize("route", [COMPLETIONS, CHATS])
EOS = 257


@pytest.fixture(scope="module")
def hashed() -> Iterator[Server]:
    """Answers are hashes of what came before; one token in twenty is eos."""
    with serving(toy_engine(eos_every=20, num_blocks=1024, checks="cheap")) as running:
        yield running
        running.wait_idle()


def body(route: str, **fields: Any) -> dict[str, Any]:
    return {**(COMPLETION if route == COMPLETIONS else CHAT), "max_tokens": 12, **fields}


def merged(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together as a client would."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            choice = found.setdefault(part["index"], {"text": "", "finish_reason": None, "stop_reason": None})
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content", "")
            for name in ("finish_reason", "stop_reason"):
                assert choice[name] is None or part.get(name) is None, "a choice ends once"
                choice[name] = choice[name] or part.get(name)
            if part.get("token_ids") is not None:
                choice["token_ids"] = choice.get("token_ids", []) + part["token_ids"]
            for name, values in (part["logprobs"] or {}).items():
                choice.setdefault("logprobs", {}).setdefault(name, [])
                choice["logprobs"][name] += values or []
            for name in ("prompt_token_ids", "prompt_logprobs"):
                for holder in (part, event):
                    if name in holder:
                        assert name not in choice, "said once"
                        choice[name] = holder[name]
    return found


def whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices of a whole answer in the same form."""
    found = {}
    for part in answer["choices"]:
        choice = {"text": part["text"] if "text" in part else part["message"]["content"]}
        choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
        if part["logprobs"] is not None:
            choice["logprobs"] = {name: values or [] for name, values in part["logprobs"].items()}
        if "token_ids" in part:
            choice["token_ids"] = part["token_ids"]
        for name in ("prompt_token_ids", "prompt_logprobs"):
            for holder in (part, answer):
                if name in holder:
                    choice[name] = holder[name]
        found[part["index"]] = choice
    return found


def both(server: Server, route: str, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices of an answer, after checking that a stream says the same."""
    asked = body(route, **{"seed": 1, **fields})
    reply = post(server, route, asked)
    assert reply.status == 200, reply.data
    answer = reply.json()
    json.dumps(answer, allow_nan=False)
    events = post(server, route, asked, stream=True, stream_options={"include_usage": True}).events()
    assert whole(answer) == merged(events)
    assert events[-1]["choices"] == [] and events[-1]["usage"] == answer["usage"]
    return whole(answer)


def one(server: Server, route: str, **fields: Any) -> dict[str, Any]:
    return both(server, route, **fields)[0]


# ------------------------------------------------------------------------------------------------ streams and choices

SHAPES: list[dict[str, Any]] = [
    {}, {"n": 3}, {"echo": True}, {"return_token_ids": True}, {"stop": ["a", "é", "wörld"]}, {"prompt_logprobs": 2},
    {"echo": True, "n": 2, "return_token_ids": True, "prompt_logprobs": 0}, {"skip_special_tokens": False},
    {"include_stop_str_in_output": True, "stop": "o"}, {"temperature": 0}, {"repetition_penalty": 1.3, "presence_penalty": 1},
    {"min_tokens": 10}, {"ignore_eos": True, "max_tokens": 40}, {"structured_outputs": {"regex": "[a-f]{3,9}"}},
]  # fmt: skip


@ROUTES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_says_what_the_answer_says(
    hashed: Server, server: Server, route: str, shape: Any, logprobs: bool
) -> None:
    """For every field that changes what is shown, alone and together; with hashed tokens and with text."""
    if logprobs:
        shape = {**shape, **({"logprobs": 3} if route == COMPLETIONS else {"logprobs": True, "top_logprobs": 3})}
    for running in (hashed, server):
        both(running, route, seed=5, **shape)
        if route == COMPLETIONS:
            assert len(both(running, route, seed=5, prompt=["hi", [104, 105, 106], "é"], **shape)) == 3 * shape.get(
                "n", 1
            )


@ROUTES
def test_n_answers(hashed: Server, route: str) -> None:
    """Different texts with indices in order; each the one that the same seed gave with a smaller n."""
    three, two = (both(hashed, route, n=n, seed=3) for n in (3, 2))
    assert list(three) == [0, 1, 2]
    assert len({choice["text"] for choice in three.values()}) == 3
    assert [two[i]["text"] for i in range(2)] == [three[i]["text"] for i in range(2)]
    many = post(hashed, route, body(route, n=128, max_tokens=2)).json()
    assert [choice["index"] for choice in many["choices"]] == list(range(128))
    assert many["usage"]["completion_tokens"] <= 256


def test_too_many_answers_together(hashed: Server) -> None:
    """n alone is fine, times the prompts it is not."""
    reply = post(hashed, COMPLETIONS, body(COMPLETIONS, prompt=["x"] * 9, n=128))
    assert (reply.status, reply.error()["param"]) == (400, "n")


def test_best_of(hashed: Server) -> None:
    """The likeliest of those that were made, best first; all of them are paid for."""
    made = post(hashed, COMPLETIONS, body(COMPLETIONS, n=5, logprobs=0, seed=1)).json()
    best = post(hashed, COMPLETIONS, body(COMPLETIONS, n=2, best_of=5, seed=1)).json()

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    expected = sorted(made["choices"], key=mean, reverse=True)[:2]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"] == made["usage"]


def test_usage_on_every_chunk(server: Server) -> None:
    """Growing to the last; continuous_usage_stats alone does nothing."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = post(server, CHATS, CHAT, stream=True, stream_options=options).events()
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 5
    plain = post(server, CHATS, CHAT, stream=True, stream_options={"continuous_usage_stats": True}).events()
    assert all("usage" not in chunk for chunk in plain)


# ------------------------------------------------------------------------------------------------ log probabilities


def logged(server: Server, **fields: Any) -> dict[str, Any]:
    return one(server, COMPLETIONS, **fields)


def test_logprobs_of_a_completion(hashed: Server) -> None:
    """One of each list a token; the chosen one is there also when it is not among the best."""
    for k in (0, 1, 4, 20):
        choice = logged(hashed, logprobs=k, temperature=1.5, seed=4, skip_special_tokens=False, return_token_ids=True)
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {len(choice["token_ids"])}
        for token, value, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
            assert value <= 0 and 1 <= len(top) <= k + 1
            assert top[token] >= value if token == "" else top[token] == value  # several ids have no text
        assert any(len(top) == k + 1 for top in lists["top_logprobs"]) or k == 20


def test_logprobs_are_those_of_the_raw_logits(hashed: Server) -> None:
    """What the parameters of sampling allow does not change them; top_k = 1 gives no infinity."""
    plain = logged(hashed, logprobs=5, temperature=0, max_tokens=1)
    for fields in (
        {"top_k": 1},
        {"top_p": 0.01},
        {"temperature": 1, "top_k": 1},
        {"logit_bias": {"5": -100}},
        {"min_p": 1},
    ):
        found = logged(hashed, **{"logprobs": 5, "temperature": 0, "max_tokens": 1, **fields})
        assert plain["logprobs"]["top_logprobs"][0].items() <= found["logprobs"]["top_logprobs"][0].items()
    forced = logged(hashed, logprobs=1, allowed_token_ids=[7], max_tokens=3, ignore_eos=True)["logprobs"]
    assert all(-30 < value < 0 for value in forced["token_logprobs"])


def test_text_offsets_and_tokens_of_split_characters(server: Server) -> None:
    """Offsets count the characters before a token; a byte of one is shown as bytes."""
    choice = logged(server, logprobs=0, max_tokens=len(TEXT.encode()))
    lists, text = choice["logprobs"], choice["text"]
    assert text == TEXT
    place = len("Hello ")
    assert lists["tokens"][place : place + 4] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    assert lists["text_offset"][place : place + 5] == [place] * 4 + [place + 1]
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset] == token


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("fields", [{}, {"top_k": 1}, {"top_p": 0.01}, {"temperature": 0}, {"n": 2}], ids=str)
@pytest.mark.parametrize("prompt", ["abcd", [97, 98, 99, 100]])
def test_echo_with_logprobs(hashed: Server, prompt: Any, fields: dict[str, Any], max_tokens: int) -> None:
    """Prompt and answer in one: L + M entries, the first without a probability; 0 tokens is the prompt alone."""
    asked = {
        "prompt": prompt,
        "echo": True,
        "logprobs": 1,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": 2,
        **fields,
    }
    for choice in both(hashed, COMPLETIONS, **asked).values():
        lists = choice["logprobs"]
        assert choice["text"].startswith("abcd") and choice["finish_reason"] == "length"
        assert {name: len(values) for name, values in lists.items()} == dict.fromkeys(lists, 4 + max_tokens)
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert lists["tokens"][:4] == list("abcd") and lists["text_offset"][:4] == [0, 1, 2, 3]
        assert all(value < 0 for value in lists["token_logprobs"][1:])
        assert all(len(top) >= 1 for top in lists["top_logprobs"][1:])
    usage = post(hashed, COMPLETIONS, body(COMPLETIONS, **asked)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, max_tokens * fields.get("n", 1))


def test_the_probability_of_a_prompt_is_that_of_the_same_answer(hashed: Server) -> None:
    """What greedy decoding gave, asked again as a prompt: equal numbers, in small chunks and large, cold and warm."""
    first = logged(
        hashed, prompt="abcd", logprobs=2, temperature=0, max_tokens=9, return_token_ids=True, ignore_eos=True
    )
    tokens = [*b"abcd", *first["token_ids"]]
    for _ in range(2):
        again = logged(hashed, prompt=tokens, logprobs=2, echo=True, max_tokens=0)
        assert again["logprobs"]["token_logprobs"][4:] == first["logprobs"]["token_logprobs"]
        assert again["logprobs"]["top_logprobs"][4:] == first["logprobs"]["top_logprobs"]
    with serving(toy_engine(eos_every=20, max_num_batched_tokens=3)) as small:
        assert logged(small, prompt=tokens, logprobs=2, echo=True, max_tokens=0)["logprobs"] == again["logprobs"]


def test_logprobs_of_a_chat(server: Server) -> None:
    """Tokens with their bytes; joined, the bytes are the text."""
    choice = one(server, CHATS, logprobs=True, top_logprobs=2, max_tokens=39)
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == choice["text"] == spelled(39)
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in content)
    assert all(token["top_logprobs"][0]["logprob"] >= token["top_logprobs"][1]["logprob"] for token in content)
    assert one(server, CHATS, logprobs=True)["logprobs"]["content"][0]["top_logprobs"] == []


@ROUTES
def test_prompt_logprobs(hashed: Server, route: str) -> None:
    """vLLM's shape: null, then by token id, with ranks; the prompt's own token is always there."""
    choice = one(hashed, route, prompt_logprobs=2, return_token_ids=True)
    ids, found = choice["prompt_token_ids"], choice["prompt_logprobs"]
    assert len(found) == len(ids) and found[0] is None
    for token, entry in zip(ids[1:], found[1:], strict=True):
        assert 2 <= len(entry) <= 3 and entry[str(token)]["logprob"] <= 0
        assert sorted(one["rank"] for one in entry.values())[:2] == [1, 2]
        assert all(math.isfinite(one["logprob"]) for one in entry.values())
    assert ids == list(b"hi" if route == COMPLETIONS else b"user: hi\nassistant: ")


# ------------------------------------------------------------------------------------------------ what may come


@ROUTES
def test_min_tokens_holds_back_every_kind_of_end(hashed: Server, server: Server, route: str) -> None:
    """eos, stop tokens and stop strings."""
    ends = (post(hashed, route, body(route, seed=seed)).json()["choices"][0]["finish_reason"] for seed in range(40))
    seeds = [seed for seed, end in enumerate(ends) if end == "stop"][:3]
    assert seeds
    for seed in seeds:
        longer = one(hashed, route, seed=seed, min_tokens=12, return_token_ids=True)
        assert len(longer["token_ids"]) == 12 and EOS not in longer["token_ids"]
    held = one(server, route, stop="l", min_tokens=3)
    assert (held["text"], held["stop_reason"]) == ("Hel", "l")
    tokens = one(server, route, stop_token_ids=[ord("l"), ord("H")], min_tokens=4, max_tokens=30, return_token_ids=True)
    assert not {ord("l"), ord("H")} & set(tokens["token_ids"][:4])


@ROUTES
@pytest.mark.parametrize("include", [False, True])
def test_what_ended_an_answer_is_in_its_text_on_demand(server: Server, route: str, include: bool) -> None:
    """A stop string, and a stop token."""
    found = one(server, route, stop="lo 🙂", include_stop_str_in_output=include, max_tokens=30)
    assert (found["text"], found["stop_reason"]) == ("Hello 🙂" if include else "Hel", "lo 🙂")
    found = one(server, route, stop_token_ids=[ord("o")], include_stop_str_in_output=include, max_tokens=30)
    assert (found["text"], found["stop_reason"]) == ("Hello" if include else "Hell", ord("o"))
    assert found["finish_reason"] == "stop"


@ROUTES
def test_which_tokens_may_come(hashed: Server, route: str) -> None:
    """Allowed ids, biases and bad words, greedy and drawn."""
    for temperature in (0, 1):
        common = {"temperature": temperature, "seed": 1, "ignore_eos": True, "return_token_ids": True, "max_tokens": 30}
        assert set(one(hashed, route, allowed_token_ids=[65, 66, 67], **common)["token_ids"]) <= {65, 66, 67}
        assert set(one(hashed, route, logit_bias={"65": 100}, **common)["token_ids"]) == {65}
        plain = one(hashed, route, **common)["token_ids"]
        banned = {str(token): -100 for token in plain}
        assert not set(plain) & set(one(hashed, route, logit_bias=banned, **common)["token_ids"])
        allowed = {"allowed_token_ids": [65, 66], **common}
        assert set(one(hashed, route, bad_words=["A"], **allowed)["token_ids"]) == {66}
        text = one(hashed, route, bad_words=["AB", "BBB"], **allowed)["text"]
        assert "AB" not in text and "BBB" not in text and set(text) <= {"A", "B"}


@ROUTES
def test_what_contradicts_itself_ends_that_request_alone(hashed: Server, route: str) -> None:
    """Nothing is allowed: an error of this request; the one beside it is served."""
    reply = post(hashed, route, body(route, allowed_token_ids=[65], bad_words=["A"]))
    assert reply.status == 400 and "no token is left" in reply.error()["message"]
    for fields in ({"allowed_token_ids": [320]}, {"logit_bias": {"320": 1}}, {"min_tokens": 13}):
        reply = post(hashed, route, body(route, **fields))
        assert (reply.status, reply.error()["param"]) == (400, next(iter(fields)))
    assert post(hashed, route, body(route)).status == 200


@ROUTES
def test_penalties_change_answers_and_repeat(hashed: Server, route: str) -> None:
    """A repetition penalty counts the prompt too; presence and frequency the output alone."""
    common = {
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "max_tokens": 24,
        "allowed_token_ids": list(range(97, 105)),
    }
    plain = one(hashed, route, **common)["token_ids"]
    for name, value in (("presence_penalty", 2), ("frequency_penalty", 2), ("repetition_penalty", 50)):
        first, again = (one(hashed, route, **common, **{name: value})["token_ids"] for _ in range(2))
        assert first == again != plain
    even = one(hashed, route, frequency_penalty=2, **common)["token_ids"]
    assert max(map(even.count, set(even))) - min(map(even.count, set(even))) <= 2 < max(map(plain.count, set(plain)))


# ------------------------------------------------------------------------------------------------ structured output

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["age", "ok"],
    "additionalProperties": False,
}


@ROUTES
@pytest.mark.parametrize("n", [1, 3])
def test_json_of_a_schema(hashed: Server, route: str, n: int) -> None:
    """Each of n answers is complete JSON that fits, ends with stop, and is the same with the schema in vLLM's field."""
    schema = {"name": "person", "schema": PERSON, "strict": True}
    asked = {"n": n, "seed": 8, "max_tokens": 300}
    choices = both(hashed, route, response_format={"type": "json_schema", "json_schema": schema}, **asked)
    for choice in choices.values():
        data = json.loads(choice["text"])
        assert set(data) == {"age", "ok"} and 0 <= data["age"] <= 99 and isinstance(data["ok"], bool)
        assert choice["finish_reason"] == "stop"
    assert both(hashed, route, structured_outputs={"json": PERSON}, **asked) == choices


@ROUTES
@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-c]+x"}, "[0-9]{3}-[a-c]+x"), ({"choice": ["yes", "no", "é\"🙂"]}, "yes|no|é\"🙂"),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"), ({"regex": "(a|b)?"}, "(a|b)?"),
    ],
)  # fmt: skip
def test_expressions_choices_and_grammars(hashed: Server, route: str, structured: dict[str, Any], pattern: str) -> None:
    """The whole text fits, or is cut off by the limit."""
    for seed in range(4):
        choice = one(hashed, route, structured_outputs=structured, seed=seed, max_tokens=200)
        assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["text"]), choice


def test_any_json_object(hashed: Server) -> None:
    """It begins like one, whatever the model would say."""
    choice = one(hashed, CHATS, response_format={"type": "json_object"}, max_tokens=40, seed=2)
    assert choice["text"].lstrip()[0] == "{"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "("}, {"regex": "[z-a]"}, {"grammar": "start: nothing"}, {"grammar": " "}, {"grammar": "start: \"a"},
        {"json": "{"},
        {"json": "5"}, {"json": {"type": "nothing"}}, {"json": {"$ref": "http://127.0.0.1:1/x"}}, {"json": {"$ref": "#/nowhere"}},
        {"json": deep(40)}, {"json": deep(120)}, {"regex": "x" * 70_000}, {"json": "[" * 60_000},
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_grammars(hashed: Server, route: str, structured: dict[str, Any], stream: bool) -> None:
    """400 with one short line, soon, and the server goes on."""
    reply = post(hashed, route, body(route, structured_outputs=structured, stream=stream))
    assert reply.status == 400
    assert len(reply.error()["message"]) < 400
    assert post(hashed, route, body(route, max_tokens=1)).status == 200


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "((((a{1,900}){1,900}){1,900}){1,900}){1,900}"}, {"regex": "(a*)*b(a|b|ab)*c" * 200}, {"json": deep(60)},
        {"json": {"type": "string", "pattern": "(((x{1,999}){1,999}){1,999})"}}, {"regex": "(.*a.{30,60}){9}"},
        {"grammar": "start: a a a a\n" + "\n".join(f"a{'a' * i}: (a{'a' * (i + 1)})*" for i in range(40)) + f"\na{'a' * 40}: /x*/"},
        {"json": {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}},
        {"json": {"allOf": [{"oneOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(9)]} for i in range(9)]}},
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_hostile_grammars_cost_little(hashed: Server, structured: dict[str, Any]) -> None:
    """Served or refused, in bounded time; a stream beside them keeps its pace."""
    started = time.monotonic()
    reply = post(hashed, COMPLETIONS, body(COMPLETIONS, structured_outputs=structured, max_tokens=5))
    assert reply.status in (200, 400)
    assert time.monotonic() - started < 5
    assert post(hashed, COMPLETIONS, body(COMPLETIONS, max_tokens=1)).status == 200


@ROUTES
def test_what_structured_output_excludes(hashed: Server, route: str) -> None:
    """A grammar says where an answer ends."""
    reply = post(hashed, route, body(route, structured_outputs={"regex": "a"}, ignore_eos=True))
    assert (reply.status, reply.error()["param"]) == (400, "ignore_eos")
    assert one(hashed, route, structured_outputs={"regex": "abc"}, min_tokens=10)["text"] == "abc"


# ------------------------------------------------------------------------------------------------ prompts


def test_prompts_are_cut_from_the_left(hashed: Server) -> None:
    """truncate_prompt_tokens: the last so many; -1 leaves room for the answer."""
    asked = {"prompt": "abcdef", "return_token_ids": True, "max_tokens": 2}
    assert logged(hashed, truncate_prompt_tokens=3, **asked)["prompt_token_ids"] == list(b"def")
    assert logged(hashed, truncate_prompt_tokens=30, **asked)["prompt_token_ids"] == list(b"abcdef")
    assert logged(hashed, truncate_prompt_tokens=3, echo=True, **asked)["text"].startswith("def")
    reply = post(
        hashed, COMPLETIONS, {**COMPLETION, "prompt": "x" * 9000, "truncate_prompt_tokens": -1, "max_tokens": 5}
    )
    assert reply.json()["usage"]["prompt_tokens"] == 8192 - 5


def test_the_end_of_a_chat(hashed: Server) -> None:
    """A generation prompt, none, or the last message to be continued."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]

    def prompt(**fields: Any) -> str:
        asked = {"messages": messages, "return_token_ids": True, "max_tokens": 3, **fields}
        return bytes(one(hashed, CHATS, **asked)["prompt_token_ids"]).decode()

    assert prompt() == prompt(add_generation_prompt=True) == "user: hi\nassistant: Once upon\nassistant: "
    assert prompt(add_generation_prompt=False) == "user: hi\nassistant: Once upon\n"
    assert prompt(continue_final_message=True) == "user: hi\nassistant: Once upon"
    echoed = one(hashed, CHATS, messages=messages, continue_final_message=True, echo=True)["text"]
    plain = one(hashed, CHATS, messages=messages, continue_final_message=True)["text"]
    assert echoed == "Once upon" + plain
    empty = [*messages[:1], {"role": "assistant", "content": ""}]
    reply = post(hashed, CHATS, {**CHAT, "messages": empty, "continue_final_message": True})
    assert (reply.status, reply.error()["param"]) == (400, "messages")


def test_labels_reach_the_engine(hashed: Server) -> None:
    """Salt, priority, session and class; without them what means none of them."""
    seen = []
    submit = hashed.engine.submit
    hashed.engine.submit = lambda *args, **labels: (seen.append(labels), submit(*args, **labels))[1]  # type: ignore[method-assign]
    try:
        labels = {"cache_salt": "mine", "priority": -3, "session_id": "s", "stall_s": 1.5}
        post(hashed, COMPLETIONS, {**COMPLETION, **labels})
        post(hashed, CHATS, CHAT)
    finally:
        hashed.engine.submit = submit  # type: ignore[method-assign]
    nothing = {"cache_salt": "", "priority": 0, "session_id": "", "stall_s": None, "service_class": "", "client_id": ""}
    assert seen == [{**nothing, **labels}, nothing]


# ------------------------------------------------------------------------------------------------ other routes


def test_request_ids(server: Server) -> None:
    """A client's own comes back, on errors too; strange ones are replaced; every answer has one."""
    json_type = {"content-type": "application/json"}
    for path, data in (
        (COMPLETIONS, COMPLETION),
        (COMPLETIONS, {**COMPLETION, "stream": True}),
        (COMPLETIONS, {}),
        ("/nothing", None),
    ):
        for method in ("POST",) if data is not None else ("GET", "POST"):
            reply = Reply(server, method, path, data, headers={**json_type, "x-request-id": "my-id_1.2:3"})
            assert reply.headers.get_all("x-request-id") == ["my-id_1.2:3"]
    for strange in ("a b", "x" * 129, "é".encode().decode("latin-1"), ""):
        reply = Reply(server, "POST", COMPLETIONS, COMPLETION, headers={**json_type, "x-request-id": strange})
        assert reply.headers["x-request-id"] == reply.json()["id"]
    assert re.fullmatch("[0-9a-f]{32}", Reply(server, "GET", "/health").headers["x-request-id"])


def test_tokens_of_a_text_and_back(server: Server) -> None:
    """Texts, chats, names of tokens; and the text of ids."""
    for text in ("", "hi é🙂", "a\x00b"):
        answer = post(server, "/tokenize", {"prompt": text, "model": "toy"}).json()
        assert answer == {
            "count": len(text.encode()),
            "max_model_len": 8192,
            "tokens": list(text.encode()),
            "token_strs": None,
        }
        assert post(server, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    named = post(server, "/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert named["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    chat = {"messages": CHAT["messages"]}
    ids = [
        post(server, "/tokenize", {**chat, **more}).json()["tokens"] for more in ({}, {"add_generation_prompt": False})
    ]
    assert [bytes(each).decode() for each in ids] == ["user: hi\nassistant: ", "user: hi\n"]
    assert post(server, "/detokenize", {"tokens": [97, EOS]}).json()["prompt"] == "a<eos>"
    assert post(server, "/detokenize", {"tokens": [97, EOS], "skip_special_tokens": True}).json()["prompt"] == "a"


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/tokenize", {}, 400), ("/tokenize", {"prompt": 5}, 400), ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]},
        400),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404), ("/tokenize", {"messages": []}, 400), ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [-1]}, 400), ("/detokenize", {"tokens": [320]}, 400), ("/detokenize", {"tokens": [2**70]}, 400),
        ("/detokenize", {"tokens": "a"}, 400), ("/detokenize", {"tokens": [1], "x": 1}, 400),
    ],
)  # fmt: skip
def test_bad_tokenisation(server: Server, path: str, fields: dict[str, Any], status: int) -> None:
    """In OpenAI's shape."""
    reply = post(server, path, fields)
    assert (reply.status, bool(reply.error())) == (status, True)


def test_names_of_the_model() -> None:
    """Aliases are listed and served; any name at all only on demand."""
    with serving(toy_engine(text=TEXT), aliases=["gpt-x", "a/b"]) as server:
        assert [card["id"] for card in Reply(server, "GET", "/v1/models").json()["data"]] == ["toy", "gpt-x", "a/b"]
        assert Reply(server, "GET", "/v1/models/a/b").json()["id"] == "a/b"
        assert post(server, COMPLETIONS, {**COMPLETION, "model": "a/b"}).json()["model"] == "toy"
        assert post(server, COMPLETIONS, {**COMPLETION, "model": "c"}).status == 404
    with serving(toy_engine(text=TEXT), accept_any_model=True) as server:
        assert post(server, COMPLETIONS, {**COMPLETION, "model": "whatever/is asked"}).status == 200
        assert Reply(server, "GET", "/v1/models/whatever").status == 200
        assert [card["id"] for card in Reply(server, "GET", "/v1/models").json()["data"]] == ["toy"]


def test_about_the_server(server: Server) -> None:
    """Live, ready, version, load."""
    for path in ("/health", "/health/live", "/health/ready"):
        assert Reply(server, "GET", path).json() == {"status": "ok"}
    assert Reply(server, "GET", "/version").json()["version"]
    assert Reply(server, "GET", "/load").json() == {"server_load": 0}
