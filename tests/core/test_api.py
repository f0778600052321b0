"""``core.build(...)`` from Python."""

from __future__ import annotations

import threading

import pytest

import core
from core.api import Completion
from core.types import ConfigError, PolicyError, RequestError, SamplingParams

TOY = ["executor=toy", "cache.num_blocks=64", "cache.block_size=4", "checks=full"]
GREEDY = {"max_tokens": 6, "temperature": 0}


@pytest.fixture
def quire():
    with core.build(TOY) as built:
        yield built
        built.engine.assert_idle()


def test_text_and_token_ids_one_prompt_or_several(quire):
    (one,) = quire.generate("hello", GREEDY)
    assert isinstance(one, Completion) and len(one.token_ids) == 6 and one.finish_reason == "length"
    assert one.num_prompt_tokens == 5 and one.num_cached_tokens == 0
    ids = list(b"hello")
    assert quire.generate(ids, GREEDY) == quire.generate([ids], GREEDY) == quire.generate(["hello"], GREEDY) == [one]
    assert quire.generate(["hello", [1, 2], "hello"], GREEDY)[2] == one
    assert quire.generate([]) == []


def test_answers_come_in_the_order_of_the_prompts(quire):
    answers = quire.generate(["a", "bb", "ccc"], [{"max_tokens": n, "temperature": 0} for n in (5, 1, 3)])
    assert [len(answer.token_ids) for answer in answers] == [5, 1, 3]
    assert [answer.num_prompt_tokens for answer in answers] == [1, 2, 3]


def test_branches_are_completions_of_their_own_in_order(quire):
    params = {"max_tokens": 6, "seed": 7, "n": 3}
    answers = quire.generate(["a", "b"], params)
    assert len(answers) == 6
    assert quire.generate(["a", "b"], params) == answers
    assert quire.generate("a", {**params, "n": 1}) == answers[:1]


def test_text_is_that_of_the_tokens_and_stops_are_cut():
    with core.build([*TOY, "executor.text='one two. '"]) as quire:
        (plain,) = quire.generate("x", {"max_tokens": 9})
        assert plain.text == "one two. "
        (cut,) = quire.generate("x", {"max_tokens": 9, "stop": "two"})
        assert (cut.text, cut.finish_reason, cut.stop_reason) == ("one ", "stop", "two")


def test_parameters_as_python_writes_them(quire):
    """Lists, words and a mapping for a structure; the prompt's probabilities."""
    (answer,) = quire.generate(
        "a", {**GREEDY, "structure": {"regex": "[ab]{6}"}, "bad_words": ["ab"], "prompt_logprobs": 1}
    )
    assert set(answer.text) <= {"a", "b"} and "ab" not in answer.text and answer.prompt_logprobs == ()
    (answer,) = quire.generate("abc", {**GREEDY, "allowed_token_ids": [65, 66], "logprobs": 2, "prompt_logprobs": 1})
    assert set(answer.token_ids) <= {65, 66} and len(answer.logprobs) == 6
    assert [one.token_id for one in answer.prompt_logprobs] == list(b"bc")
    with pytest.raises(RequestError, match="structure takes one kind"):
        quire.generate("a", {"structure": {}})
    with pytest.raises(RequestError, match="regex cannot be used"):
        quire.generate("a", {"structure": {"regex": "("}})


def test_chat_goes_through_the_template(quire):
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = quire.chat(messages, GREEDY)
    prompt = quire.engine.tokenizer.chat(messages)
    assert answer.token_ids == quire.generate(quire.engine.tokenizer.encode(prompt, False), GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", ""], None, "prompt 1: the prompt cannot be empty"),
        ("a", {"temprature": 1}, "temprature: there is no such sampling parameter"),
        ("a", {"max_tokens": 10**6}, "prompt 0: max_tokens is 1000000"),
        (["a", 3], None, "prompt 1 must be text or a list of token ids"),
        ([[1], [99999]], None, "prompt 1: prompt token ids"),
        (["a", "b"], [GREEDY], "1 params for 2 prompts"),
        ("a", SamplingParams(temperature=float("nan")), "prompt 0: temperature"),
    ],
)
def test_a_bad_request_is_refused_before_any_starts(quire, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        quire.generate(prompts, params)
    assert not quire.engine.has_work() and quire.engine.stats()["steps"] == 0


def test_threads_take_turns(quire):
    expected = {text: quire.generate(text, GREEDY) for text in ("a", "b", "c", "d")}
    answers = {}
    threads = [threading.Thread(target=lambda t=t: answers.update({t: quire.generate(t, GREEDY)})) for t in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == expected


def test_bad_overrides_and_closing_twice():
    with pytest.raises(ConfigError, match="allocator=nope"):
        core.build(["allocator=nope"])
    quire = core.build(TOY)
    quire.close()
    quire.close()


def test_an_interrupted_call_leaves_nothing_for_the_next(quire, monkeypatch):
    step = quire.engine.step

    def interrupted():
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(quire.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quire.generate(["a", "b"], {"max_tokens": 50})
    monkeypatch.setattr(quire.engine, "step", step)
    assert len(quire.generate("hello", GREEDY)) == 1
    assert not quire.engine.has_work()


def test_a_failed_start_tears_down(monkeypatch):
    from core.executors.toy import ToyExecutor

    closed = []
    monkeypatch.setattr(ToyExecutor, "close", lambda self: closed.append(self))

    def fails(self):
        raise PolicyError("cannot warm up")

    monkeypatch.setattr(ToyExecutor, "warm_up", fails)
    with pytest.raises(PolicyError, match="cannot warm up"):
        core.build(TOY)
    assert len(closed) == 1
