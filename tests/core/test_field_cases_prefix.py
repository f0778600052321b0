"""Faults that engines of this kind have had, sections A (KV allocator) and B (prefix cache): each made impossible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.executors.toy import ToyExecutor
from core.frontends.answers import CompletionAnswer
from core.frontends.prepare import Asked
from core.frontends.protocol import read_completion
from core.types import PolicyError
from plugins.allocators.naive import NaiveAllocator
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.preemption.recompute import Recompute
from plugins.preemption.swap import Swap
from tests.toy import Work, alone, check_cache, make_engine, run

MAKERS = {"paged": PagedAllocator, "naive": lambda: NaiveAllocator(reserve="declared"), "prefix": PrefixAllocator}
EVERY = pytest.mark.parametrize("allocator", MAKERS)


def assert_alone(result: Any, work: list[Work]) -> None:
    assert [[result.tokens[(i, b)] for b in range(w.n)] for i, w in enumerate(work)] == [alone(w) for w in work]


# ---------------------------------------------------------------------------------------------------- A. allocator


@EVERY
@pytest.mark.parametrize("aborts", range(1, 8))
def test_an_abort_in_the_last_step_or_twice_frees_once(allocator: str, aborts: int) -> None:
    engine = make_engine(allocator=MAKERS[allocator](), num_blocks=8)
    work = [Work((1, 2, 3, 4, 5), 6, aborts=aborts), Work((9, 8, 7), 6, n=2, temperature=0.9, seed=1, aborts=aborts)]
    engine.abort(0)
    result = run(engine, work, after_step=check_cache)
    assert set(result.reason.values()) <= {"abort", "length"}


@EVERY
def test_a_plugin_that_gives_a_block_back_twice_stops_the_engine_and_is_named(allocator: str) -> None:
    engine = make_engine(allocator=MAKERS[allocator](), num_blocks=8)
    plugin = engine.hooks.chosen[0].plugin
    release = engine.hooks.release
    engine.hooks.release = lambda releases: (plugin.release(releases), release(releases=releases))
    engine.submit((1, 2, 3), Work((1,), 2).params())
    with pytest.raises(PolicyError, match=r"allocator=\w+ release: .*block 0 was given back but nobody holds it"):
        for _ in range(3):
            engine.step()
    with pytest.raises(PolicyError):  # loudly, and for good
        engine.step()


def test_an_evicted_block_cannot_be_found() -> None:
    """bs=4, P=4: A, then B and C take its blocks, then A again."""
    engine = make_engine(allocator=PrefixAllocator(), num_blocks=4, block_size=4)
    prompts = [tuple(range(i, i + 8)) for i in (0, 50, 100, 0)]
    for prompt in prompts:
        work = Work(prompt, 1)
        result = run(engine, [work], after_step=check_cache)
        assert_alone(result, [work])
        assert result.last[(0, 0)].num_cached_tokens == 0


@EVERY
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("chunk", [1, "block", "block-1", "off"])
def test_lengths_on_a_block_boundary(allocator: str, block_size: int, chunk: Any) -> None:
    budget = {1: 1, "block": block_size, "block-1": max(1, block_size - 1), "off": 256}[chunk]
    lengths = [max(1, block_size - 1), block_size, block_size + 1, 2 * block_size, 2 * block_size + 1]
    work = [Work(tuple(range(i, i + n)), m) for i, n in enumerate(lengths) for m in (1, block_size, block_size + 1)]
    for start in range(0, len(work), 3):
        some = work[start : start + 3]
        engine = make_engine(
            allocator=MAKERS[allocator](), block_size=block_size, num_blocks=200, max_num_batched_tokens=budget
        )
        assert_alone(run(engine, some, after_step=check_cache), some)


@EVERY
@pytest.mark.parametrize("budget", [256, 16])
def test_a_request_larger_than_the_pool_is_refused_and_others_go_on(allocator: str, budget: int) -> None:
    engine = make_engine(
        allocator=MAKERS[allocator](), block_size=16, num_blocks=8, max_model_len=1024, max_num_batched_tokens=budget
    )
    result = run(
        engine, [Work(tuple(range(200)), 10), Work(tuple(range(100)), 100), Work(tuple(range(8)), 10)], step_cap=500
    )
    assert result.reason == {(0, 0): "refused", (1, 0): "refused", (2, 0): "length"}
    for i, blocks in ((0, 14), (1, 13)):
        assert f"{blocks} KV blocks" in result.error[(i, 0)] and "8 blocks (128 tokens)" in result.error[(i, 0)]


# ---------------------------------------------------------------------------------------------------- B. prefix cache


def test_a_whole_prompt_in_the_cache_still_computes_its_last_block() -> None:
    """bs=16: L=32 twice finds 0 then 16, L=48 that extends it finds 32; no block with several owners is written (checks=full)."""
    engine = make_engine(allocator=PrefixAllocator(), block_size=16, num_blocks=32)
    prompt = tuple(range(48))
    for length, cached in ((32, 0), (32, 16), (48, 32), (48, 32)):
        work = Work(prompt[:length], 4)
        result = run(engine, [work], after_step=check_cache)
        assert_alone(result, [work])
        last = result.last[(0, 0)]
        assert (last.num_prompt_tokens, last.num_cached_tokens) == (length, cached)
        request = read_completion(b'{"model": "m", "prompt": "x"}')
        asked = Asked(request, [list(prompt[:length])], [""], request.params(), {})
        answer = CompletionAnswer("m", asked, engine.tokenizer)
        answer.add(0, last)
        assert answer._usage()["prompt_tokens_details"] == {"cached_tokens": cached}


def test_the_same_whole_prompt_twice_in_one_step() -> None:
    engine = make_engine(allocator=PrefixAllocator(), block_size=4, num_blocks=32)
    work = [Work(tuple(range(8)), 4)] * 3
    for cached in (0, 4):
        result = run(engine, work, after_step=check_cache)
        assert_alone(result, work)
        assert [result.last[(i, 0)].num_cached_tokens for i in range(3)] == [cached] * 3


@pytest.mark.parametrize("preemption", [Recompute, Swap])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("budget", [64, 6])
def test_hits_after_preemption_continue_where_the_prefix_ends(preemption: type, host: bool, budget: int) -> None:
    """bs=4, P=16, 12 requests of 20 tokens that share their first 12: preempted and admitted again with hits."""
    engine = make_engine(
        allocator=PrefixAllocator(host=host), num_blocks=16, preemption=preemption(), max_num_batched_tokens=budget,
        max_num_seqs=12, link_bytes_per_s=1e9,
    )  # fmt: skip
    work = [Work(tuple(range(12)) + tuple(range(i, i + 8)), 12) for i in range(100, 112)]
    result = run(engine, work, after_step=check_cache)
    assert_alone(result, work)
    assert sum(len(r.preempted) for r in result.reports) > 0
    assert sum(r.prefix_hit_tokens for r in result.reports) >= 9 * 12  # all but the three that started together


def test_tokens_equal_modulo_256_and_blocks_at_another_depth_are_not_hits() -> None:
    engine = make_engine(allocator=PrefixAllocator(), num_blocks=64, executor=_wide())
    prompts = [(65,) * 8, (321,) * 8, (1, 2, 3, 4) + (65,) * 5, (65,) * 8]
    found = []
    for prompt in prompts:
        work = Work(prompt, 3)
        result = run(engine, [work], after_step=check_cache)
        assert [result.tokens[(0, 0)]] == alone(work, executor=_wide())
        found.append(result.last[(0, 0)].num_cached_tokens)
    assert found == [0, 0, 0, 4]


def _wide() -> Any:
    return ToyExecutor(vocab_size=400, step_seconds=1.0)


class Torn(ToyExecutor):
    """Twelve likely tokens, close to one another: they come again, and a penalty changes which is drawn."""

    def _logits(self, row: int, best: int | None = None) -> np.ndarray:
        logits = np.random.default_rng(row).standard_normal(self.vocab_size)
        logits[12:] -= 10
        return logits


NO_PENALTY: dict[str, Any] = {"logit_bias": {319: -1.0}}
PENALTIES = [
    NO_PENALTY, {"repetition_penalty": 1.0, **NO_PENALTY}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0},
    {"presence_penalty": 1.0}, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
]  # fmt: skip


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_count_the_same_tokens_cold_cached_and_preempted(
    penalties: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bs=16, L=33, M=24: the same ids, from histories that hold every token once, in order, prompt and output apart."""
    seen: list[tuple[int, ...]] = []
    prompt, execute = tuple(i % 9 for i in range(33)), ToyExecutor.execute

    def noted(executor: Any, batch: Any, moves: Any, sampling: Any) -> Any:
        for tokens, start in zip(sampling.histories, sampling.num_prompt_tokens, strict=True):
            if tuple(tokens[:33]) == prompt:
                assert start == 33
                seen.append(tuple(tokens))
        return execute(executor, batch, moves, sampling)

    monkeypatch.setattr(ToyExecutor, "execute", noted)
    mine = Work(prompt, 24, sampling=penalties)
    others = [Work(tuple(range(i, i + 30)), 40, sampling=penalties) for i in (100, 150, 200)]
    answers = []
    for how in ("cold", "cached", Recompute, Swap):
        preempts = isinstance(how, type)
        engine = make_engine(
            allocator=PrefixAllocator(), block_size=16, num_blocks=13 if preempts else 64,
            executor=Torn(vocab_size=320, step_seconds=1.0), preemption=how() if preempts else None,
        )  # fmt: skip
        if how == "cached":
            run(engine, [mine])
        seen.clear()
        work = [*(others if preempts else ()), mine]
        result = run(engine, work)
        key = (len(work) - 1, 0)
        assert preempts or (result.last[key].num_cached_tokens > 0) == (how == "cached")
        late = [p for r in result.reports for p in r.preempted if p.sequence == key[0] and p.num_computed_tokens >= 43]
        assert bool(late) == preempts, "preempted after ten tokens or more"
        answers.append(result.tokens[key])
        assert seen == [(*prompt, *result.tokens[key][:k]) for k in range(24)]
    assert answers.count(answers[0]) == 4
    assert len(set(answers[0])) < 24, "tokens came again, so counts matter"
    plain = alone(Work(prompt, 24, sampling=NO_PENALTY), executor=Torn(vocab_size=320, step_seconds=1.0))[0]
    assert (answers[0] == plain) == (penalties in PENALTIES[:2]), "a penalty changes what is drawn"
