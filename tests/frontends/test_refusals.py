"""Bad requests over real sockets: refused in OpenAI's shape, and nobody else notices."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import re
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.frontends.answers import CompletionAnswer
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import CHAT, COMPLETION, TEXT, Caller, Reply, counters, post, spelled, wait_for

V = 320  # the toy's vocabulary


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"), ({"prompt": [""]}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["ok", ""]}, "prompt"), ({"prompt": [V]}, "prompt"), ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["x"] * 10_000}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": [2**70]}, "prompt"),
        ({"prompt": "x" * 8192}, "prompt"), ({"prompt": "x" * 300_000}, "prompt"),
        ({"max_tokens": 10**12}, "max_tokens"), ({"max_tokens": 8191}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"), ({"n": 100000}, "n"), ({"n": 0}, "n"), ({"n": -1}, "n"), ({"logprobs": V}, "logprobs"),
        ({"stop_token_ids": [V + 3]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {str(V): 1}}, "logit_bias"), ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature"), ({"temperature": "0.7"}, "temperature"), ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"stop": ""}, "stop"), ({"stop": ["x" * 5000]}, "stop"),
    ],
)  # fmt: skip
def test_bad_completions(server: Server, fields: dict[str, Any], param: str, stream: bool) -> None:
    """400 with the parameter's name, before a stream begins; the server goes on."""
    reply = post(server, "/v1/completions", {**COMPLETION, **fields}, stream=stream)
    assert (reply.status, reply.error()["param"].split("[")[0]) == (400, param)
    assert len(reply.data) < 1000
    assert post(server, "/v1/completions", COMPLETION, max_tokens=1).status == 200


def test_the_numbers_are_named(server: Server) -> None:
    """A prompt that is too long: its length and the limit."""
    message = post(server, "/v1/completions", COMPLETION, prompt="x" * 9000).error()["message"]
    assert "9000" in message
    assert "8192" in message
    error = post(server, "/v1/chat/completions", CHAT, messages=[{"role": "user", "content": "x" * 9000}]).error()
    assert error["param"] == "messages"


@pytest.mark.parametrize("k", [0, -1, None, V, V + 1, 9999999, 2**40])
def test_top_k_that_is_off(server: Server, k: int | None) -> None:
    """0, -1 and more than the vocabulary."""
    assert post(server, "/v1/completions", COMPLETION, top_k=k, seed=1, max_tokens=2).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_larger_than_the_pool(stream: bool) -> None:
    """400 with the numbers before a stream begins, also for one prompt of several; a small one behind it is served."""
    with serving(toy_engine(num_blocks=8, max_model_len=1024, text=TEXT)) as server:
        for prompt in ("x" * 200, ["x", "x" * 200]):
            reply = post(server, "/v1/completions", COMPLETION, prompt=prompt, max_tokens=10, stream=stream)
            assert reply.status == 400
            assert re.search(r"14 .*8 ", reply.error()["message"])
        assert post(server, "/v1/completions", COMPLETION, max_tokens=100, prompt="x" * 100).status == 400
        assert post(server, "/v1/completions", COMPLETION, max_tokens=8).json()["choices"][0]["text"] == spelled(8)
        server.wait_idle()
        assert counters(server)['vllm:request_success_total{finished_reason="refused",model_name="toy"}'] == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"model": "toy", x}', b"[]", b"null", b"\xff", b"[" * 10_000, b'{"a":' * 10_000,
        b'{"model":"toy","prompt":"x","messages":[],"temperature":NaN}', b'{"model":"toy","temperature":1e400}',
    ],
)  # fmt: skip
def test_malformed_bodies(server: Server, path: str, body: bytes) -> None:
    """400 in OpenAI's shape."""
    reply = Reply(server, "POST", path, body)
    assert reply.status == 400
    assert reply.error()["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_wrong_content_types(server: Server, kind: str | None) -> None:
    """415; so a web page elsewhere cannot post without asking the browser first."""
    reply = Reply(server, "POST", "/v1/completions", COMPLETION, headers={} if kind is None else {"content-type": kind})
    assert reply.status == 415
    reply.error()
    good = Reply(
        server, "POST", "/v1/completions", COMPLETION, headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert good.status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405), ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404), ("GET", "/v1/nothing", 404), ("POST", "/v1/completions/", 404), ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/" + "x" * 5000, 404), ("GET", "/%00%ff", 404), ("PUT", "/../etc/passwd", 404),
    ],
)  # fmt: skip
def test_wrong_routes(server: Server, method: str, path: str, status: int) -> None:
    """404 and 405 in OpenAI's shape."""
    reply = Reply(server, method, path)
    assert reply.status == status
    assert len(reply.error()["message"]) < 400
    assert status != 405 or reply.headers["allow"]


def test_bodies_that_are_too_large(server: Server) -> None:
    """413 by the declared length, and by counting when there is none; nothing is kept of the rest."""
    assert Reply(server, "POST", "/v1/completions", b"x" * 4_000_001).status == 413
    assert Reply(server, "POST", "/v1/completions", iter([b"x" * 1_000_000] * 50)).status == 413
    message = Reply(server, "POST", "/v1/completions", b'"' + b"x" * 4_000_000 + b'"').error()["message"]
    assert "4000000" in message
    assert post(server, "/v1/completions", COMPLETION).status == 200


