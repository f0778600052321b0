"""What the server answers, over real sockets, through OpenAI's own client and by hand."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from typing import Any

import openai
import pytest

from core.types import SamplingParams
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import CHAT, COMPLETION, Reply, counters, post, spelled


def test_models(server: Server, client: openai.OpenAI) -> None:
    """The served model, by list and by name; others are not found."""
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    assert client.models.retrieve("default").id == "default"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"


def test_completion(client: openai.OpenAI) -> None:
    """Text, reason and usage, 16 tokens by default."""
    answer = client.completions.create(model="toy", prompt="hi")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (spelled(16), "length", 0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 16, 18)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")


def test_chat(client: openai.OpenAI) -> None:
    """A message, its reason, and usage that counts the template's tokens."""
    answer = client.chat.completions.create(model="default", messages=CHAT["messages"], max_completion_tokens=9)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", spelled(9), "length")
    assert answer.usage.prompt_tokens == len("user: hi\nassistant: ")
    assert answer.object == "chat.completion"
    again = [
        *CHAT["messages"],
        choice.message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "ho"}]},
    ]
    assert client.chat.completions.create(model="toy", messages=again, max_tokens=3).choices[
        0
    ].message.content == spelled(3)


def test_completion_stream(client: openai.OpenAI) -> None:
    """Chunks join to the whole text; one of them, with the last text, ends it."""
    chunks = list(client.completions.create(model="toy", prompt="hi", max_tokens=40, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == spelled(40)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any(hasattr(chunk, "usage") and chunk.usage for chunk in chunks)


def test_chat_stream(client: openai.OpenAI) -> None:
    """A role first, text, a chunk that ends it, and usage when asked for."""
    stream = client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert not any(delta.role for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == spelled(5)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (20, 5)
    assert not any(chunk.usage for chunk in chunks)


def test_chunks_on_the_wire(server: Server) -> None:
    """Headers, framing, and ``usage: null`` on each chunk of a stream that will have one."""
    reply = post(server, "/v1/chat/completions", CHAT, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last = reply.events()
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["total_tokens"] == 25
    assert {chunk["object"] for chunk in [*chunks, last]} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert reply.headers["x-request-id"] == last["id"]
    plain = post(server, "/v1/chat/completions", CHAT, stream=True).events()
    assert all("usage" not in chunk for chunk in plain)


@pytest.mark.parametrize("prompt", ["hi", ["a", "bc"], [104, 105], [[104], [105, 106], [107]], ["a", [98]]])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts(server: Server, prompt: Any, stream: bool) -> None:
    """One or several, text or ids: choices in order, usage over all."""
    reply = post(server, "/v1/completions", {"model": "toy", "prompt": prompt, "max_tokens": 6}, stream=stream)
    num = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    texts = [""] * num
    if stream:
        events = reply.events()
        for event in events:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
        assert sorted(ends) == list(range(num))
    else:
        texts = [choice["text"] for choice in reply.json()["choices"]]
        assert [choice["index"] for choice in reply.json()["choices"]] == list(range(num))
        assert reply.json()["usage"]["completion_tokens"] == 6 * num
    assert texts == [spelled(6)] * num


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "stop", [None, [], "wörld", "o 🙂", "🙂", ["!", "ld"], "never", "Hello 🙂 wörx", ["你", "好"], "H", "lo 🙂 w", "hi"]
)
def test_stops_and_characters_across_tokens(server: Server, route: str, stop: Any) -> None:
    """For every length: streamed text == whole text == the text before the earliest stop string."""
    base = COMPLETION if route == "/v1/completions" else CHAT
    for max_tokens in (1, 2, 5, 7, 8, 9, 10, 12, 13, 20, 27, 40):
        whole = spelled(max_tokens)
        stops = [stop] if isinstance(stop, str) else stop or []
        places = [whole.find(one) for one in stops if one in whole]
        expected = whole[: min(places)] if places else whole
        body = {**base, "stop": stop, "max_tokens": max_tokens}
        choice = post(server, route, body).json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        streamed = ""
        reasons = []
        for event in post(server, route, body, stream=True).events():
            part = event["choices"][0]
            streamed += part["text"] if "text" in part else part["delta"].get("content", "")
            reasons += [part["finish_reason"]] if part["finish_reason"] else []
        assert text == streamed == expected
        assert reasons == [choice["finish_reason"]] == ["stop" if places else "length"]


def test_a_seed_gives_the_same_text() -> None:
    """With the toy's hashed tokens: same seed, same text, stream or not, alone or not; another seed, another text."""
    with serving(toy_engine()) as server:
        body = {**COMPLETION, "temperature": 1, "seed": 7, "max_tokens": 30}
        first = post(server, "/v1/completions", body).json()["choices"][0]["text"]
        streamed = "".join(e["choices"][0]["text"] for e in post(server, "/v1/completions", body, stream=True).events())
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            bodies = [{**body, "seed": 7 if i % 2 else None} for i in range(8)]
            texts = [
                r.json()["choices"][0]["text"] for r in pool.map(lambda b: post(server, "/v1/completions", b), bodies)
            ]
        assert {first, streamed, *texts[1::2]} == {first}
        assert post(server, "/v1/completions", body, seed=8).json()["choices"][0]["text"] != first


def test_without_a_limit_an_answer_ends_at_the_models() -> None:
    """No max_tokens, no eos: N - L tokens and "length"."""
    with serving(toy_engine(text="x", max_model_len=64)) as server:
        answer = post(server, "/v1/chat/completions", {**CHAT, "max_tokens": None}).json()
        assert answer["usage"]["completion_tokens"] == 64 - 20
        assert answer["choices"][0]["finish_reason"] == "length"


def test_sixteen_streams_at_once() -> None:
    """Each is what it would be alone."""
    with serving(toy_engine(checks="cheap")) as server:
        alone, together = toy_engine(), {}

        def stream(i: int) -> None:
            body = {"model": "toy", "prompt": "ab" * (i + 1), "max_tokens": 100, "temperature": 0, "stream": True}
            together[i] = "".join(
                event["choices"][0]["text"] for event in Reply(server, "POST", "/v1/completions", body).events()
            )

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for i in range(16):
            alone.submit(alone.tokenizer.encode("ab" * (i + 1)), SamplingParams(max_tokens=100, temperature=0))
            text = "".join(output.text for _ in iter(alone.has_work, False) for output in alone.step().outputs)
            assert together[i] == text


def test_metrics_are_exact() -> None:
    """Ten requests of ten tokens: counters, histogram counts and sums; every family has HELP and TYPE."""
    with serving(toy_engine(text="x"), served_model_name="my/model") as server:
        label = '{model_name="my/model"}'
        before = counters(server)
        assert before[f"vllm:generation_tokens_total{label}"] == 0
        for i in range(10):
            body = {"model": "my/model", "prompt": "abc", "max_tokens": 10, "stream": i % 2 == 0}
            assert Reply(server, "POST", "/v1/completions", body).status == 200
        found = counters(server)
        expected = {
            "prompt_tokens_total": 30, "generation_tokens_total": 100, "num_preemptions_total": 0,
            "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0,
            "time_to_first_token_seconds_count": 10, "inter_token_latency_seconds_count": 90,
            "request_time_per_output_token_seconds_count": 10, "e2e_request_latency_seconds_count": 10,
            "request_queue_time_seconds_count": 10, "request_prefill_time_seconds_count": 10,
            "request_decode_time_seconds_count": 10, "request_inference_time_seconds_count": 10,
            "request_prompt_tokens_sum": 30, "request_generation_tokens_sum": 100, "request_generation_tokens_count": 10,
            "iteration_tokens_total_sum": 30 + 90, "iteration_tokens_total_count": 100,
        }  # fmt: skip
        assert {name: found[f"vllm:{name}{label}"] for name in expected} == expected
        assert found['vllm:request_success_total{finished_reason="length",model_name="my/model"}'] == 10
        terms = [found[f"vllm:request_{term}_time_seconds_sum{label}"] for term in ("queue", "prefill", "decode")]
        assert sum(terms) == pytest.approx(found[f"vllm:e2e_request_latency_seconds_sum{label}"])
        assert found['vllm:request_generation_tokens_bucket{le="10.0",model_name="my/model"}'] == 10
        assert found['vllm:request_generation_tokens_bucket{le="5.0",model_name="my/model"}'] == 0
        text = Reply(server, "GET", "/metrics").data.decode()
        for kind in ("HELP", "TYPE"):
            families = re.findall(rf"^# {kind} (\S+)", text, re.MULTILINE)
            assert len(families) == len(set(families)) == 20
