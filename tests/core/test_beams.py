"""Beam search on the toy model: the same answers whatever the pool, the preemption and the company; against a plain search."""

from __future__ import annotations

import functools
import os
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from core.accounting import memory_report
from core.executors.toy import ToyExecutor
from core.hookspecs import hookimpl
from core.params import check_params
from core.state import Status
from core.types import HOLE, Plan, RequestError, SamplingParams, Shortfall, View
from plugins.allocators.naive import NaiveAllocator
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.preemption.breakeven import BreakEven
from plugins.preemption.recompute import Recompute
from plugins.preemption.swap import Swap
from plugins.schedulers.chunked import ChunkedScheduler
from plugins.schedulers.static import StaticScheduler
from tests.strategies import ALLOCATORS, ByRank
from tests.toy import VOCAB, Result, Work, check_cache, make_engine, run

PROPERTY = settings(
    max_examples=int(os.environ.get("QUIRE_EXAMPLES", "150")),
    derandomize="QUIRE_EXAMPLES" not in os.environ,  # the same examples in every run of CI; others by hand
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
EOS_EVERY = 4
SEEN = {
    allocator: dict.fromkeys(("swap", "recompute", "turned", "forced", "forked", "held", "dropped", "copied"), 0)
    for allocator in ALLOCATORS
}


class Model(ToyExecutor):
    """The toy model without an engine: log probabilities of the token behind a list of tokens."""

    def after(self, tokens: tuple[int, ...]) -> np.ndarray:
        seen = (np.array(tokens, np.int64) + (np.arange(len(tokens), dtype=np.int64) << 20)).astype(np.uint64)
        places = np.arange(1, 2 * len(tokens), 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = int(((seen + np.uint64(1)) * places).sum(dtype=np.uint64))
        logits = self._logits((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64 >> 11)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@functools.lru_cache(maxsize=4096)
def expected(prompt: tuple[int, ...], width: int, n: int, max_tokens: int, length_penalty: float) -> list[list[int]]:
    """Plain beam search over whole rows, as transformers writes it: dense scores, -1e9 for what is out."""
    model = Model(vocab_size=VOCAB, eos_every=EOS_EVERY)
    eos = sorted(model.tokenizer.eos_ids)
    beams, scores = [prompt] * width, np.array([0.0] + [-1e9] * (width - 1))
    done: list[tuple[int, ...]] = [()] * width
    done_scores, finished = np.full(width, -1e9), np.zeros(width, bool)
    for length in range(1, max_tokens + 1):
        table = np.stack([model.after(beam) for beam in beams]) + scores[:, None]
        flat = np.argsort(-table.reshape(-1), kind="stable")[: max(2, 1 + len(eos)) * width]
        values = table.reshape(-1)[flat]
        longer = [(*beams[i // VOCAB], int(i % VOCAB)) for i in flat]
        ends = np.array([length == max_tokens or tokens[-1] in eos for tokens in longer])
        going = np.argsort(-(values + ends * -1e9), kind="stable")[:width]
        final = values / length**length_penalty
        final[~(ends & (np.arange(len(flat)) < width))] -= 1e9
        merged = np.concatenate([done_scores, final])
        best = np.argsort(-merged, kind="stable")[:width]
        done = [(done + longer)[i] for i in best]
        finished = np.concatenate([finished, ends & (np.arange(len(flat)) < width)])[best]
        done_scores = merged[best]
        beams, scores = [longer[i] for i in going], (values + ends * -1e9)[going]
        worst = done_scores.min() if finished.all() else -1e9
        if ends.all() or not scores[0] / length**length_penalty > worst:
            break
    return [list(tokens[len(prompt) :]) for tokens in done[:n]]


def expected_of(work: Work) -> list[list[int]]:
    assert work.beams is not None
    return expected(work.prompt, work.beams, work.n, work.max_tokens, work.length_penalty)


def check_written(engine: Any) -> None:
    """Where nothing is shared, the report counts what every sequence has written on the device, held beams too."""
    state, size = engine.state, engine.limits.block_size
    if not state.pool.num_extra_refs:
        tables = [(seq.table, seq.view.num_computed_tokens) for seq in state.sequences.values()]
        filled = [
            min(size, computed - i * size) for table, computed in tables for i, b in enumerate(table) if b != HOLE
        ]
        assert memory_report(state, 0).written == sum(max(0, n) for n in filled)


def serve(work: list[Work], seen: dict[str, int] | None = None, **options: Any) -> Result:
    engine = make_engine(executor=ToyExecutor(vocab_size=VOCAB, step_seconds=1.0, eos_every=EOS_EVERY), **options)
    held: list[set[int]] = [set()]  # at the beginning of each step

    def look(engine: Any) -> None:
        check_cache(engine)
        check_written(engine)
        held.append(set(engine.state.held))

    result = run(engine, work, after_step=look)
    if seen is not None:
        seen["held"] += sum(map(len, held))
        for before, report in zip(held, result.reports, strict=False):
            for one in report.preempted:
                seen["dropped" if one.sequence in before else one.kind] += 1
        seen["forked"] += sum(r.num_forked for r in result.reports)
        seen["copied"] += sum(r.memory.copied_bytes for r in result.reports)
    return result


def assert_as_expected(work: list[Work], result: Result) -> None:
    for i, one in enumerate(work):
        reasons = [result.reason[(i, branch)] for branch in range(one.n)]
        if "abort" in reasons:
            assert set(reasons) == {"abort"} and not any(result.tokens[(i, branch)] for branch in range(one.n))
        elif one.beams is not None:
            assert [result.tokens[(i, branch)] for branch in range(one.n)] == expected_of(one), f"request {i}"
            assert set(reasons) <= {"stop", "length"}


@st.composite
def searches(draw: st.DrawFn) -> Work:
    width = draw(st.integers(1, 4))
    start = draw(st.sampled_from([0, 0, 50, 90]))
    return Work(
        prompt=tuple(range(start, start + draw(st.integers(1, 17)))),
        max_tokens=draw(st.integers(1, 12)),
        n=draw(st.integers(1, width)),
        beams=width,
        length_penalty=draw(st.sampled_from([1.0, 0.0, 2.0, -1.0, 0.6])),
        arrives=draw(st.integers(0, 6)),
        aborts=draw(st.sampled_from([None, None, None, None, None, 3, 9])),
        salt=draw(st.sampled_from(["", "", "b"])),
    )


@st.composite
def pools(draw: st.DrawFn, allocator: str) -> tuple[list[Work], dict[str, Any]]:
    """One to three searches, sometimes beside a plain request, in a pool in which one beam fits alone and little more does."""
    work = draw(st.lists(searches(), min_size=1, max_size=3))
    if draw(st.booleans()):
        work.append(Work(tuple(range(7)), 10, arrives=draw(st.integers(0, 6))))
    work = [attrs.evolve(one, recorded=one.max_tokens) for one in work]
    size = draw(st.integers(1, 5))
    longest = max(len(one.prompt) + one.max_tokens for one in work)
    slots = draw(st.integers(1, 3)) if allocator == "naive" else 1
    return work, {
        "allocator": ALLOCATORS[allocator](draw),
        "scheduler": draw(st.sampled_from([ChunkedScheduler, ByRank]))(),
        "preemption": draw(st.sampled_from([Recompute, Swap, Swap, BreakEven]))(),
        "block_size": size,
        "num_blocks": max(2, -(-longest // size) * slots + draw(st.integers(0, 12))),
        "num_swap_blocks": draw(st.sampled_from([0, 3, 40, 40])),
        "max_num_batched_tokens": draw(st.integers(1, 24)),
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 6, 8])),
        "max_model_len": longest,
        "link_bytes_per_s": draw(st.sampled_from([1e3, 1e6, 1e9])),
    }


@pytest.mark.parametrize("allocator", ALLOCATORS)
@PROPERTY
@given(data=st.data())
def test_answers_do_not_depend_on_the_pool(allocator: str, data: st.DataObject) -> None:
    """Tokens and order are those of the plain search; every step makes progress, and nothing is left."""
    work, options = data.draw(pools(allocator))
    assert_as_expected(work, serve(work, SEEN[allocator], **options))


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_property_above_saw_what_is_peculiar_to_beams(allocator: str) -> None:
    """Forks, copies, beams that waited for a sibling, some of which lost their KV meanwhile; and preemptions."""
    seen = SEEN[allocator]
    if not seen["forked"]:
        test_answers_do_not_depend_on_the_pool(allocator)
    assert min(seen[kind] for kind in ("forked", "copied", "held", "dropped")) > 9, seen
    assert seen["swap"] + seen["recompute"] + seen["turned"] + seen["forced"] > 9, seen


class Helpless:
    """A preemption policy that never knows whom to push out: core does (``forced``)."""

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> None:
        return None


@pytest.mark.parametrize(
    ("kind", "preemption", "num_swap_blocks"),
    [("recompute", Recompute, 0), ("swap", Swap, 64), ("turned", Swap, 2), ("forced", Helpless, 0)],
)
@pytest.mark.parametrize("allocator", [PagedAllocator, PrefixAllocator, NaiveAllocator])
def test_a_running_beam_may_be_preempted_in_each_way(
    allocator: type, kind: str, preemption: type, num_swap_blocks: int
) -> None:
    """Over a range of pools, whatever the scheduler lets through."""
    work = [Work(tuple(range(k, k + 9)), 12, n=3, beams=3) for k in (0, 40, 80)]
    seen = dict.fromkeys(SEEN["paged"], 0)
    for num_blocks in range(12, 36, 4):
        options = {"preemption": preemption(), "num_swap_blocks": num_swap_blocks, "num_blocks": num_blocks}
        for scheduler in (ChunkedScheduler(), ByRank()):
            served = serve(
                work, seen, allocator=allocator(), scheduler=scheduler, max_model_len=21, block_size=2, **options
            )
            assert_as_expected(work, served)
    assert seen[kind] > 0, seen


@pytest.mark.parametrize("allocator", [PagedAllocator, PrefixAllocator, NaiveAllocator])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -2.0])
def test_many_beams_in_a_large_pool_fork_and_copy(allocator: type, length_penalty: float) -> None:
    work = [Work(tuple(range(k, k + 9)), 14, n=5, beams=8, length_penalty=length_penalty) for k in range(3)]
    seen = dict.fromkeys(SEEN["paged"], 0)
    result = serve(work, seen, allocator=allocator(), num_blocks=512, max_num_seqs=32, max_model_len=64)
    assert_as_expected(work, result)
    assert seen["forked"] > 20 and seen["copied"] > 0 and not seen["recompute"] and not seen["swap"]
    assert {result.reason[key] for key in result.reason} <= {"stop", "length"}
    assert all(f.num_output_tokens == len(f.token_times_s) for r in result.reports for f in r.finished)


def test_a_search_of_one_beam_is_greedy() -> None:
    greedy = Work((1, 2, 3, 4), 20)
    result = serve([greedy, attrs.evolve(greedy, beams=1)])
    assert result.tokens[(0, 0)] == result.tokens[(1, 0)]


def test_more_beams_than_rows_take_turns() -> None:
    work = [Work((5, 6, 7), 8, n=4, beams=4)]
    assert_as_expected(work, serve(work, max_num_seqs=1))


def test_a_static_batch_serves_beams() -> None:
    """Its newcomers, children that found no room among them, start only when nothing runs."""
    work = [Work(tuple(range(k, k + 6)), 8, n=2, beams=3) for k in range(3)]
    options: dict[str, Any] = {"num_blocks": 6, "max_model_len": 24, "max_num_seqs": 4}
    assert_as_expected(work, serve(work, scheduler=StaticScheduler(), **options))


def test_an_abort_ends_every_beam_held_ones_too() -> None:
    """The pool is so small that beams wait for their siblings when the request goes."""
    engine = make_engine(num_blocks=4, max_model_len=16, executor=ToyExecutor(vocab_size=VOCAB, step_seconds=1.0))
    request = engine.submit((1, 2, 3), Work((), 12, n=2, beams=4).params())
    while not engine.state.held:
        engine.step()
    assert all(seq.status is Status.HELD for seq in engine.state.held.values())
    engine.abort(request)
    report = engine.step()
    assert [(out.branch, out.finish_reason) for out in report.outputs] == [(0, "abort"), (1, "abort")]
    engine.assert_idle()


def test_text_and_logprobs_of_an_answer() -> None:
    """As many as the request asked for, which is less than the search looked at; eos has a probability, and no text."""
    engine = make_engine(executor=ToyExecutor(vocab_size=VOCAB, step_seconds=1.0, eos_every=EOS_EVERY))
    params = SamplingParams(max_tokens=12, temperature=0, n=2, beam_width=3, logprobs=1)
    engine.submit(tuple(range(9)), params)
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    model = Model(vocab_size=VOCAB, eos_every=EOS_EVERY)
    assert [list(out.token_ids) for out in outputs] == expected(tuple(range(9)), 3, 2, 12, 1.0)
    for out in outputs:
        shown = out.token_ids[:-1] if out.finish_reason == "stop" else out.token_ids
        assert out.text == engine.tokenizer.decode(shown, True)
        for i, one in enumerate(out.logprobs):
            row = model.after((*range(9), *out.token_ids[:i]))
            assert (one.token_id, len(one.top)) == (out.token_ids[i], 1)
            assert one.logprob == pytest.approx(row[one.token_id]) and one.rank == 1 + (row > row[one.token_id]).sum()
    scores = [sum(one.logprob for one in out.logprobs) / len(out.token_ids) for out in outputs]
    assert scores == sorted(scores, reverse=True)
    assert {out.finish_reason for out in outputs} <= {"stop", "length"} and all(out.logprobs for out in outputs)


class Mute(ToyExecutor):
    """Gives no log probabilities, like an executor that only prices steps."""

    def execute(self, *args: Any) -> Any:
        return attrs.evolve(super().execute(*args), logprobs=None)


def test_an_executor_without_log_probabilities_fails_that_request_alone() -> None:
    work = [Work((1, 2, 3), 4, n=2, beams=2), Work((1, 2), 4)]
    result = run(make_engine(executor=Mute(vocab_size=VOCAB, step_seconds=1.0)), work)
    assert [result.reason[(0, 0)], result.reason[(0, 1)], result.reason[(1, 0)]] == ["error", "error", "length"]
    assert "gives none" in (result.error[(0, 0)] or "")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"beam_width": 0}, "beam_width"), ({"beam_width": 33}, "beam_width"), ({"beam_width": 2.0}, "beam_width"),
        ({"n": 4}, "n"),
        ({"temperature": 0.7}, "temperature"), ({"top_k": 5}, "top_k"), ({"top_p": 0.9}, "top_p"), ({"min_p": 0.1}, "min_p"),
        ({"length_penalty": 11}, "length_penalty"), ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"beam_width": None, "length_penalty": 0.5, "n": 1}, "length_penalty"), ({"stop": ("x",)}, "stop"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"stop_token_ids": (3,)}, "stop_token_ids"), ({"logit_bias": {3: 1.0}}, "logit_bias"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"), ({"allowed_token_ids": (3,)}, "allowed_token_ids"),
        ({"bad_words": ((3,),)}, "bad_words"),
    ],
)  # fmt: skip
def test_what_a_search_cannot_take_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0, "n": 2, "beam_width": 3} | changes)
    with pytest.raises(RequestError, match=field) as caught:
        check_params(params, vocab_size=VOCAB, max_model_len=64, num_prompt_tokens=3)
    assert caught.value.param == field