def test_headers_without_end(server: Server) -> None:
    """431 and the connection is closed; a large body in one piece with its head is no large head."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                sock.sendall(b"x" * 10_000)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(100).startswith(b"HTTP/1.1 431 ")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    body = json.dumps({**COMPLETION, "metadata": "x" * 500_000})
    for _ in range(3):
        connection.request("POST", "/v1/completions", body=body, headers={"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
    connection.close()


def test_a_long_prompt_does_not_hold_up_others(server: Server) -> None:
    """Parsing and tokenising megabytes happens beside the event loop."""
    body = json.dumps({**COMPLETION, "prompt": list(range(256)) * 3000}).encode()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(Reply, server, "POST", "/v1/completions", body) for _ in range(4)]
        longest = 0.0
        while not all(answer.done() for answer in answers):
            started = time.monotonic()
            assert Reply(server, "GET", "/health").status == 200
            longest = max(longest, time.monotonic() - started)
        assert [answer.result().status for answer in answers] == [400] * 4
    assert longest < 0.5


def test_a_long_answer_is_written_beside_the_event_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities of thousands of tokens are a second's work: the streams of others go on."""
    threads = []
    whole = CompletionAnswer.whole

    def noted(self: Any) -> bytes:
        threads.append(threading.current_thread())
        return whole(self)

    monkeypatch.setattr(CompletionAnswer, "whole", noted)
    for fields in (
        {"max_tokens": 5},
        {"max_tokens": 500, "logprobs": 20},
        {"prompt": "x" * 3000, "prompt_logprobs": 1, "n": 3},
    ):
        assert post(server, "/v1/completions", {**COMPLETION, **fields}).status == 200
    assert [thread is server.thread for thread in threads] == [True, False, False]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    "model prompt messages max_tokens temperature top_p top_k seed stop stop_token_ids stream stream_options n x cache_salt priority "
    "session_id stall_s service_class logit_bias response_format structured_outputs echo logprobs truncate_prompt_tokens".split()
)
BODIES = st.dictionaries(FIELDS, JSON, max_size=6).map(lambda fields: json.dumps(fields).encode()) | st.binary(
    max_size=40
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES, path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]), good=st.booleans())
def test_no_body_is_the_servers_fault(server: Server, body: bytes, path: str, good: bool) -> None:
    """Whatever is sent, alone or over a good request: below 500, and JSON or events."""
    if good and body[:1] == b"{" and body[-1:] == b"}":
        base = json.dumps({**COMPLETION, "max_tokens": 2} if path == "/v1/completions" else CHAT).encode()
        body = base[:-1] + (b", " if len(body) > 2 else b"") + body[1:]
    reply = Reply(server, "POST", path, body)
    assert reply.status < 500
    assert reply.status == 200 or reply.error()


EMPTY = [
    ("/v1/completions", {"prompt": ""}), ("/v1/completions", {"prompt": [""]}), ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [[]]}), ("/v1/completions", {"prompt": ["ok", ""]}), ("/v1/completions", {"prompt": [[1], []]}),
    ("/v1/chat/completions", {"messages": []}),
]  # fmt: skip


def test_empty_prompts_beside_a_long_request() -> None:
    """Each is refused while the long one runs, which then ends with the text it should."""
    with serving(toy_engine(delay_s=0.002, text=TEXT)) as server:
        long = Caller(server, COMPLETION, max_tokens=400, stream=True)
        wait_for(lambda: server.engine.stats()["running"] == 1)
        for path, fields in EMPTY * 3:
            reply = post(server, path, {**(CHAT if "chat" in path else COMPLETION), **fields})
            assert reply.status == 400, (path, fields)
            assert "empty" in reply.error()["message"] or "at least" in reply.error()["message"], reply.error()
        assert server.engine.stats()["running"] == 1, "the long request was in flight all the time"
        events = long.reply().events()
        assert "".join(event["choices"][0]["text"] for event in events) == spelled(400)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        server.wait_idle()


NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logprobs", "prompt_logprobs", "priority", "stall_s",
)  # fmt: skip


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_that_are_none_are_refused_in_every_field(server: Server, literal: str) -> None:
    """Python's own JSON reader would take them; ours says where they stand. The next request is served."""
    fields = [*({name: "X"} for name in NUMBERS), {"logit_bias": {"7": "X"}}]
    bodies = [json.dumps({**COMPLETION, **one}).replace('"X"', literal) for one in fields]
    for body in bodies:
        reply = Reply(server, "POST", "/v1/completions", body.encode())
        assert reply.status == 400, body
        assert re.search(r"not valid JSON: .*line 1 column \d+", reply.error()["message"]), reply.error()
    assert post(server, "/v1/completions", COMPLETION, max_tokens=2).json()["usage"]["completion_tokens"] == 2
