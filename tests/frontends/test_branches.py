"""``n``, ``best_of``, ``cache_salt`` and the prefix cache over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from core.frontends.answers import CompletionAnswer
from core.frontends.prepare import Asked
from core.frontends.protocol import read_completion
from core.text import ByteTokenizer
from core.types import Output, TokenLogprobs
from plugins.allocators.prefix import PrefixAllocator
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import COMPLETION, Reply, counters, post

SAMPLED = {"model": "toy", "prompt": "some prompt", "max_tokens": 6, "seed": 3, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Four sequences at a time; blocks of 16 are shared by content."""
    with serving(toy_engine(allocator=PrefixAllocator(), max_num_seqs=4)) as running:
        yield running
        running.wait_idle()


@pytest.mark.parametrize("n", [1, 3, 4, 9])
def test_n_choices_in_order_also_more_than_run_at_once(server: Server, n: int) -> None:
    """Branch k has the same text whatever n is, streamed or not; the prompt is counted once."""
    answer = post(server, "/v1/completions", SAMPLED, n=n).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(n))
    texts = [choice["text"] for choice in answer["choices"]]
    nine = [choice["text"] for choice in post(server, "/v1/completions", SAMPLED, n=9).json()["choices"]]
    assert texts == nine[:n] and len(set(nine)) > 6
    assert answer["usage"]["prompt_tokens"] == 11 and answer["usage"]["completion_tokens"] == 6 * n
    streamed = [""] * n
    for event in post(server, "/v1/completions", SAMPLED, n=n, stream=True).events():
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_two_prompts_with_two_choices_each_are_numbered_by_prompt(server: Server) -> None:
    both = post(server, "/v1/completions", SAMPLED, prompt=["first", "second"], n=2).json()["choices"]
    alone = [
        c
        for p in ("first", "second")
        for c in post(server, "/v1/completions", SAMPLED, prompt=p, n=2).json()["choices"]
    ]
    assert [c["index"] for c in both] == [0, 1, 2, 3]
    assert [c["text"] for c in both] == [c["text"] for c in alone]


def test_chat_streams_a_role_and_an_end_for_every_choice(server: Server) -> None:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "n": 3,
        "stream": True,
        "seed": 1,
    }
    events = [c for e in post(server, "/v1/chat/completions", body).events() for c in e["choices"]]
    for index in range(3):
        mine = [c for c in events if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"), ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 0}, "best_of"), ({"best_of": 129}, "best_of"),
        ({"best_of": "2"}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"), ({"n": 2, "best_of": 1}, "best_of"),
        ({"cache_salt": 7}, "cache_salt"), ({"cache_salt": "x" * 257}, "cache_salt"), ({"cache_salt": ""}, "cache_salt"),
    ],
)  # fmt: skip
def test_bad_numbers_and_salts_are_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    reply = post(server, "/v1/completions", {**SAMPLED, **fields})
    assert (reply.status, reply.error()["param"]) == (400, param)


def test_best_of_gives_n_choices_of_the_branches_that_n_would_give(server: Server) -> None:
    answer = post(server, "/v1/completions", SAMPLED, n=2, best_of=5).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 5 * 6  # all branches were computed
    branches = {choice["text"] for choice in post(server, "/v1/completions", SAMPLED, n=5).json()["choices"]}
    assert {choice["text"] for choice in answer["choices"]} <= branches


def test_best_of_ranks_by_mean_logprob_within_each_prompt() -> None:
    """Two prompts of three branches, two of each given: the mean counts, not the sum, and prompts do not mix."""
    request = read_completion(b'{"model": "m", "prompt": ["a", "b"], "n": 2, "best_of": 3}')
    answer = CompletionAnswer("m", Asked(request, [[1], [2]], ["", ""], request.params(), {}), ByteTokenizer())
    scores = {0: [-3.0], 1: [-1.0, -1.0, -1.0, -1.0], 2: [-2.0], 3: [-0.5], 4: [-9.0], 5: [-7.0, -7.0]}
    for choice, logprobs in scores.items():
        for i, logprob in enumerate(logprobs):
            end = "length" if i == len(logprobs) - 1 else None
            answer.add(
                choice,
                Output(choice // 3, choice, choice % 3, (1,), str(choice), end, logprobs=(TokenLogprobs(1, logprob),)),
            )
    texts = [choice["text"][0] for choice in json.loads(answer.whole())["choices"]]
    assert texts == ["1", "2", "3", "5"]


def test_a_repeated_prompt_is_cached_within_its_salt_until_the_cache_is_reset(server: Server) -> None:
    """64 tokens are four blocks, of which the last is computed again; another salt finds nothing, nor does anyone after a reset."""

    def cached(**fields: Any) -> int:
        body = {**COMPLETION, "prompt": list(range(64)), "max_tokens": 2, **fields}
        usage = post(server, "/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens"] == 64
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached(), cached(cache_salt="me"), cached(cache_salt="me"), cached()] == [0, 48, 0, 48, 48]
    assert [cached(prompt=list(range(64)), n=3), cached(stream=False)] == [48, 48]
    assert counters(server)['quire:kv_tokens{model_name="toy",term="cached"}'] > 0
    reply = Reply(server, "POST", "/reset_prefix_cache")
    assert (reply.status, reply.json()) == (200, {"status": "ok"})
    assert [cached(), cached(), cached(cache_salt="me")] == [0, 48, 0]


def test_an_allocator_without_a_cache_says_that_there_is_nothing_to_reset() -> None:
    with serving(toy_engine()) as server:
        reply = Reply(server, "POST", "/reset_prefix_cache")
        assert reply.status == 400 and "keeps no cache" in reply.error()["message"]
        assert Reply(server, "GET", "/reset_prefix_cache").status == 405
