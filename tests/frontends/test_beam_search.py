"""``use_beam_search`` and ``length_penalty`` over HTTP, on both routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plugins.allocators.prefix import PrefixAllocator
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import post
from tests.toy import Work, make_engine, run

BEAMS = {"model": "toy", "prompt": [1, 2, 3, 4, 5], "max_tokens": 6, "use_beam_search": True, "return_token_ids": True}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "use_beam_search": True}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(toy_engine(allocator=PrefixAllocator(), max_num_seqs=4)) as running:
        yield running
        running.wait_idle()


def from_python(n: int, beams: int, length_penalty: float = 1.0) -> list[list[int]]:
    result = run(make_engine(), [Work((1, 2, 3, 4, 5), 6, n=n, beams=beams, length_penalty=length_penalty)])
    return [result.tokens[(0, branch)] for branch in range(n)]


@pytest.mark.parametrize(
    ("fields", "beams"), [({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5), ({}, 1), ({"n": 6, "length_penalty": 0.3}, 6)]
)
def test_the_n_best_answers_in_order(server: Server, fields: dict[str, Any], beams: int) -> None:
    """Those of the engine; only their tokens are counted, and the prompt once."""
    answer = post(server, COMPLETIONS, BEAMS, **fields).json()
    n = fields.get("n", 1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(n))
    tokens = [choice["token_ids"] for choice in answer["choices"]]
    assert tokens == from_python(n, beams, fields.get("length_penalty", 1.0))
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, sum(map(len, tokens)))


def test_prompts_search_side_by_side(server: Server) -> None:
    alone = post(server, COMPLETIONS, BEAMS, n=3).json()["choices"]
    both = post(server, COMPLETIONS, BEAMS, n=3, prompt=[[1, 2, 3, 4, 5], [9, 8]]).json()["choices"]
    assert [choice["token_ids"] for choice in both[:3]] == [choice["token_ids"] for choice in alone]
    assert [choice["index"] for choice in both] == list(range(6))


def test_a_chat_searches_with_n_beams(server: Server) -> None:
    answer = post(server, CHATS, CHAT, n=4, logprobs=True, top_logprobs=2, return_token_ids=True).json()
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 4
    sums = [sum(one["logprob"] for one in choice["logprobs"]["content"]) for choice in answer["choices"]]
    assert sums == sorted(sums, reverse=True)  # all of one length
    assert all(len(one["top_logprobs"]) == 2 for choice in answer["choices"] for one in choice["logprobs"]["content"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"), ({"temperature": 0.7}, "temperature"), ({"top_p": 0.5}, "top_p"), ({"top_k": 3}, "top_k"),
        ({"length_penalty": 12}, "length_penalty"), ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"n": 33}, "n"), ({"stop": "x"}, "stop"),
        ({"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"), ({"presence_penalty": 1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "structure"),
    ],
)  # fmt: skip
def test_what_goes_with_no_beam_search_is_refused_by_name(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = post(server, path, BEAMS if path == COMPLETIONS else CHAT, **fields)
    assert (reply.status, reply.error()["param"]) == (400, param)


def test_best_of_below_n_is_refused(server: Server) -> None:
    reply = post(server, COMPLETIONS, BEAMS, n=3, best_of=2)
    assert (reply.status, reply.error()["param"]) == (400, "best_of")
