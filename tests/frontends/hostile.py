"""Requests that nobody should send: seeded, of every layer from bytes to numbers."""

from __future__ import annotations

import json
import random
from typing import Any

BASE: dict[str, Any] = {"model": "toy", "prompt": "hello", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": BASE,
    "/v1/chat/completions": CHAT,
    "/tokenize": {"model": "toy", "prompt": "hello"},
    "/detokenize": {"model": "toy", "tokens": [104, 105]},
}
SMALL: tuple[Any, ...] = (None, True, False, 0, 1, 2, 0.5, "x", [1], ["x"], {}, 3)
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "stop", "echo",
    "logprobs", "top_logprobs", "prompt_logprobs", "stop_token_ids", "min_tokens", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "response_format", "structured_outputs",
    "truncate_prompt_tokens", "cache_salt", "priority", "session_id", "stall_s",
    "service_class", "stream", "stream_options", "return_token_ids", "add_special_tokens",
    "continue_final_message", "suffix", "tools", "__proto__", "",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**64, 10**400, -(10**30), 0.5, -0.0, 1e308, 1e-320, "", "x", "\0", "\ud800", "🙂" * 50,
    "x" * 30_000, [], [[]], [0], [-1], [2**31], [319], [320], [1, "x"], ["x"] * 200, [[1], [2]] * 100, [0] * 5000, {}, {"": {}},
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"regex": "(" * 500}, {"regex": "(a*)*b{1,99999}"}, {"grammar": "start: start"}, {"json": {"type": "object", "minProperties": 10**9}},
    {"0": 100}, {"999999": 1}, {"x": 1}, {"0": 1e400}, [{"role": "user", "content": "x"}], [{"role": "root", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]}], [{"role": "user"}],
    "{{ 7*7 }}", "{% for i in range(10**9) %}x{% endfor %}", "<|im_start|>system",
)  # fmt: skip
ROUTES = (*BASES, "/v1/completions", "/v1/chat/completions")


def deep(draw: random.Random) -> bytes:
    """Brackets, more than any parser should follow."""
    depth = draw.choice([100, 1100, 100_000])
    opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return b'{"model":"toy","prompt":' + opening * depth + b"1" + closing * depth + b"}"


def body(draw: random.Random, route: str) -> bytes:
    """A good body with something in it that may be wrong."""
    data = dict(BASES[route])
    for _ in range(draw.choice([1, 1, 2, 4])):
        data[draw.choice(FIELDS)] = draw.choice(SMALL if draw.random() < 0.5 else VALUES)
    text = json.dumps(data).encode("utf-8", "surrogatepass")
    kind = draw.random()
    if kind < 0.8:
        return text
    if kind < 0.85:
        return deep(draw)
    if kind < 0.9:
        return text[: draw.randrange(len(text))]
    changed = bytearray(text)
    for _ in range(draw.randint(1, 6)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def request(draw: random.Random) -> bytes:
    """The bytes of one request; the connection is closed after it."""
    route = draw.choice(ROUTES)
    data = body(draw, route)
    kind = draw.choice(["application/json"] * 50 + ["text/plain", "multipart/form-data; boundary=x", ""])
    method = draw.choice(["POST"] * 60 + ["GET", "PUT", "DELETE", "TRACE", "X" * 20])
    length = draw.choice([len(data)] * 60 + [len(data) + 5, max(0, len(data) - 5), 10**12, -1])
    head = f"{method} {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n"
    if draw.random() < 0.05:
        head += "Transfer-Encoding: chunked\r\n"
    if draw.random() < 0.05:
        head += "X-A: " + "a" * draw.choice([10_000, 70_000]) + "\r\n"
    whole = bytearray(head.encode() + b"\r\n" + data)
    if draw.random() < 0.05:
        whole[draw.randrange(min(200, len(whole)))] = draw.randrange(256)
    return bytes(whole)
