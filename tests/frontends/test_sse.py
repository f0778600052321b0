"""Server-sent events, whatever the text: other people's parsers get it back, however the bytes are cut on their way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import httpx
import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from core.frontends.answers import ChatAnswer, CompletionAnswer, error_events, refuse_bad
from core.frontends.fields import ApiError
from core.frontends.prepare import prepare
from core.frontends.protocol import read_chat, read_completion
from core.frontends.streaming import EventStream
from core.types import Output, TokenLogprobs
from tests.frontends.toys import serving, toy_engine
from tests.frontends.web import CHAT, COMPLETION, post

EVIL = (
    "\n\n data: [DONE]\n\ndata:x\r\r\n\0\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\ufeff\ufffe\U0010ffff: id: 5\nevent: error\nretry: 1\n"
    '\x7f\\u2028"\\ é🙂你'
)
PARTS = ("", "data: ", "data: [DONE]\n\n", "\n\n", "\r\n\r\n", "\r", ":", "<here>", '"', "\\", "\u2028", "\x85", EVIL)
LETTERS = st.sampled_from(EVIL) | st.characters(exclude_categories=("Cs",))
TEXTS = st.text(LETTERS, max_size=12) | st.sampled_from(PARTS)
ENGINE = toy_engine()
FAST = settings(max_examples=300, deadline=None)


def asked(route: str, **fields: Any) -> Any:
    base, read = (COMPLETION, read_completion) if route == "completions" else (CHAT, read_chat)
    return prepare(
        read(orjson.dumps({**base, "stream": True, **fields})), ENGINE.tokenizer, ENGINE.model, ENGINE.limits
    )


def output(branch: int, text: str, last: bool, logprobs: bool) -> Output:
    scores = (TokenLogprobs(65, -0.5, ((65, -0.5),)),) if logprobs else ()
    return Output(0, branch, branch, (65,), text, "length" if last else None, logprobs=scores)


def streamed(route: str, pieces: Sequence[Sequence[str]], logprobs: bool, usage: bool) -> bytes:
    """The bytes of an answer whose choices get these pieces of text, in turn."""
    fields: dict[str, Any] = {"n": len(pieces)}
    if usage:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if logprobs:
        fields |= {"logprobs": 1} if route == "completions" else {"logprobs": True, "top_logprobs": 1}
    shape = CompletionAnswer if route == "completions" else ChatAnswer
    answer = shape('m\u2028\n"', asked(route, **fields), ENGINE.tokenizer)
    data = answer.opening()
    for step in range(max(map(len, pieces))):
        now = [
            (b, output(b, own[step], step + 1 == len(own), logprobs)) for b, own in enumerate(pieces) if step < len(own)
        ]
        data += answer.events(now)
    return data + answer.closing()


def cut(data: bytes, places: Sequence[int]) -> Iterator[bytes]:
    """The bytes in parts, in the middle of characters too."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    yield from (data[start:end] for start, end in pairwise(ends))


def texts_of(chunks: Sequence[dict[str, Any]], num: int) -> list[str]:
    found = [""] * num
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return found


@FAST
@given(
    route=st.sampled_from(["completions", "chat"]),
    pieces=st.lists(st.lists(TEXTS, min_size=1, max_size=4), min_size=1, max_size=3),
    logprobs=st.booleans(), usage=st.booleans(), places=st.lists(st.integers(0, 10_000), max_size=30),
)  # fmt: skip
def test_any_text_comes_back(route: str, pieces: Any, logprobs: bool, usage: bool, places: list[int]) -> None:
    """Through the decoder of OpenAI's client, in parts; and through a client that splits decoded text into lines."""
    data = streamed(route, pieces, logprobs, usage)
    expected = ["".join(own) for own in pieces]
    events = list(SSEDecoder().iter_bytes(cut(data, places)))
    assert [event.event for event in events] == [None] * len(events)
    assert events.pop().data == "[DONE]"
    assert texts_of([json.loads(event.data) for event in events], len(pieces)) == expected
    lines = [line for line in data.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines) and len(lines) == len(events) + 1
    assert texts_of([json.loads(line[6:]) for line in lines[:-1]], len(pieces)) == expected


@FAST
@given(message=TEXTS, places=st.lists(st.integers(0, 1000), max_size=10))
def test_any_error_comes_back(message: str, places: list[int]) -> None:
    """As the event before the end."""
    data = error_events(ApiError(503, message))
    error, done = SSEDecoder().iter_bytes(cut(data, places))
    assert (json.loads(error.data)["error"]["message"], done.data) == (message, "[DONE]")
    assert len([line for line in data.decode().splitlines() if line]) == 2


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_the_worst_text_over_a_socket(route: str) -> None:
    """A model that spells it: whole, streamed to OpenAI's client, and by lines of httpx, they all say the same."""
    base = COMPLETION if route == "/v1/completions" else CHAT
    body = {**base, "max_tokens": 3 * len(EVIL.encode()), "temperature": 0}
    with serving(toy_engine(text=EVIL)) as server:
        choice = post(server, route, body).json()["choices"][0]
        whole = choice["text"] if "text" in choice else choice["message"]["content"]
        assert whole == EVIL * 3
        assert texts_of(post(server, route, body, stream=True).events(), 1) == [whole]
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            create = client.completions.create if "prompt" in base else client.chat.completions.create
            chunks = [chunk.model_dump(exclude_none=True) for chunk in create(**{**body, "stream": True})]
        assert texts_of(chunks, 1) == [whole]
        with httpx.stream("POST", server.url + route, json={**body, "stream": True}) as reply:
            lines = [line for line in reply.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        assert texts_of([json.loads(line.removeprefix("data: ")) for line in lines], 1) == [whole]


def test_text_that_came_with_an_error_is_not_lost() -> None:
    """A reader that fell behind finds both at once: first what was made in time, then why there is no more."""

    class Late(list):
        def __aiter__(self) -> Late:
            return self

        async def __anext__(self) -> Any:
            if not self:
                raise StopAsyncIteration
            return self.pop(0)

        def __enter__(self) -> Late:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def choice(self, output: Output) -> int:
            return output.branch

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(10)

    cut_off = Output(0, 0, 0, (), "", "abort", error="the request took longer than 1 s")
    stream = Late([[output(0, "in ", False, False), output(0, "time", False, False), cut_off]])
    answer = CompletionAnswer("toy", asked("completions"), ENGINE.tokenizer)
    asyncio.run(EventStream(stream, answer, refuse_bad)({"type": "http"}, receive, send))  # type: ignore[arg-type]
    *chunks, error, done = SSEDecoder().iter_bytes(iter(sent))
    assert texts_of([json.loads(chunk.data) for chunk in chunks], 1) == ["in time"]
    assert (json.loads(error.data)["error"]["message"], done.data) == (cut_off.error, "[DONE]")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d"])
def test_half_a_character_is_no_text(text: str) -> None:
    """In a request: 400 in the words of the JSON reader. An answer cannot have one: bytes that are no text become U+FFFD."""
    with serving(toy_engine()) as server:
        for field in ("prompt", "stop", "model"):
            assert post(server, "/v1/completions", {**COMPLETION, field: text}).status == 400
