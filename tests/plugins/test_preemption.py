"""Who is pushed out and how: choices, no more victims than needed, branches, no bouncing, the crossover, a full swap pool."""

from __future__ import annotations

from typing import Any

import pytest

from core.types import ConfigError, Plan, PolicyError
from plugins.preemption.breakeven import BreakEven
from plugins.preemption.recompute import Recompute
from plugins.preemption.swap import Swap
from plugins.preemption.victims import CHOICES
from plugins.schedulers.chunked import ChunkedScheduler
from plugins.schedulers.priority import PriorityScheduler
from tests.core.test_engine import assert_as_alone
from tests.toy import Work, make_engine, run

LENGTHS = (8, 20, 14, 5)  # prompt tokens, in order of arrival; the pool is full when all have begun


def _first_victim(choose: str, **labels: Any) -> int:
    """Index of the first request that is pushed out when four share a pool that is too small for them to grow."""
    work = [Work(tuple(range(i, i + n)), 12, arrives=i, labels=labels.get(f"r{i}", {})) for i, n in enumerate(LENGTHS)]
    engine = make_engine(
        num_blocks=16, preemption=Recompute(choose=choose), scheduler=ChunkedScheduler(watermark=0), max_model_len=64
    )
    result = run(engine, work)
    assert_as_alone(work, result)
    return next(p.sequence for report in result.reports for p in report.preempted)


def test_each_choice_pushes_out_whom_it_names() -> None:
    assert _first_victim("youngest") == 3
    assert _first_victim("oldest") == 0
    assert _first_victim("longest") == 1
    assert _first_victim("fewest_blocks") == 3
    targets = {f"r{i}": {"tpot_s": tpot} for i, tpot in enumerate((2.0, 3.0, 9.0, 2.0))}
    assert _first_victim("most_slack", **targets) == 2


def test_an_unknown_choice_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="youngest"):
        Recompute(choose="random")
    assert {*CHOICES} == {"youngest", "oldest", "longest", "fewest_blocks", "most_slack"}


@pytest.mark.parametrize("choose", CHOICES)
def test_nobody_goes_who_need_not(choose: str) -> None:
    """At every preemption, any of the victims fewer would leave the plan too large for the pool."""
    work = [Work(tuple(range(i, i + 5 + 4 * (i % 4))), 20, arrives=i % 3) for i in range(8)]
    engine = make_engine(
        num_blocks=22, preemption=Recompute(choose=choose), scheduler=ChunkedScheduler(watermark=0), max_model_len=64
    )
    choose_victims, seen = engine.hooks.choose_victims, []

    def watched(view: Any, plan: Plan, shortfall: Any) -> Any:
        evictions = choose_victims(view=view, plan=plan, shortfall=shortfall)
        sizes = {s.id: s.private_blocks for s in view.running}
        asked = {c.sequence: _asks(view, c) for c in plan.chunks}
        freed = [sizes[e.sequence] + asked.get(e.sequence, 0) for e in evictions]
        needed = shortfall.blocks_missing
        assert all(sum(freed) - one < needed for one in freed) or len(freed) == 1, (freed, needed)
        seen.append(len(freed))
        return evictions

    engine.hooks.choose_victims = watched
    assert_as_alone(work, run(engine, work))
    assert seen


