"""What a request says of itself beside its prompt: its session, when that comes back, its service class, its priority, its key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from core.hookspecs import hookimpl
from core.levels import ServiceLevel, ServiceLevels
from core.types import Plan, View
from plugins.allocators.prefix import PrefixAllocator
from plugins.idle.keep import Keep
from plugins.schedulers.chunked import ChunkedScheduler
from tests.frontends.toys import Server, serving, toy_engine
from tests.frontends.web import CHAT, COMPLETION, Caller, Reply, counters, post, wait_for

ALICE, BOB = "alice-secret-key", "bob-secret-key"
LEVELS = ServiceLevels(classes={"chat": ServiceLevel(30.0, 30.0), "batch": ServiceLevel(1e-9, None)})


@attrs.define(eq=False)
class Watching:
    """The chunked scheduler, which notes what it was shown of each sequence."""

    seen: dict[str, tuple[Any, ...]] = attrs.field(init=False, factory=dict)
    _inner: ChunkedScheduler = attrs.field(init=False, factory=ChunkedScheduler)

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        for one in (*view.running, *view.waiting):
            about = one.service_class, one.session_id, one.stall_s, one.priority, one.tpot_s
            self.seen[bytes(one.token_ids[: one.num_prompt_tokens]).decode()] = about
        return self._inner.plan_step(view)


def clear(server: Server) -> None:
    """Sessions are kept on purpose: give them back, then nothing is left."""
    server.engine.end_sessions()
    key = {"authorization": f"Bearer {ALICE}"} if server.frontend.api_keys else {}
    Reply(
        server, "POST", "/v1/completions", COMPLETION, {"content-type": "application/json", **key}
    )  # wakes the engine
    server.wait_idle()


def ask(server: Server, prompt: Any, key: str | None = None, **fields: Any) -> dict[str, Any]:
    headers = {"content-type": "application/json", **({} if key is None else {"authorization": f"Bearer {key}"})}
    body = {**COMPLETION, "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
    reply = Reply(server, "POST", "/v1/completions", body, headers)
    assert reply.status == 200, reply.data
    return reply.json()


def next_turn(answer: dict[str, Any]) -> list[int]:
    choice = answer["choices"][0]
    return [*choice["prompt_token_ids"], *choice["token_ids"], 65, 66, 67]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


# ------------------------------------------------------------------------------------------------ sessions


def test_a_sessions_next_turn_goes_on_from_the_kv_that_was_kept() -> None:
    """All of the first turn but its last token, though nothing is cached by content; and the answer is the same as without."""
    with serving(toy_engine(idle=Keep())) as server:
        first = ask(server, "x" * 50, session_id="s", stall_s=60)
        assert server.engine.stats()["idle_sessions"] == 1
        second = ask(server, next_turn(first), session_id="s")
        assert cached(first) == 0
        assert cached(second) == 50 + 8 - 1
        alone = ask(server, next_turn(first))
        assert cached(alone) == 0
        assert second["choices"][0]["text"] == alone["choices"][0]["text"]
        assert server.engine.stats()["idle_sessions"] == 0, "the second turn named no stall"
        clear(server)


def test_sessions_of_chats_and_streams() -> None:
    """The same fields on the other route, in a stream."""
    with serving(toy_engine(idle=Keep(), text="ok ")) as server:
        fields = {**CHAT, "session_id": "c", "stall_s": 0.5, "stream": True}
        assert post(server, "/v1/chat/completions", fields).events()
        again = [*CHAT["messages"], {"role": "assistant", "content": "ok ok"}, {"role": "user", "content": "more"}]
        reply = post(server, "/v1/chat/completions", CHAT, messages=again, session_id="c").json()
        assert cached(reply) == len("user: hi\nassistant: ") + 4
        clear(server)


@pytest.mark.parametrize("other", [{"session_id": "t"}, {"cache_salt": "x"}, {"key": BOB}, {}])
def test_nobody_else_goes_on_with_a_session(other: dict[str, Any]) -> None:
    """Not by another name, under another salt, with another key, or without a name."""
    engine = toy_engine(idle=Keep())
    with serving(engine, api_keys=[ALICE, BOB]) as server:
        first = ask(server, "x" * 50, ALICE, session_id="s", stall_s=60)
        asked = {"key": ALICE, **({"session_id": "s"} if other else {}), **other}
        assert cached(ask(server, next_turn(first), **asked)) == 0
        assert engine.stats()["idle_sessions"] == 1, "it is still there for its own"
        assert cached(ask(server, next_turn(first), ALICE, session_id="s")) == 57
        clear(server)


def test_a_session_whose_prompt_was_scored_is_not_kept() -> None:
    """Such a request shares nothing with others, so no turn could go on from it."""
    with serving(toy_engine(idle=Keep())) as server:
        ask(server, "x" * 50, session_id="s", stall_s=60, prompt_logprobs=0)
        assert server.engine.stats()["idle_sessions"] == 0
        server.wait_idle()


def test_kept_sessions_give_way_when_memory_is_short() -> None:
    """However many sessions a client leaves behind, others are served."""
    with serving(toy_engine(idle=Keep(), num_blocks=16, max_model_len=200)) as server:
        for i in range(20):
            ask(server, "x" * 50, session_id=f"s{i}", stall_s=86_400)
        assert 0 < server.engine.stats()["idle_sessions"] < 5
        assert ask(server, "y" * 180)["usage"]["completion_tokens"] == 8
        clear(server)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stall_s": 1}, "only with session_id"),
        ({"stall_s": 1, "session_id": "s", "n": 2}, "n must be 1"),
        ({"stall_s": 1, "session_id": "s", "best_of": 2}, "n must be 1"),
        ({"stall_s": 1, "session_id": "s", "use_beam_search": True}, "beam search"),
        ({"stall_s": 1, "session_id": "s", "prompt": ["a", "b"]}, "one prompt"),
    ],
)
def test_stalls_that_cannot_be_kept(plain: Server, fields: dict[str, Any], said: str) -> None:
    reply = post(plain, "/v1/completions", {**COMPLETION, **fields})
    assert (reply.status, reply.error()["param"]) == (400, "stall_s")
    assert said in reply.error()["message"]


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """Two service classes and a scheduler that notes what it is shown."""
    with serving(toy_engine(levels=LEVELS, scheduler=Watching(), allocator=PrefixAllocator())) as server:
        yield server
        server.wait_idle()


# ------------------------------------------------------------------------------------------------ service classes


def test_labels_reach_the_scheduler(plain: Server) -> None:
    """As they were sent; without them their defaults, and a class brings its targets."""
    fields = {"service_class": "chat", "session_id": "s", "stall_s": 2.5, "priority": -3}
    ask(plain, "with", **fields)
    ask(plain, "without")
    seen = plain.engine.hooks.chosen[1].plugin.seen
    assert seen["with"] == ("chat", "s", 2.5, -3, 30.0)
    assert seen["without"] == ("", "", None, 0, None)


def test_service_classes_are_judged_in_the_metrics(plain: Server) -> None:
    """A target nobody can meet is missed. Labels are the operator's names alone."""
    before = counters(plain)
    for service_class in ("chat", "batch", "batch", None):
        ask(plain, "hi", service_class=service_class)
    after = counters(plain)
    families = ("quire:service_class_requests", "quire:service_class_requests_met")
    labels = {name: f'{{model_name="toy",service_class="{name}"}}' for name in LEVELS.classes}
    found = {
        name: [int(after[f"{family}_total{label}"] - before[f"{family}_total{label}"]) for family in families]
        for name, label in labels.items()
    }
    assert found == {"chat": [1, 1], "batch": [2, 0]}


