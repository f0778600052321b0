"""Servers that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import TEXT


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Answers spell TEXT."""
    with serving(toy_engine(text=TEXT)) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    """Two milliseconds a step, two requests at a time, chunks of 16 tokens."""
    engine = toy_engine(delay_s=0.002, max_num_seqs=2, max_num_batched_tokens=16, checks="cheap")
    with serving(engine) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client, without its retries."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as it:
        yield it
