"""Sessions that stall between two turns: what is kept, moved or forgotten, who continues it, and that nothing leaks or goes
wrong."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types import Output, PolicyError, SamplingParams
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.idle.breakeven import BreakEven
from plugins.idle.discard import Discard
from plugins.idle.keep import Keep
from plugins.idle.swap import Swap
from tests.core.test_engine import PROPERTY
from tests.toy import Work, alone, check_cache, chosen, make_engine

COUNTS = dict.fromkeys(("kept", "resumed", "swapped", "discarded"), 0)
POLICIES = {"keep": Keep, "swap": Swap, "discard": Discard, "breakeven": BreakEven}


def session_engine(policy: Any, **sizes: Any) -> Any:
    return make_engine(policies=[chosen("idle", policy)], **sizes)


def turn(engine: Any, prompt: list[int], max_tokens: int, **labels: Any) -> tuple[list[int], Output]:
    """One request to its end: its tokens and its last output. What idles may go on idling."""
    request = engine.submit(prompt, SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False), **labels)
    tokens: list[int] = []
    while True:
        for output in engine.step().outputs:
            if output.request_id == request:
                tokens += output.token_ids
                if output.finish_reason is not None:
                    return tokens, output


def drain(engine: Any) -> None:
    engine.end_sessions()
    engine.step()
    engine.assert_idle()


@pytest.mark.parametrize("name", POLICIES)
def test_the_next_turn_continues_what_was_kept_and_its_answer_is_the_same(name: str) -> None:
    engine = session_engine(POLICIES[name](), link_bytes_per_s=1e9)
    first = list(range(13))
    answer, _ = turn(engine, first, 6, session_id="s", stall_s=5.0)
    for _ in range(3):  # somebody else is served meanwhile
        turn(engine, [7, 7, 7], 4)
    second = first + answer + [50, 51, 52]
    again, last = turn(engine, second, 6, session_id="s")
    assert again == alone(Work(tuple(second), 6))[0]
    kept = 0 if name == "discard" else len(first) + len(answer) - 1  # the last token of an answer has no KV
    assert last.num_cached_tokens == kept
    assert engine.sessions.counts["resumed"] == (name != "discard")
    assert engine.sessions.counts["swapped"] == (name == "swap")
    drain(engine)


@pytest.mark.parametrize("policy", [Keep, Swap])
def test_a_prompt_that_goes_another_way_shares_what_it_can(policy: type) -> None:
    for common in (0, 3, 4, 9):
        engine = session_engine(policy())
        first = list(range(13))
        turn(engine, first, 6, session_id="s", stall_s=5.0)
        turn(engine, [1, 2], 2)  # meanwhile, so that the policy is asked
        assert engine.state.idle[0].where == ("swap" if policy is Swap else "device")
        second = first[:common] + [90, 91, 92, 93]
        again, last = turn(engine, second, 6, session_id="s")
        assert again == alone(Work(tuple(second), 6))[0] and last.num_cached_tokens == common
        drain(engine)


@pytest.mark.parametrize("common", [3, 4, 9, 12, 13])
def test_a_turn_that_goes_another_way_leaves_others_what_they_can_find(common: int) -> None:
    """The blocks of the turn before are in the prefix cache: the next turn goes on behind them, never inside one."""
    engine = session_engine(Keep(), allocator=PrefixAllocator())
    first = list(range(13))
    turn(engine, first, 6, session_id="s", stall_s=50.0)
    second = first[:common] + [90, 91, 92, 93]
    again, last = turn(engine, second, 6, session_id="s")
    assert again == alone(Work(tuple(second), 6))[0] and last.num_cached_tokens == common - common % 4
    check_cache(engine)
    stranger, last = turn(engine, [*first, 77], 6)
    assert stranger == alone(Work((*first, 77), 6))[0] and last.num_cached_tokens == 12
    drain(engine)


def test_a_write_into_a_block_that_others_can_find_stops_the_engine() -> None:
    engine = session_engine(Keep(), allocator=PrefixAllocator())
    turn(engine, list(range(13)), 6, session_id="s", stall_s=50.0)
    engine.sessions._writable = lambda old, shared: shared  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match=r"write tokens 9\.\.11 .* can be found by what it holds"):
        turn(engine, [*range(9), 90, 91, 92], 6, session_id="s")


@pytest.mark.parametrize("when", ["idle", "running"])
def test_a_reset_of_the_cache_forgets_sessions_too(when: str) -> None:
    """What is kept between two turns, and at its end what runs now."""
    engine = session_engine(Keep(), allocator=PrefixAllocator())
    first, labels = list(range(13)), {"session_id": "s", "stall_s": 50.0}
    if when == "idle":
        turn(engine, first, 6, **labels)
    else:
        engine.submit(first, SamplingParams(max_tokens=6, temperature=0, detokenize=False), **labels)
        engine.step()
    engine.reset_cache()
    while engine.has_work():
        engine.step()
    _, last = turn(engine, [*first, 5], 3, **labels)
    assert last.num_cached_tokens == 0
    _, last = turn(engine, [*first, 5, 6], 3, **labels)
    assert last.num_cached_tokens == 12 and engine.sessions.counts["resumed"] == 1, "the session goes on from there"
    drain(engine)


@pytest.mark.parametrize("allocator", [PagedAllocator, PrefixAllocator])
def test_an_allocator_knows_nobody_when_all_have_ended(allocator: type) -> None:
    """Resumed turns end without blocks of their own; waiting ones never had any."""
    engine = session_engine(Keep(), allocator=allocator(), max_num_seqs=1)
    history = list(range(5))
    for _ in range(5):
        history += turn(engine, history, 3, session_id="s", stall_s=50.0)[0]
    ids = [engine.submit([1, 2, i], SamplingParams(max_tokens=3)) for i in range(4)]
    engine.step()
    for id in ids:
        engine.abort(id)
    drain(engine)
    plugin = engine.hooks.chosen[0].plugin
    assert not plugin._room
    assert allocator is PagedAllocator or not (plugin._due or plugin._index.chains)


def test_a_resumed_turn_is_no_prefix_hit() -> None:
    engine = session_engine(Keep())
    answer, _ = turn(engine, list(range(13)), 6, session_id="s", stall_s=50.0)
    turn(engine, [*range(13), *answer, 1], 3, session_id="s")
    assert engine.metrics.summary()["prefix"] == {"query_tokens": 33, "hit_tokens": 0}
    drain(engine)


@pytest.mark.parametrize("other", [{"client_id": "b"}, {"cache_salt": "x"}, {"session_id": "t"}])
def test_nobody_else_continues_a_session(other: dict[str, str]) -> None:
    engine = session_engine(Keep())
    labels = {"session_id": "s", "client_id": "a", "cache_salt": ""}
    turn(engine, list(range(13)), 6, **labels, stall_s=5.0)
    _, last = turn(engine, list(range(13)), 6, **{**labels, **other})
    assert last.num_cached_tokens == 0
    drain(engine)


@pytest.mark.parametrize("labels", [{}, {"session_id": "s"}, {"stall_s": 5.0}])
def test_nothing_is_kept_for_those_who_do_not_say_that_they_come_back(labels: dict[str, Any]) -> None:
    engine = session_engine(Keep())
    turn(engine, list(range(13)), 6, **labels)
    engine.assert_idle()


def test_a_session_that_stays_away_is_forgotten() -> None:
    engine = session_engine(Keep(patience=2.0))
    turn(engine, list(range(13)), 6, session_id="s", stall_s=5.0)
    assert engine.stats()["idle_sessions"] == 1
    for _ in range(4):  # a step is a second
        turn(engine, [1, 2], 3)
    assert engine.stats()["idle_sessions"] == 0
    engine.assert_idle()


def test_what_runs_pushes_an_idle_session_out_before_anybody_is_preempted() -> None:
    for policy in (Keep(), BreakEven()):
        engine = session_engine(policy, num_blocks=16, max_model_len=64)
        turn(engine, list(range(20)), 4, session_id="s", stall_s=50.0)
        tokens, _ = turn(engine, list(range(30, 40)), 50)
        assert tokens == alone(Work(tuple(range(30, 40)), 50))[0]
        assert engine.metrics.preemptions == {"swap": 0, "recompute": 0, "turned": 0, "forced": 0}
        assert engine.sessions.counts["discarded"] + engine.sessions.counts["swapped"] == 1
        drain(engine)


def test_breakeven_swaps_long_turns_and_discards_short_ones_when_memory_is_short() -> None:
    rates = {"prefill_flop_per_s": 23072.0, "link_bytes_per_s": 16.0}  # equal at 24 tokens
    for length, kind in ((8, "discarded"), (40, "swapped")):
        engine = session_engine(BreakEven(), num_blocks=20, max_model_len=80, **rates)
        turn(engine, list(range(length)), 4, session_id="s", stall_s=50.0)
        assert engine.stats()["idle_sessions"] == 1, "while there is room it is kept"
        turn(engine, list(range(100, 170)), 4)
        assert engine.sessions.counts[kind] == 1
        drain(engine)


def test_an_abort_of_a_turn_that_holds_a_sessions_blocks_gives_them_back() -> None:
    engine = session_engine(Keep(), max_num_seqs=1)
    answer, _ = turn(engine, list(range(13)), 6, session_id="s", stall_s=5.0)
    blocker = engine.submit([1, 2], SamplingParams(max_tokens=30, detokenize=False))
    engine.step()
    parked = engine.submit([*range(13), *answer, 1], SamplingParams(max_tokens=4, detokenize=False), session_id="s")
    engine.step()
    assert engine.state.parked and engine.state.waiting[0].where == "device"
    engine.abort(parked)
    engine.abort(blocker)
    engine.step()
    engine.assert_idle()


def test_without_a_policy_or_with_an_allocator_that_cannot_extend_tables_nothing_is_kept() -> None:
    class Rigid(PagedAllocator):
        extends_tables = False

    for engine in (make_engine(), session_engine(Keep(), allocator=Rigid())):
        turn(engine, list(range(13)), 6, session_id="s", stall_s=5.0)
        engine.assert_idle()


@attrs.frozen
class Turn:
    """One turn of a drawn play."""

    session: int
    new: int  # prompt tokens behind what is kept of the conversation
    out: int
    waits: bool  # for the end of this one before the next is submitted
    parts: float  # of the conversation so far: the rest is said anew


TURNS = st.builds(
    Turn,
    session=st.integers(0, 2),
    new=st.integers(1, 7),
    out=st.integers(1, 6),
    waits=st.booleans(),
    parts=st.sampled_from([1.0, 1.0, 0.8, 0.5]),
)


@st.composite
def plays(draw: st.DrawFn) -> tuple[list[Turn], dict[str, Any]]:
    """Turns, and sizes in which they compete."""
    return draw(st.lists(TURNS, min_size=2, max_size=10)), {
        "block_size": draw(st.integers(1, 5)),
        "num_swap_blocks": draw(st.sampled_from([0, 3, 60])),
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.integers(2, 20)),
        "allocator": draw(st.sampled_from([PagedAllocator, PrefixAllocator]))(),
        "policy": POLICIES[draw(st.sampled_from(sorted(POLICIES)))](),
        "spare": draw(st.integers(0, 6)),
        "link_bytes_per_s": draw(st.sampled_from([1e3, 1e9])),
    }


@PROPERTY
@given(play=plays())
def test_any_turns_in_any_company_give_the_tokens_they_give_alone(play: tuple[list[Turn], dict[str, Any]]) -> None:
    """Whatever is kept, swapped, discarded, resumed in part, or pushed out again; with checks=full in every step."""
    turns, options = play
    policy, spare = options.pop("policy"), options.pop("spare")
    longest = sum(one.new + one.out for one in turns) + 1
    blocks = -(-longest // options["block_size"]) + spare
    engine = session_engine(
        policy, num_blocks=max(2, blocks), max_model_len=min(longest + 1, blocks * options["block_size"]), **options
    )
    histories: dict[int, list[int]] = {}
    expected: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    for number, one in enumerate(turns):
        history = histories.get(one.session, [])
        prompt = history[: int(one.parts * len(history))] + [60 + number] * one.new
        params = SamplingParams(max_tokens=one.out, temperature=0, detokenize=False)
        id = engine.submit(prompt, params, session_id=f"{one.session}", stall_s=2.0)
        expected[id], got[id] = _alone(tuple(prompt), one.out), []
        histories[one.session] = prompt + expected[id]
        while one.waits and engine.has_work():
            _step(engine, got)
    while engine.has_work():
        _step(engine, got)
    assert got == expected
    drain(engine)
    for event, count in engine.sessions.counts.items():
        COUNTS[event] += count


def test_the_property_above_saw_everything_that_can_happen_to_a_session() -> None:
    if not COUNTS["kept"]:  # alone, or on another worker
        test_any_turns_in_any_company_give_the_tokens_they_give_alone()
    assert min(COUNTS[event] for event in ("kept", "resumed", "swapped", "discarded")) > 20, COUNTS


def _step(engine: Any, got: dict[int, list[int]]) -> None:
    report = engine.step()
    check_cache(engine)
    for output in report.outputs:
        got[output.request_id] += output.token_ids
    memory = report.memory
    assert memory.reserved == memory.written + memory.to_write + memory.internal_waste and memory.internal_waste >= 0


def _alone(prompt: tuple[int, ...], out: int, known: dict[Any, list[int]] = {}) -> list[int]:  # noqa: B006  # a cache
    if (prompt, out) not in known:
        known[prompt, out] = alone(Work(prompt, out))[0]
    return known[prompt, out]
