"""SmolLM2 for real: greedy answers are transformers' own, whatever the pool, the preemption and the company (rule 1 of the design)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import core
from core.fetch import FetchError, fetch_model

DATA = Path(__file__).parents[1] / "data"
REFERENCE = json.loads((DATA / "smollm2_greedy.json").read_text())
NEAR_TIE = 1e-4
# swap and recompute cost the same at 48 tokens: both kinds of preemption occur
CROSSOVER_AT_48 = ["cost.link_bytes_per_s=3.385e6", "cost.prefill_flop_per_s=1e10"]


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    try:
        fetch_model()
    except FetchError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


def sure_tokens(row) -> int:
    """Output tokens before the first position where the top two logits were closer than ``NEAR_TIE``, relative to the largest."""
    return next((i for i, margin in enumerate(row["margins"]) if margin < NEAR_TIE), len(row["margins"]))


def assert_agrees(tokens, row) -> None:
    sure = sure_tokens(row)
    assert list(tokens)[:sure] == row["output"][:sure]
    assert len(tokens) == len(row["output"])


def test_the_reference_decides_most_tokens() -> None:
    """Or the comparisons below would prove little."""
    assert sum(map(sure_tokens, REFERENCE)) > 0.8 * sum(len(row["output"]) for row in REFERENCE)


@pytest.mark.timeout(600)
def test_greedy_answers_are_transformers_own_under_swaps_and_recomputes() -> None:
    overrides = [
        "cache.num_blocks=24",
        "max_num_seqs=20",
        "num_threads=1",  # a busy machine stalls two threads that wait for each other
        "preemption=breakeven",
        "checks=full",
        *CROSSOVER_AT_48,
    ]
    with core.build(overrides) as quire:
        params = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answers = quire.generate([row["prompt"] for row in REFERENCE], params)
        for answer, row in zip(answers, REFERENCE, strict=True):
            assert_agrees(answer.token_ids, row)
        preemptions = quire.engine.metrics.summary()["preemptions"]
        assert preemptions["swap"] > 0 and preemptions["recompute"] > 0, preemptions
        quire.engine.assert_idle()


@pytest.mark.timeout(300)
def test_the_capital_of_france_is_paris_and_the_answer_ends_with_stop() -> None:
    with core.build(["cache.num_blocks=64", "num_threads=1"]) as quire:
        (answer,) = quire.chat(
            [{"role": "user", "content": "What is the capital of France?"}], {"max_tokens": 24, "temperature": 0}
        )
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_stored_reference_is_what_transformers_says_today() -> None:
    import sys

    sys.path.insert(0, str(DATA))
    from make_smollm2_reference import reference

    for now, stored in zip(reference(), REFERENCE, strict=True):
        assert now["prompt"] == stored["prompt"]
        assert_agrees(now["output"], stored)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixteen_concurrent_streams_over_http_get_the_text_they_get_alone(tmp_path: Path) -> None:
    """A pool of 64 blocks, the openai client, real sockets: texts are transformers' up to its first near tie."""
    import asyncio
    import os
    import subprocess
    import sys

    import openai

    port = _free_port()
    words = ["cache.num_blocks=64", f"frontend.port={port}"]
    with open(tmp_path / "serve.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "core.serve", *words], stdout=log, stderr=log, env=os.environ, cwd=DATA.parents[1]
        )
        try:
            texts = asyncio.run(_stream_all(openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")))
        finally:
            server.terminate()
            assert server.wait(30) == 0
    from core.text import FolderTokenizer

    tokenizer = FolderTokenizer(fetch_model())
    for text, row in zip(texts, REFERENCE[-16:], strict=True):
        sure = tokenizer.decode(row["output"][: sure_tokens(row)])
        assert text.startswith(sure.rstrip("\ufffd"))


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


async def _stream_all(client) -> list[str]:
    import asyncio

    import openai

    async def one(row) -> str:
        stream = await client.completions.create(
            model="default",
            prompt=row["prompt"],
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with client:
        for _ in range(240):
            try:
                await client.models.list()
                break
            except (openai.APIConnectionError, openai.InternalServerError):  # no socket yet; 503 while the model loads
                await asyncio.sleep(0.25)
        else:
            raise AssertionError("the server is not ready after a minute")
        return await asyncio.gather(*(one(row) for row in REFERENCE[-16:]))
