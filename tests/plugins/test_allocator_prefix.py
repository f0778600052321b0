"""allocator=prefix: what is found, what is not, what goes first, the host tier, and reset."""

from __future__ import annotations

from typing import Any

import pytest

from core.scratch import Step
from core.types import Request
from plugins.allocators.content import ContentIndex
from plugins.allocators.evict import ORDERS
from plugins.allocators.prefix import PrefixAllocator
from plugins.preemption.swap import Swap
from tests.toy import Result, Work, alone, check_cache, make_engine, run

A, B, C = (tuple(range(i, i + 16)) for i in (0, 100, 200))


def serve(engine: Any, *prompts: tuple[int, ...], max_tokens: int = 1, **fields: Any) -> list[int]:
    """Serve prompts one after the other; cached tokens of each. Tokens must be those each gets alone."""
    found = []
    for prompt in prompts:
        work = Work(prompt, max_tokens, **fields)
        result = run(engine, [work], after_step=check_cache)
        assert result.tokens[(0, 0)] == alone(work)[0]
        found.append(result.last[(0, 0)].num_cached_tokens)
    return found


def prefix_engine(num_blocks: int = 16, block_size: int = 4, **options: Any) -> Any:
    engine_options = {k: options.pop(k) for k in ("num_swap_blocks", "link_bytes_per_s", "preemption") if k in options}
    return make_engine(
        allocator=PrefixAllocator(**options), num_blocks=num_blocks, block_size=block_size, **engine_options
    )


def test_what_decode_wrote_is_found_by_the_next_turn() -> None:
    engine = prefix_engine()
    work = Work(A[:6], 8)
    answer = run(engine, [work]).tokens[(0, 0)]
    turn = A[:6] + tuple(answer) + B[:3]
    assert serve(engine, turn) == [12]  # 6 + 7 written tokens: the last one of the answer has no KV


def test_a_salt_is_a_namespace() -> None:
    engine = prefix_engine()
    found = [serve(engine, A, salt=salt)[0] for salt in ("", "x", "", "x", "y")]
    assert found == [0, 0, 12, 12, 0]


def test_keys_differ_between_engines_and_between_depths() -> None:
    keys = set()
    for _ in range(2):
        engine = prefix_engine()
        serve(engine, A[:4] * 3)
        keys |= set(engine.hooks.chosen[0].plugin._index.entries)
    assert len(keys) == 6


def test_running_requests_share_one_copy_of_their_prefix() -> None:
    engine = prefix_engine(num_blocks=64)
    run(engine, [Work(A, 1)])
    for i in range(5):
        engine.submit((*A, i), Work((1,), 8).params())
    engine.step()
    assert engine.pool.num_used == 4 + 5


def test_a_tail_goes_before_its_head() -> None:
    engine = prefix_engine(num_blocks=6)
    assert serve(engine, A, B[:8], A) == [0, 0, 12]  # B took the 2 unused blocks
    engine = prefix_engine(num_blocks=6)
    assert serve(engine, A, C[:14], A) == [0, 0, 8]  # C took 2 of A's 4 blocks: its last two


def look(engine: Any, prompt: tuple[int, ...]) -> int:
    """Tokens that would be found, without serving the prompt."""
    request = Request(id=engine._next_id(), prompt_token_ids=prompt, params=Work(prompt, 1).params(), arrival_s=0.0)
    return engine.hooks.cached_tokens(sequences=[engine._new_sequence(request, Step(0, 0.0, [])).view])[0]


@pytest.mark.parametrize(
    ("evict", "left"),
    [
        ("lru", {"A": 0, "B": 4, "C": 8}),  # A is the oldest, then C's tail
        ("lfu", {"A": 4, "B": 0, "C": 8}),  # A was hit; of the others C's tail came first, then B
        ("cost", {"A": 0, "B": 0, "C": 12}),  # C's tail is deep, so it is dearest
    ],
)
def test_which_block_goes_first_is_a_small_function(evict: str, left: dict[str, int]) -> None:
    """A is served twice, then C, then B: 5 blocks are cached, 3 are free. One that needs 5 blocks takes two of the cached."""
    engine = prefix_engine(num_blocks=8, evict=evict)
    serve(engine, A[:5], A[:5], C[:13], B[:5], tuple(range(300, 319)))
    assert {name: look(engine, prompt) for name, prompt in (("A", A[:5]), ("B", B[:5]), ("C", C[:13]))} == left


