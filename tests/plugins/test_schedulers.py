"""What each scheduler is for: whom it starts first, how large it lets a batch grow, what it charges."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from core.hookspecs import hookimpl
from core.types import Plan
from plugins.allocators.paged import PagedAllocator
from plugins.schedulers.chunked import ChunkedScheduler
from plugins.schedulers.fair import FairScheduler
from plugins.schedulers.fcfs import FcfsScheduler
from plugins.schedulers.packing import Room, in_order
from plugins.schedulers.prefix_aware import PrefixAwareScheduler
from plugins.schedulers.priority import PriorityScheduler
from plugins.schedulers.slo import SloScheduler, StepClock
from plugins.schedulers.static import StaticScheduler
from tests.core.test_engine import assert_as_alone
from tests.plugins.views import running_view
from tests.toy import Result, Work, make_engine, run


def starts(result: Result) -> list[int]:
    """Request ids in the order in which they were first computed; in one step, the plan's order."""
    seen: list[int] = []
    for report in result.reports:
        seen += [c.sequence for c in report.plan.chunks if c.sequence not in seen]
    return seen


# ---------------------------------------------------------------------------------------------------- static and fcfs


def test_static_starts_nobody_while_somebody_runs() -> None:
    work = [Work(tuple(range(i, i + 5)), 3 + 4 * (i % 3), arrives=i) for i in range(7)]
    engine = make_engine(scheduler=StaticScheduler(batch_size=3), max_model_len=60)
    plan_step, batches = engine.hooks.plan_step, []

    def watched(view: Any) -> Plan:
        running = {s.id for s in view.running}
        plan = plan_step(view=view)
        new = [c.sequence for c in plan.chunks if c.sequence not in running]
        assert not (new and running), "it admitted beside running sequences"
        batches.extend([len(new)] if new else [])
        return plan

    engine.hooks.plan_step = watched
    assert_as_alone(work, run(engine, work))
    assert max(batches) == 3 and sum(batches) == 7


def test_static_reserves_room_for_all_that_a_request_may_become() -> None:
    work = [Work(tuple(range(8)), 24) for _ in range(6)]
    result = run(make_engine(scheduler=StaticScheduler(), num_blocks=20, max_model_len=60), work)
    assert not any(report.preempted for report in result.reports)


def test_fcfs_keeps_a_token_for_the_oldest_that_runs() -> None:
    """Two prompts that would fill the step: one starts, and the plan holds a chunk that may preempt."""
    engine = make_engine(num_blocks=64, max_num_batched_tokens=64, max_model_len=64, scheduler=FcfsScheduler())
    work = [Work((1, 2), 9), Work(tuple(range(32)), 2, arrives=1), Work(tuple(range(32)), 2, arrives=1)]
    chunks = run(engine, work).reports[1].plan.chunks
    assert [(c.sequence, c.num_tokens, c.may_preempt) for c in chunks] == [(0, 1, True), (1, 32, False)]


def test_fcfs_computes_whole_prompts_and_chunked_cuts_them() -> None:
    work = [Work(tuple(range(4)), 30), *(Work(tuple(range(64)), 2, arrives=5) for _ in range(3))]
    for scheduler, whole in ((FcfsScheduler(), True), (ChunkedScheduler(), False)):
        engine = make_engine(scheduler=scheduler, num_blocks=128, max_model_len=66, max_num_batched_tokens=66)
        result = run(engine, work)
        sizes = {c.num_tokens for r in result.reports for c in r.plan.chunks}
        assert (sizes == {1, 4, 64}) == whole
        assert_as_alone(work, result)


# ---------------------------------------------------------------------------------------------------- prefix_aware


class Pretends(PagedAllocator):
    """Says that so many leading tokens are cached as the prompt's first token names, and gives none: a look is no promise."""

    @hookimpl
    def cached_tokens(self, sequences: Any) -> Any:
        return [min(s.token_ids[0], s.num_prompt_tokens - 1) for s in sequences]


def test_the_longest_cached_prefix_starts_first() -> None:
    work = [Work((first, *range(10)), 3) for first in (2, 9, 0, 5)]
    engine = make_engine(allocator=Pretends(), scheduler=PrefixAwareScheduler(), max_num_seqs=1)
    head = make_engine(allocator=Pretends(), scheduler=PrefixAwareScheduler(), max_num_seqs=4, max_num_batched_tokens=3)
    result = run(head, work)
    assert_as_alone(work, result)
    assert starts(result)[0] == 1
    assert starts(run(engine, work))[0] == 0, "with one row, the head of the queue that is looked up is one request"


