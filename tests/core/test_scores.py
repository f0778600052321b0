"""Penalties and prompt probabilities under chunks, preemptions and prefix hits: what a request gets alone, bit for bit."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from core.batch import MAX_SCORED_TOKENS
from core.executors.toy import ToyExecutor
from core.types import Lease, PolicyError, SamplingParams
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.preemption.recompute import Recompute
from plugins.preemption.swap import Swap
from tests.toy import make_engine

PROMPTS = [tuple((7 * i + j * j) % 250 for j in range(33)) for i in range(4)]
SHORT = {"max_tokens": 24, "ignore_eos": True, "detokenize": False}
FIXED = {"temperature": 0, "detokenize": False}
KINDS = [
    SamplingParams(temperature=0, repetition_penalty=1.3, **SHORT),
    SamplingParams(temperature=0, frequency_penalty=1.0, **SHORT),
    SamplingParams(seed=3, presence_penalty=2.0, logit_bias={5: 1.0}, min_tokens=24, **SHORT),
    SamplingParams(temperature=0, prompt_logprobs=3, logprobs=2, **SHORT),
]


def serve(engine: Any, params: list[SamplingParams], again: int = 1) -> tuple[list[list[Any]], int]:
    """Per request: tokens with their probabilities, and the prompt's; and how many preemptions there were."""
    found, preempted = [], 0
    for _ in range(again):
        ids = [engine.submit(prompt, one) for prompt, one in zip(PROMPTS, params, strict=False)]
        found = [[[], [], []] for _ in ids]
        while engine.has_work():
            report = engine.step()
            preempted += len(report.preempted)
            for out in report.outputs:
                tokens, logprobs, scores = found[ids.index(out.request_id)]
                assert out.error is None
                tokens += out.token_ids
                logprobs += out.logprobs
                scores += out.prompt_logprobs
    engine.assert_idle()
    return found, preempted


def alone(params: list[SamplingParams]) -> list[Any]:
    return [
        serve(make_engine(num_blocks=256, max_num_batched_tokens=512),
        [one if j == i else SamplingParams(max_tokens=1) for j in range(i + 1)])[0][i]
        for i, one in enumerate(params)
    ]  # fmt: skip


ALONE = alone(KINDS)


def test_the_lengths_are_right() -> None:
    tokens, logprobs, scores = ALONE[3]
    assert (len(tokens), len(logprobs), len(scores)) == (24, 24, 32)
    assert [one.token_id for one in scores] == list(PROMPTS[3][1:])
    assert all(not one[2] for one in ALONE[:3])


@pytest.mark.parametrize("preemption", [Recompute, Swap])
@pytest.mark.parametrize("allocator", [PagedAllocator, PrefixAllocator])
@pytest.mark.parametrize(("num_blocks", "budget"), [(64, 512), (64, 3), (30, 64), (18, 5)])
def test_nothing_depends_on_the_company(allocator: Any, preemption: Any, num_blocks: int, budget: int) -> None:
    engine = make_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        allocator=allocator(),
        preemption=preemption(),
        max_model_len=64,
    )
    found, preempted = serve(engine, KINDS)
    assert found == ALONE
    assert preempted or num_blocks == 64


def test_a_prefix_hit_hides_nothing() -> None:
    """The same four again, warm: the penalised ones hit the cache, the scored one asks for none; equal answers."""
    engine = make_engine(num_blocks=256, max_num_batched_tokens=512, allocator=PrefixAllocator())
    assert serve(engine, KINDS, again=2)[0] == ALONE
    plain = [attrs.evolve(one, prompt_logprobs=None) for one in KINDS]
    assert engine.metrics.prefix_hit_tokens > 0
    before = engine.metrics.prefix_hit_tokens
    serve(engine, [plain[0]])
    assert engine.metrics.prefix_hit_tokens == before + 32
    scored, _ = serve(engine, [attrs.evolve(KINDS[3], n=1)] * 4)
    assert engine.metrics.prefix_hit_tokens == before + 32
    assert scored[3] == ALONE[3]