def test_an_order_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "deepest", lambda entry, cost, size: -entry.depth)
    engine = prefix_engine(num_blocks=4, evict="deepest")
    assert serve(engine, A[:9], B[:5], C[:5], A[:9]) == [0, 0, 0, 4]
    with pytest.raises(ValueError, match="deepest"):
        PrefixAllocator(evict="newest")


def test_an_evicted_block_comes_back_from_the_host_by_copy() -> None:
    """6 blocks on the device, 64 on the host, a fast link: three prompts in turn are all found again, and are right."""
    engine = prefix_engine(num_blocks=6, host=True, link_bytes_per_s=1e12)
    assert serve(engine, A, B, C, A, B, C, A) == [0, 0, 0, 12, 12, 12, 12]
    assert engine.state.swap.num_cached > 4
    engine.assert_idle()


def test_the_host_is_not_used_where_computing_again_is_cheaper() -> None:
    engine = prefix_engine(num_blocks=6, host=True, link_bytes_per_s=1e-3)
    assert serve(engine, A, B, C, A) == [0, 0, 0, 0]
    assert engine.state.swap.num_cached == 0


def test_swapped_sequences_take_host_space_before_the_cache() -> None:
    engine = prefix_engine(num_blocks=10, num_swap_blocks=8, host=True, link_bytes_per_s=1e12, preemption=Swap())
    serve(engine, A, B, C, tuple(range(40, 56)))
    assert engine.state.swap.num_cached > 4
    work = [Work(tuple(range(i, i + 8)), 24) for i in range(4)]
    result = run(engine, work, after_step=check_cache)
    assert result.preemptions("swap") > 2
    assert [result.tokens[(i, 0)] for i in range(4)] == [alone(w)[0] for w in work]


def test_a_reset_while_requests_run_offers_nothing_of_theirs() -> None:
    engine = prefix_engine(num_blocks=32)
    request = engine.submit(A, Work((1,), 12).params())
    for _ in range(4):
        engine.step()
    engine.reset_cache()
    while engine.has_work():
        engine.step()
        check_cache(engine)
    assert request is not None and not engine.pool.kept
    assert serve(engine, A, A) == [0, 12]


def test_sequences_that_end_without_blocks_are_forgotten() -> None:
    """Core does not name them in ``release``: 3,000 that were looked up while they waited, and then aborted."""
    engine = prefix_engine(num_blocks=32)
    serve(engine, A)
    engine.submit(A, Work((1,), 40).params())
    for i in range(0, 3000, 8):
        waiting = [engine.submit((i % 300,) * 100, Work((1,), 2).params()) for _ in range(8)]
        engine.step()
        for request in waiting:
            engine.abort(request)
        if not engine.state.running:
            engine.submit(A, Work((1,), 40).params())
    assert len(engine.hooks.chosen[0].plugin._index.chains) < 1200


@pytest.mark.parametrize("n_turns", [6])
def test_a_conversation_computes_each_token_once_but_for_block_tails(n_turns: int) -> None:
    engine, history, computed = prefix_engine(num_blocks=64), A[:10], 0
    for turn in range(n_turns):
        result = run(engine, [Work(history, 5)], after_step=check_cache)
        last = result.last[(0, 0)]
        computed += last.num_prompt_tokens - last.num_cached_tokens
        history += tuple(result.tokens[(0, 0)]) + (turn, turn + 1, turn + 2)
    new_prompt_tokens = 10 + 3 * (n_turns - 1)
    assert computed <= new_prompt_tokens + n_turns * 4  # less than a block again each turn


def test_a_hash_that_is_the_same_for_everything_loses_hits_but_gives_nobody_anothers_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ContentIndex, "hash", lambda self, parent, tokens: b"same")
    engine = prefix_engine(num_blocks=12)
    assert serve(engine, A, B, A[:4] * 4, B[4:8] + A[4:], A) == [0, 0, 4, 0, 4]
    assert isinstance(run(engine, [Work(C, 8, 0.9, 1, n=3), Work(A, 8)], after_step=check_cache), Result)


@pytest.mark.parametrize("num_shared", [3, 4])
def test_many_at_once_over_one_prefix_under_pressure(num_shared: int) -> None:
    """Branches, hits and preemptions together."""
    work = [Work(A[: 4 * num_shared] + (i, i + 1), 9, 0.8, i, n=1 + i % 3, arrives=i // 2) for i in range(8)]
    for num_blocks in (12, 15, 24):
        result = run(prefix_engine(num_blocks=num_blocks), work, after_step=check_cache)
        assert [[result.tokens[(i, b)] for b in range(w.n)] for i, w in enumerate(work)] == [alone(w) for w in work]
