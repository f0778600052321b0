"""One request cannot exhaust the server: a process of its own, its peak of resident memory and the time of a refusal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontends.test_endings import Process, process
from tests.frontends.web import COMPLETION, Caller, Reply, post

MB = 2**20
V = 5000


@pytest.fixture(scope="module")
def it() -> Iterator[Process]:
    """Two milliseconds a step, four requests at a time; what a first request loads is loaded."""
    with process(vocab_size=V, max_num_seqs=4, max_num_batched_tokens=512, delay_s=0.002, checks="cheap") as it:
        for fields in ({}, {"n": 2}, {"prompt_logprobs": 2, "logprobs": 2}, {"max_tokens": -1}):
            post(it, "/v1/completions", COMPLETION, **fields)
        yield it


def peak_bytes(it: Process) -> int:
    """The most resident memory that the process ever had."""
    text = Path(f"/proc/{it.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s*(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps({**COMPLETION, **fields}).encode()


SOME_MB = 20
HUGE: dict[str, tuple[Any, int, int]] = {
    "n": (lambda: body({"n": 100_000}), 400, SOME_MB),
    "n and max_tokens": (lambda: body({"n": 100_000, "max_tokens": 10**9}), 400, SOME_MB),
    "many prompts": (lambda: body({"prompt": ["x"] * 10_000}), 400, SOME_MB),
    "many prompts and answers": (lambda: body({"prompt": ["x"] * 128, "n": 100_000}), 400, SOME_MB),
    "logprobs of every token": (lambda: body({"prompt": "x" * 8000, "logprobs": V}), 400, SOME_MB),
    "prompt_logprobs of every token": (lambda: body({"prompt": "x" * 8000, "prompt_logprobs": -1}), 400, SOME_MB),
    "a long prompt": (lambda: body({"prompt": "x" * 3_000_000}), 400, 100),  # its ids, before they are counted
    "50 MB": (lambda: b"x" * 50_000_000, 413, SOME_MB),
    "50 MB in pieces": (lambda: iter([b"x" * 1_000_000] * 50), 413, SOME_MB),
}


@pytest.mark.parametrize("what", HUGE)
def test_a_huge_request_is_refused_at_once_and_in_little_memory(it: Process, what: str) -> None:
    """The best of three is well under a second; the peak grows by less than what it asked for; a stream beside it goes on."""
    make, status, most_mb = HUGE[what]
    stream = Caller(it, COMPLETION, max_tokens=400, temperature=1, seed=5)
    before, seconds = peak_bytes(it), []
    for _ in range(3):
        sent, started = make(), time.monotonic()
        reply = Reply(it, "POST", "/v1/completions", sent)
        seconds.append(time.monotonic() - started)
        assert reply.status == status
        assert len(reply.data) < 1000
    assert min(seconds) < 0.5, seconds
    grown = peak_bytes(it) - before
    assert grown < most_mb * MB, f"{grown / MB:.1f} MB"
    alone = post(it, "/v1/completions", COMPLETION, max_tokens=400, temperature=1, seed=5)
    assert stream.reply().json()["choices"] == alone.json()["choices"]


def test_log_probabilities_of_a_long_prompt_need_memory_for_what_is_asked_only(it: Process) -> None:
    """20 of 5,000 tokens, 1,000 times: 20,000 pairs, not 5 million numbers; and nothing is kept for the next one."""
    peaks = [peak_bytes(it)]
    for i in range(3):
        reply = post(it, "/v1/completions", COMPLETION, prompt=f"{i}" * 1000, prompt_logprobs=20, max_tokens=1)
        shown = reply.json()["choices"][0]["prompt_logprobs"]
        assert (len(shown), {len(each) for each in shown[1:]} <= {20, 21}) == (1000, True)
        peaks.append(peak_bytes(it))
    print([peak // MB for peak in peaks])
    assert peaks[-1] - peaks[0] < 20 * MB < 1000 * V * 8, [peak // MB for peak in peaks]
    assert peaks[-1] - peaks[1] < 10 * MB, [peak // MB for peak in peaks]


def test_more_answers_than_run_at_once_still_come(it: Process) -> None:
    choices = post(it, "/v1/completions", COMPLETION, n=20, max_tokens=3, temperature=1, seed=1).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(20))
    assert {choice["finish_reason"] for choice in choices} == {"length"}