def test_a_scored_sequence_finds_its_own_blocks_again_after_a_recompute() -> None:
    """Its salt is its own, so what it finds it computed itself: prompt, scored before, and output, which has no scores."""
    prompts = [tuple(range(9 * i, 9 * i + 6)) for i in range(3)]
    params = [
        SamplingParams(max_tokens=24, temperature=0, detokenize=False, prompt_logprobs=i) for i in (None, None, 1)
    ]
    answers = []
    for num_blocks in (12, 200):
        engine = make_engine(num_blocks=num_blocks, allocator=PrefixAllocator())
        ids = [engine.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        reports = [engine.step() for _ in iter(engine.has_work, False)]
        outputs = [out for report in reports for out in report.outputs if out.request_id == ids[2]]
        assert any(p.sequence == ids[2] for r in reports for p in r.preempted) == (num_blocks == 12)
        answers.append(([out.token_ids for out in outputs], [out.prompt_logprobs for out in outputs]))
    assert answers[0] == answers[1] and len(answers[0][1][0]) == 5


def test_prefix_hits_are_counted_once_and_not_of_what_a_preemption_lost() -> None:
    """Four prompts without a common token, pushed out and computed again; and beams that lost and found their rows."""
    engine = make_engine(num_blocks=12, max_num_seqs=3, allocator=PrefixAllocator())
    ids = [engine.submit(tuple(range(60 * i, 60 * i + 8)), SamplingParams(max_tokens=24, **FIXED)) for i in range(4)]
    preempted = sum(len(engine.step().preempted) for _ in iter(engine.has_work, False))
    assert preempted and engine.metrics.summary()["prefix"] == {"query_tokens": 8 * len(ids), "hit_tokens": 0}
    engine = make_engine(num_blocks=60, max_num_seqs=3, max_num_batched_tokens=8)
    engine.submit(tuple(range(9)), SamplingParams(max_tokens=12, beam_width=4, **FIXED))
    engine.submit(tuple(range(9)), SamplingParams(max_tokens=20, **FIXED))
    while engine.has_work():
        engine.step()
    assert engine.metrics.summary()["prefix"] == {"query_tokens": 18, "hit_tokens": 0}


def test_a_step_scores_no_more_rows_than_it_may() -> None:
    """Prompts of 700 tokens with a budget of 2,000: rows of logits stay few, and all is scored."""
    widths: list[int] = []

    class Watched(ToyExecutor):
        def execute(self, batch: Any, moves: Any, sampling: Any) -> Any:
            widths.append(len(batch.logit_tokens))
            return ToyExecutor.execute(self, batch, moves, sampling)

    engine = make_engine(num_blocks=1024, max_num_batched_tokens=2000, executor=Watched(step_seconds=1.0))
    prompts = [tuple((i * j) % 250 for j in range(700)) for i in range(1, 4)]
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0))
    outputs = [out for _ in iter(engine.has_work, False) for out in engine.step().outputs]
    assert [len(out.prompt_logprobs) for out in outputs] == [699] * 3
    assert max(widths) <= MAX_SCORED_TOKENS + 2 * len(prompts)


def test_branches_share_their_prompts_scores() -> None:
    engine = make_engine(num_blocks=128)
    engine.submit(PROMPTS[0], SamplingParams(max_tokens=3, n=3, seed=1, prompt_logprobs=1, ignore_eos=True))
    outputs = [out for _ in iter(engine.has_work, False) for out in engine.step().outputs]
    firsts = [out.prompt_logprobs for out in outputs if out.prompt_logprobs]
    assert len(firsts) == 3 and len(set(firsts)) == 1 and len(firsts[0]) == 32
    engine.assert_idle()


class Oversharing(PagedAllocator):
    """Says that tokens are cached which nobody computed for this request."""

    def reserve(self, plan: Any, sequences: Any) -> Any:
        leases = super().reserve(plan, sequences)
        return [
            attrs.evolve(lease, num_cached_tokens=1) if isinstance(lease, Lease) and lease.blocks else lease
            for lease in leases
        ]


def test_an_allocator_that_shares_across_salts_is_caught() -> None:
    from core.hookspecs import hookimpl

    Oversharing.reserve = hookimpl(Oversharing.reserve)  # type: ignore[method-assign]
    engine = make_engine(allocator=Oversharing())
    engine.submit((1, 2, 3), SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(PolicyError, match="across cache_salt"):
        engine.step()