def _asks(view: Any, chunk: Any) -> int:
    sequence = next(s for s in view.running if s.id == chunk.sequence)
    end = min(sequence.num_computed_tokens + chunk.num_tokens, sequence.num_tokens)
    return max(0, -(-end // view.block_size) - len(sequence.block_table))


def test_one_long_victim_takes_the_place_of_several_short_ones() -> None:
    """The short ones are younger and would go first; the long one alone is enough, so they stay."""
    from plugins.preemption.victims import evictions
    from tests.plugins.views import running_view

    view, plan, shortfall = running_view(blocks=[6, 9, 1, 1], missing=3)
    found = evictions(view, plan, shortfall, "youngest", 0, lambda _: "recompute")
    assert found is not None and [e.sequence for e in found] == [1]


def test_branches_of_one_request_go_together_and_free_what_they_share() -> None:
    """Two branches share 4 blocks and have one of their own: dropping both frees 6, and no third victim is needed."""
    from plugins.preemption.victims import evictions
    from tests.plugins.views import running_view

    view, plan, shortfall = running_view(blocks=[9, 9, 1, 1], missing=6, shared={2: 4, 3: 4})
    found = evictions(view, plan, shortfall, "youngest", 0, lambda _: "recompute")
    assert found is not None and sorted(e.sequence for e in found) == [2, 3]
    kept = evictions(view, plan, shortfall, "youngest", 0, lambda _: "swap")  # swap leaves shared blocks where they are
    assert kept is not None and 1 in {e.sequence for e in kept}


def test_whoever_was_pushed_out_lately_goes_last() -> None:
    from plugins.preemption.victims import evictions
    from tests.plugins.views import running_view

    view, plan, shortfall = running_view(blocks=[9, 3, 3, 3], missing=2, preempted={3: 2})
    assert [e.sequence for e in evictions(view, plan, shortfall, "youngest", 16, lambda _: "swap") or ()] == [2]
    assert [e.sequence for e in evictions(view, plan, shortfall, "youngest", 2, lambda _: "swap") or ()] == [3]


def test_a_victim_does_not_bounce() -> None:
    """Eight growing requests in a pool for half of them: nobody is pushed out more often than a few times."""
    work = [Work(tuple(range(i, i + 6)), 40) for i in range(8)]
    counts = {}
    for progress in (0, 16):
        engine = make_engine(num_blocks=32, preemption=Recompute(min_progress=progress), max_model_len=64)
        result = run(engine, work)
        assert_as_alone(work, result)
        counts[progress] = [f.num_preemptions for report in result.reports for f in report.finished]
    assert max(counts[16]) <= 3 and sum(counts[16]) <= sum(counts[0])


def test_an_eviction_ahead_of_the_first_that_does_not_fit_must_say_so() -> None:
    class Careless(Recompute):
        from core.hookspecs import hookimpl

        @hookimpl
        def choose_victims(self, view: Any, plan: Any, shortfall: Any) -> Any:
            import attrs

            found = Recompute.choose_victims(self, view, plan, shortfall)
            return [attrs.evolve(e, ahead=False) for e in found]

    work = [Work(tuple(range(i, i + n)), 12, arrives=i) for i, n in enumerate(LENGTHS)]
    engine = make_engine(
        num_blocks=16, preemption=Careless(choose="oldest"), scheduler=ChunkedScheduler(watermark=0), max_model_len=64
    )
    with pytest.raises(PolicyError, match="ahead of the first chunk"):
        run(engine, work)


# ---------------------------------------------------------------------------------------------------- swap or recompute

# toy: 8 bytes of KV a token, 10,000 parameters, attention width 2 x 2 x 8. With these rates both cost the same at 24 tokens:
# 2 x 8 / L = (2 x 10,000 + 4 x 32 x 24) / F
CROSSOVER = {"prefill_flop_per_s": 23072.0, "link_bytes_per_s": 16.0}


def _kinds(lengths: tuple[int, ...], **rates: float) -> set[str]:
    work = [Work(tuple(range(i, i + n)), 14, arrives=i) for i, n in enumerate(lengths)]
    size = sum(-(-(n + 3) // 4) for n in lengths)
    engine = make_engine(
        num_blocks=size, preemption=BreakEven(), scheduler=ChunkedScheduler(watermark=0), max_model_len=64, **rates
    )
    result = run(engine, work)
    assert_as_alone(work, result)
    return {p.kind for report in result.reports for p in report.preempted}


def test_across_the_crossover_short_victims_are_recomputed_and_long_ones_swapped() -> None:
    engine = make_engine(**CROSSOVER)
    assert engine.cost.crossover_tokens() == pytest.approx(24)
    assert _kinds((40, 6, 6), **CROSSOVER) == {"recompute"}
    assert _kinds((40, 34, 36), **CROSSOVER) == {"swap"}
    assert _kinds((44, 30, 6, 32, 6, 31), **CROSSOVER) == {"swap", "recompute"}


@pytest.mark.parametrize(("link", "kind"), [(1e9, "swap"), (1e-3, "recompute")])
def test_without_a_crossover_one_choice_is_made(link: float, kind: str) -> None:
    rates = {**CROSSOVER, "link_bytes_per_s": link}
    crossover = make_engine(**rates).cost.crossover_tokens()
    assert crossover == 0 if kind == "swap" else crossover > 1e6  # far beyond any sequence
    assert _kinds((44, 30, 6, 32, 6, 31), **rates) == {kind}


def test_what_others_hold_makes_swap_smaller_and_recompute_cheaper() -> None:
    from tests.plugins.views import running_view

    alone, _, _ = running_view(blocks=[9, 5])
    shared, _, _ = running_view(blocks=[9, 1], shared={1: 4, 0: 4}, finds_prefixes=True)
    cost = make_engine(**CROSSOVER).cost
    whole, part = alone.running[1], shared.running[1]
    assert cost.swap_of(whole, 4) == cost.swap_s(20) and cost.swap_of(part, 4) == cost.swap_s(4)
    assert cost.recompute_of(whole, alone) == cost.recompute_s(20)
    assert cost.recompute_of(part, shared) == cost.recompute_s(20, 16)


def test_a_victim_without_room_on_the_host_is_recomputed_and_the_engine_goes_on() -> None:
    work = [Work(tuple(range(i, i + 8)), 20, 0.9, i, n=3 if i == 2 else 1) for i in range(4)]
    for num_swap_blocks in (0, 2):
        for preemption in (Swap(), BreakEven()):
            engine = make_engine(
                num_blocks=13, num_swap_blocks=num_swap_blocks, preemption=preemption, link_bytes_per_s=1e9
            )
            result = run(engine, work)
            assert_as_alone(work, result)
            assert result.preemptions("turned") + result.preemptions("recompute") + result.preemptions("forced")
            assert result.preemptions("forced") == 0


def test_an_abort_while_swapped_gives_the_host_blocks_back() -> None:
    engine = make_engine(num_blocks=8, preemption=Swap(), link_bytes_per_s=1e9, scheduler=ChunkedScheduler(watermark=0))
    ids = [engine.submit(tuple(range(i, i + 9)), Work((1,), 20).params()) for i in range(2)]
    while not engine.state.swapped():
        engine.step()
    assert engine.state.swap.num_used
    engine.abort(ids[1])
    report = engine.step()
    assert [o.finish_reason for o in report.outputs if o.request_id == ids[1]] == ["abort"]
    assert not engine.state.swap.num_used
    while engine.has_work():
        engine.step()
    engine.assert_idle()


# ---------------------------------------------------------------------------------------------------- priority preempts


def test_an_important_newcomer_takes_blocks_and_rows_of_unimportant_ones() -> None:
    """Rows are full, then blocks: the newcomer gets its first token at once, and those it pushed out end with their own tokens."""
    low = [Work(tuple(range(i, i + 8)), 30, labels={"priority": 5}) for i in range(2)]
    high = Work(tuple(range(40, 50)), 4, arrives=6, labels={"priority": 0})
    for sizes in ({"max_num_seqs": 2, "num_blocks": 64}, {"max_num_seqs": 8, "num_blocks": 10}):
        waits = {}
        for preempt in (True, False):
            engine = make_engine(scheduler=PriorityScheduler(preempt=preempt, watermark=0), max_model_len=40, **sizes)
            result = run(engine, [*low, high])
            assert_as_alone([*low, high], result)
            record = next(f for report in result.reports for f in report.finished if f.num_prompt_tokens == 10)
            waits[preempt] = record.token_times_s[0] - record.arrival_s
        assert waits[True] <= 2 < 6 < waits[False], (sizes, waits)


def test_equals_are_not_pushed_out_for_each_other() -> None:
    work = [Work(tuple(range(i, i + 8)), 20, arrives=i, labels={"priority": 1}) for i in range(5)]
    engine = make_engine(scheduler=PriorityScheduler(), max_num_seqs=2, num_blocks=64)
    assert not sum(len(r.preempted) for r in run(engine, work).reports)


def test_bad_ageing_is_refused() -> None:
    with pytest.raises((ValueError, ConfigError)):
        PriorityScheduler(age_s=0)