@pytest.mark.parametrize("num_blocks", [8, 64])
def test_a_request_is_passed_so_often_and_no_more(num_blocks: int) -> None:
    """A request without a hit, and later ones with one: it starts when max_passed of them have, over many steps or in one plan."""
    for max_passed in (0, 2, 5):
        work = [Work((0, *range(10)), 2, arrives=1), *(Work((9, i, *range(8)), 4, arrives=1) for i in range(12))]
        blocker = Work((0, 1), 4)
        engine = make_engine(
            allocator=Pretends(),
            scheduler=PrefixAwareScheduler(max_passed=max_passed),
            num_blocks=num_blocks,
            max_num_seqs=13,
            max_model_len=32,
        )
        order = starts(run(engine, [blocker, *work]))
        assert order.index(1) <= 2 + max_passed, (max_passed, order)
    assert order.index(1) > 2, "with a bound of 5 it was passed"


# ---------------------------------------------------------------------------------------------------- fair


def _service(result: Result, work: list[Work], until: int) -> dict[str, float]:
    """Weighted tokens that each client had been given after so many steps, as the scheduler charges them."""
    given = {"a": 0.0, "b": 0.0}
    begun: set[int] = set()
    for report in result.reports[:until]:
        for output in report.outputs:
            client = work[output.request_id].labels["client_id"]
            given[client] += 2.0 * len(output.token_ids)
        for chunk in report.plan.chunks:
            if chunk.sequence not in begun:
                begun.add(chunk.sequence)
                given[work[chunk.sequence].labels["client_id"]] += len(work[chunk.sequence].prompt)
    return given


def test_two_clients_with_work_get_the_same_however_much_one_asks() -> None:
    """Client a sends 40 requests at once, b 10: while both have some waiting, service differs by at most the stated bound."""
    work = [Work(tuple(range(i % 7, i % 7 + 6)), 8, labels={"client_id": "a"}) for i in range(40)]
    work += [Work(tuple(range(i, i + 9)), 5, labels={"client_id": "b"}) for i in range(10)]
    bound = 2 * max(9, 2 * 2 * 8)  # two rows, of at most 8 output tokens each
    differences = {}
    for scheduler in (FairScheduler(), ChunkedScheduler()):
        engine = make_engine(scheduler=scheduler, max_num_seqs=2)
        result = run(engine, work)
        both = next(n for n, r in enumerate(result.reports) if _started_all(result, n, range(40, 50), 10))
        given = [_service(result, work, n) for n in range(1, both)]
        differences[type(scheduler)] = max(abs(g["a"] - g["b"]) for g in given)
    assert differences[FairScheduler] <= bound < differences[ChunkedScheduler]


def _started_all(result: Result, step: int, requests: range, count: int) -> bool:
    begun = {c.sequence for report in result.reports[: step + 1] for c in report.plan.chunks}
    return len(begun & set(requests)) == count


def test_a_client_that_was_away_saves_nothing_up() -> None:
    """b comes when a has been served for long: it is not given all that a got before it came."""
    work = [Work(tuple(range(6)), 8, arrives=0, labels={"client_id": "a"}) for _ in range(30)]
    work += [Work(tuple(range(6)), 8, arrives=60, labels={"client_id": "b"}) for _ in range(8)]
    result = run(make_engine(scheduler=FairScheduler(), max_num_seqs=2), work)
    order = starts(result)
    late = [index for index, request in enumerate(order) if request >= 30]
    assert any(request < 30 for request in order[late[0] : late[-1]]), "a had to wait for all of b"


# ---------------------------------------------------------------------------------------------------- slo


def test_the_earliest_deadline_starts_first_and_what_is_lost_last() -> None:
    deadlines = (40.0, 12.0, 0.5, 20.0)
    work = [Work((1, 2, i), 6, labels={"deadline_s": d}) for i, d in enumerate(deadlines)]
    engine = make_engine(scheduler=SloScheduler(), max_num_seqs=1)
    assert starts(run(engine, [Work((9,), 2), *[_later(w) for w in work]]))[1:] == [2, 4, 1, 3]


def _later(work: Work) -> Work:
    return attrs.evolve(work, arrives=1)


@pytest.mark.parametrize("tpot", [0.06, 0.12, 0.3])
def test_a_batch_grows_as_far_as_its_predicted_tpot_clears_the_target(tpot: float) -> None:
    """A step takes 0.01 s a token by the cost model: at most tpot x margin / 0.01 sequences decode together."""
    scheduler = SloScheduler(watermark=0)
    engine = make_engine(
        scheduler=scheduler, prefill_flop_per_s=2e6, max_num_seqs=40, num_blocks=400, max_num_batched_tokens=400
    )
    scheduler._clock.learn = lambda report: None  # the toy's steps take a second: keep to the model
    work = [Work((1, 2, i), 12, labels={"tpot_s": tpot}) for i in range(40)]
    result = run(engine, work)
    most = max(sum(c.num_tokens == 1 for c in r.plan.chunks) for r in result.reports)
    assert most == int(tpot * 0.95 / 0.01)


