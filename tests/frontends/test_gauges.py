"""An idle server's gauges: what nobody holds is 0, what is kept is what it is."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from core.frontends.prometheus import _KV_TERMS
from plugins.allocators.naive import NaiveAllocator
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.idle.keep import Keep
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import COMPLETION, counters, post, request_bytes, wait_for

VLLM = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def kv(server: Server) -> dict[str, float]:
    """The tokens of the pool by term, those that are not 0."""
    found = counters(server)
    terms = {term: found[f'quire:kv_tokens{{model_name="toy",term="{term}"}}'] for term in _KV_TERMS}
    return {term: value for term, value in terms.items() if value}


def wait_for_kv(server: Server, expected: dict[str, float]) -> None:
    wait_for(lambda: not server.engine.has_work() and kv(server) == expected, 2)


def leave(server: Server) -> None:
    """Ask for much and go in the middle of it."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(request_bytes({**COMPLETION, "max_tokens": 5000, "stream": True}))
        sock.recv(4096)


@pytest.mark.parametrize(
    ("allocator", "cached"),
    [(PagedAllocator, 0), (lambda: NaiveAllocator(reserve="declared"), 0), (PrefixAllocator, 16)],
)
def test_an_idle_server_holds_nothing_but_what_its_cache_keeps(allocator: Any, cached: int) -> None:
    """After an answer, several at once, and one whose client has left; kept blocks of the prefix cache are ``cached`` alone."""
    with serving(toy_engine(allocator=allocator(), delay_s=0.001)) as server:
        assert kv(server) == {}
        for fields in ({"max_tokens": 5}, {"max_tokens": 5, "n": 3, "temperature": 1, "seed": 1}):
            post(server, "/v1/completions", {**COMPLETION, "prompt": list(range(17)), **fields})
            wait_for_kv(server, {"cached": cached} if cached else {})
        leave(server)
        server.wait_idle()
        wait_for(lambda: set(kv(server)) <= ({"cached"} if cached else set()), 2)
        found = counters(server)
        assert all(found[f'vllm:{name}{{model_name="toy"}}'] == 0 for name in VLLM)


def test_what_a_session_keeps_is_all_that_is_held() -> None:
    """Not what another request held in the step in which it ended."""
    with serving(toy_engine(idle=Keep())) as server:
        ask = {**COMPLETION, "prompt": list(range(20)), "max_tokens": 5}
        post(server, "/v1/completions", {**ask, "session_id": "s", "stall_s": 600})
        wait_for_kv(server, {"written": 24, "internal_waste": 8})  # the last token has no KV; two blocks of 16
        post(server, "/v1/completions", {**ask, "max_tokens": 9})
        wait_for_kv(server, {"written": 24, "internal_waste": 8})