def test_an_unknown_class_is_told_which_there_are(plain: Server) -> None:
    """400 with the field, the value and what is allowed."""
    error = post(plain, "/v1/completions", COMPLETION, service_class="gold").error()
    assert error["param"] == "service_class"
    assert error["message"] == "service_class 'gold' is unknown; allowed: chat, batch"
    with serving(toy_engine()) as server:
        message = post(server, "/v1/chat/completions", CHAT, service_class="gold").error()["message"]
        assert "none is configured (slo.classes)" in message


# ------------------------------------------------------------------------------------------------ clients


def test_each_key_is_a_client_of_its_own() -> None:
    """What ``scheduler=fair`` shares between; the name is not the key."""
    engine = toy_engine(delay_s=0.002)
    with serving(engine, api_keys=[ALICE, BOB]) as server:
        headers = [{"content-type": "application/json", "authorization": f"Bearer {key}"} for key in (ALICE, BOB)]
        callers = [Caller(server, COMPLETION, max_tokens=200, headers=each) for each in (*headers, headers[0])]
        wait_for(lambda: engine.stats()["running"] == 3)
        clients = [view.client_id for view in list(engine.state.running)]
        assert [caller.reply().status for caller in callers] == [200] * 3
    assert len(set(clients)) == 2
    assert not any(word in client for client in clients for word in ("alice", "bob")) and all(clients)