def test_a_target_that_no_step_can_meet_slows_nobody_down() -> None:
    """A step takes 1 s whatever it computes, the targets say 0.5 s: as many steps as without targets."""
    work = [Work(tuple(range(i, i + 30)), 30, arrives=i, labels={"tpot_s": 0.5}) for i in range(40)]
    sizes = {"num_blocks": 400, "max_num_seqs": 16}
    steps = [
        len(run(make_engine(scheduler=one, **sizes), work).reports) for one in (SloScheduler(), ChunkedScheduler())
    ]
    assert steps[0] <= 1.05 * steps[1]


def test_a_request_whose_patience_is_over_starts_whatever_the_targets_say() -> None:
    """By the cost model two sequences at once miss a target that one meets: without patience they are served one by one."""
    started = {}
    for patience_s in (None, 5.0):
        scheduler = SloScheduler(patience_s=patience_s)
        engine = make_engine(scheduler=scheduler, prefill_flop_per_s=2e6)
        scheduler._clock.learn = lambda report: None  # the toy's steps take a second: keep to the model
        work = [Work((1, 2, i), 40, labels={"tpot_s": 0.015}) for i in range(2)]
        reports = run(engine, work).reports
        started[patience_s] = next(i for i, r in enumerate(reports) if any(c.sequence == 1 for c in r.plan.chunks))
    assert started[None] >= 40 and 5 <= started[5.0] <= 7


def test_the_step_clock_learns_what_steps_take() -> None:
    clock = StepClock(make_engine(prefill_flop_per_s=1e6).cost)

    class Report:
        preempted = ()
        num_tokens = 1
        started_s = 0.0

        def __init__(self, tokens: int):
            self.plan, self.ended_s = Plan(tuple(range(1))), 0.5 + 0.003 * tokens

    for tokens in (1, 40, 7, 100, 23, 64) * 40:
        clock._expected = (1, tokens, clock._cost.step_s(tokens, 0))
        clock.learn(Report(tokens))  # type: ignore[arg-type]
    assert clock.seconds(50, 0) == pytest.approx(0.65, rel=0.01)
    assert clock.tokens_within(0.65, 10, 0) == pytest.approx(40, abs=1)
    assert clock.tokens_within(0.1, 1, 0) == 0


# ---------------------------------------------------------------------------------------------------- priority, room


def test_ageing_lets_an_old_unimportant_request_pass_a_young_important_one() -> None:
    old = Work((1, 2), 4, labels={"priority": 2})
    young = [Work((3, i), 4, arrives=i, labels={"priority": 0}) for i in range(30)]
    place = {}
    for age in (4.0, None):
        engine = make_engine(scheduler=PriorityScheduler(age_s=age, preempt=False), max_num_seqs=1)
        place[age] = starts(run(engine, [Work((5,), 2, labels={"priority": 0}), old, *young])).index(1)
    assert place[4.0] < 10 < place[None]


def test_a_preempted_sequence_waits_until_the_others_can_take_a_step() -> None:
    view, _, _ = running_view(blocks=[3, 3, 3], preempted={})
    room = Room(view, watermark=0)
    fresh = view.running[2]
    assert room.missing_blocks(fresh) == 0  # it has all its blocks
    again, _, _ = running_view(blocks=[3, 3, 3], preempted={2: 0})
    assert Room(again, watermark=0).missing_blocks(again.running[2]) == 1  # what those that run take in a step


def test_nothing_is_sorted_while_no_row_is_free_for_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue costs priority little, and one who outranks what runs by a level is still found."""
    sorted_lengths: list[int] = []

    def watched(sequences: Any, key: Any) -> Any:
        sorted_lengths.append(len(sequences))
        return in_order(sequences, key)

    monkeypatch.setattr("plugins.schedulers.priority.in_order", watched)
    engine = make_engine(scheduler=PriorityScheduler(age_s=None), max_num_seqs=2, num_blocks=64)
    for i in range(50):
        engine.submit((1, 2, i), Work((1,), 30).params(), priority=i % 4)
    for _ in range(5):
        engine.step()
    assert sorted_lengths == [50, 0, 0, 0, 0]
    urgent = engine.submit((5, 6), Work((1,), 3).params(), priority=-1)
    engine.step()
    assert sorted_lengths[-1] == 49 and urgent in engine.state.running_ids
