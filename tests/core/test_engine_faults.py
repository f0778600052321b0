"""Planted faults: each kind must be caught, by core's checks or by the oracle, or the engine's tests prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from core.batch import BatchBuilder
from core.commit import Committer
from core.executors.toy import ToyExecutor
from core.hookspecs import hookimpl
from core.types import Chunk, Eviction, Lease, Plan, PolicyError, Shortfall
from plugins.allocators.paged import PagedAllocator
from plugins.preemption.swap import Swap
from plugins.schedulers.chunked import ChunkedScheduler
from tests.toy import VOCAB, Work, alone, make_engine, run

WORK = [Work(tuple(range(i, i + 9)), 20, 0.9, i, n=1 + i % 2) for i in range(4)]
SIZES = {"num_blocks": 13, "block_size": 4, "max_num_batched_tokens": 9}
EXPECTED = {(i, b): tokens for i, work in enumerate(WORK) for b, tokens in enumerate(alone(work))}


def outcome(**options: Any) -> str:
    """ "right", or how the fault was caught."""
    try:
        result = run(make_engine(**{**SIZES, "preemption": Swap(), **options}), WORK, step_cap=600)
    except PolicyError as error:
        return f"PolicyError: {error}"
    except AssertionError as error:
        return f"invariant: {error}"
    return "right" if result.tokens == EXPECTED else "other tokens"


def test_without_a_fault_the_run_is_right_and_swaps_and_copies() -> None:
    assert outcome() == outcome(checks="cheap") == "right"
    result = run(make_engine(**SIZES, preemption=Swap()), WORK)
    assert result.preemptions("swap") > 2
    assert any(r.memory.copied_bytes for r in result.reports)


class WrongBlock(PagedAllocator):
    """Leases one sequence's new block to another one too."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        leases = PagedAllocator.reserve(self, plan, sequences)
        if isinstance(leases, Shortfall) or sum(1 for x in leases if x.blocks) < 2:
            return leases
        first = next(x for x in leases if x.blocks).blocks[0][1]
        return [attrs.evolve(x, blocks=((x.blocks[0][0], first), *x.blocks[1:])) if x.blocks else x for x in leases]


class DoubleFree(PagedAllocator):
    @hookimpl
    def release(self, releases: Any) -> None:
        for release in releases:
            self._pool.give(release.block_ids)
            self._pool.give(release.block_ids[-1:])


class Leak(PagedAllocator):
    @hookimpl
    def release(self, releases: Any) -> None:
        for release in releases:
            self._pool.give(release.block_ids[1:])


class MissingCopy(PagedAllocator):
    """Replaces a shared block but forgets the copy."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        leases = PagedAllocator.reserve(self, plan, sequences)
        return leases if isinstance(leases, Shortfall) else [attrs.evolve(x, moves=()) for x in leases]


class WritesShared(PagedAllocator):
    """Never copies: a branch writes into its siblings' block."""

    def _need(self, view: Any, num_tokens: int, owners: Any) -> Any:
        table = view.block_table
        end = min(view.num_computed_tokens + num_tokens, view.num_tokens)
        holes = [i for i, b in enumerate(table) if b < 0]
        return holes + list(range(len(table), -(-end // self._pool.block_size)))


class KeepsHoles(PagedAllocator):
    """Forgets that a swapped sequence needs its blocks back."""

    def _need(self, view: Any, num_tokens: int, owners: Any) -> Any:
        return [i for i in PagedAllocator._need(self, view, num_tokens, owners) if i >= len(view.block_table)]


class TooFew(PagedAllocator):
    def _need(self, view: Any, num_tokens: int, owners: Any) -> Any:
        return PagedAllocator._need(self, view, num_tokens, owners)[:1]


class LeaksOnShortfall(PagedAllocator):
    """Touches its state although it answers Shortfall."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        answer = PagedAllocator.reserve(self, plan, sequences)
        if isinstance(answer, Shortfall) and self._pool.num_free:
            self._pool.take(1)
        return answer


class ClaimsHits(PagedAllocator):
    """Says that tokens are cached in blocks that nobody wrote."""

    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        leases = PagedAllocator.reserve(self, plan, sequences)
        if isinstance(leases, Shortfall):
            return leases
        new = [sequences[c.sequence].where == "none" for c in plan.chunks]
        return [attrs.evolve(x, num_cached_tokens=4) if n else x for x, n in zip(leases, new, strict=True)]


class OneLeaseShort(PagedAllocator):
    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        leases = PagedAllocator.reserve(self, plan, sequences)
        return leases if isinstance(leases, Shortfall) else leases[:-1]


class ForeignBlock(PagedAllocator):
    @hookimpl
    def reserve(self, plan: Plan, sequences: Any) -> Any:
        leases = PagedAllocator.reserve(self, plan, sequences)
        return leases if isinstance(leases, Shortfall) else [Lease(((0, 999),)) for _ in leases]


@pytest.mark.parametrize("checks", ["cheap", "full"])
@pytest.mark.parametrize(
    "allocator",
    [
        WrongBlock,
        DoubleFree,
        Leak,
        MissingCopy,
        WritesShared,
        KeepsHoles,
        TooFew,
        LeaksOnShortfall,
        ClaimsHits,
        OneLeaseShort,
        ForeignBlock,
    ],
)
def test_an_allocators_fault_is_caught(allocator: type, checks: str) -> None:
    caught = outcome(allocator=allocator(), checks=checks)
    assert caught != "right"
    if allocator in (DoubleFree, WritesShared, KeepsHoles, TooFew, OneLeaseShort, ForeignBlock):
        assert caught.startswith("PolicyError: tests 0: allocator="), caught


class Scheduler(ChunkedScheduler):
    change: Callable[[Any, Plan], Any]

    @hookimpl
    def plan_step(self, view: Any) -> Plan:
        return type(self).change(view, ChunkedScheduler.plan_step(self, view))


SCHEDULER_FAULTS: dict[str, tuple[Callable[[Any, Plan], Any], str]] = {
    "over budget": (lambda v, p: Plan((p.chunks[0]._replace(num_tokens=99), *p.chunks[1:])), "max_num_batched_tokens is 9"),
    "twice": (lambda v, p: Plan(p.chunks[:1] * 2 if p.chunks[0].num_tokens < 5 else p.chunks), "a sequence twice"),
    "unknown": (lambda v, p: Plan((Chunk(12345, 1),)), "unknown sequence"),
    "no tokens": (lambda v, p: Plan(tuple(c._replace(num_tokens=0) for c in p.chunks)), "less than one token"),
    "part of a token": (lambda v, p: Plan(tuple(c._replace(num_tokens=1.0) for c in p.chunks)), "of a chunk is an int"),
    "waits for the past": (lambda v, p: Plan((), v.now - 5), "it must be later"),
    "waits for ever": (lambda v, p: Plan((), float("inf")), "it must be later"),
    "nothing": (lambda v, p: None, "a Plan is needed"),
    "empty": (lambda v, p: Plan(), "empty plan without wait_until"),
    "too many": (lambda v, p: Plan(tuple(Chunk(s.id, 1, s in list(v.running)) for s in [*v.running, *v.waiting])), "max_num_seqs is 2"),
    "raises": (lambda v, p: 1 // 0, "ZeroDivisionError"),
    "never preempts": (lambda v, p: Plan(tuple(c._replace(may_preempt=False) for c in p.chunks)), "set may_preempt"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SCHEDULER_FAULTS)
def test_a_schedulers_fault_is_a_policy_error_with_its_name(fault: str) -> None:
    change, message = SCHEDULER_FAULTS[fault]
    scheduler = type("Faulty", (Scheduler,), {"change": staticmethod(change)})()
    caught = outcome(scheduler=scheduler, **({"max_num_seqs": 2} if fault == "too many" else {}))
    assert caught.startswith("PolicyError: tests 0: scheduler=faulty plan_step: ")
    assert message in caught


def test_a_plan_cannot_name_a_beam_that_is_held() -> None:
    """It waits for its siblings outside both queues, where a scheduler that keeps views may still find it."""

    class Grabs(ChunkedScheduler):
        @hookimpl
        def plan_step(self, view: Any) -> Plan:
            held = tuple(Chunk(id, 1) for id in engine.state.held)
            return Plan(ChunkedScheduler.plan_step(self, view).chunks[: None if not held else 1] + held[:1])

    engine = make_engine(num_blocks=60, max_num_seqs=3, max_num_batched_tokens=8, scheduler=Grabs())
    work = [Work(tuple(range(9)), 12, beams=4), Work(tuple(range(30)), 20)]
    with pytest.raises(PolicyError, match="a beam that is held"):
        run(engine, work)


class Victims(Swap):
    answer: Callable[[Any, Plan, Shortfall], Any]

    @hookimpl
    def choose_victims(self, view: Any, plan: Plan, shortfall: Shortfall) -> Any:
        return type(self).answer(view, plan, shortfall)


VICTIM_FAULTS: dict[str, tuple[Callable[[Any, Plan, Shortfall], Any], str]] = {
    "the first": (lambda v, p, s: [Eviction(p.chunks[0].sequence, "swap")], "ahead of the first chunk|no progress"),
    "nobody": (lambda v, p, s: [], "gave no eviction"),
    "unknown": (lambda v, p, s: [Eviction(777, "swap")], "not a running sequence"),
    "unknown kind": (lambda v, p, s: [Eviction(v.running[-1].id, "forget")], "unknown kind"),
    "twice": (lambda v, p, s: [Eviction(v.running[-1].id, "swap")] * 2, "named twice"),
}


@pytest.mark.parametrize("fault", VICTIM_FAULTS)
def test_a_preemptors_fault_is_a_policy_error_with_its_name(fault: str) -> None:
    answer, message = VICTIM_FAULTS[fault]
    caught = outcome(preemption=type("Faulty", (Victims,), {"answer": staticmethod(answer)})())
    assert caught.startswith("PolicyError: tests 0: preemption=faulty choose_victims: ")
    assert any(part in caught for part in message.split("|"))


def test_a_preemptor_that_cannot_help_leaves_it_to_core_which_counts_forced() -> None:
    helpless = type("Helpless", (Victims,), {"answer": staticmethod(lambda v, p, s: None)})()
    result = run(make_engine(**SIZES, preemption=helpless), WORK)
    assert result.tokens == EXPECTED
    assert result.preemptions("forced") > 0


def _drop_moves(executor: ToyExecutor, moves: Any) -> None:
    """A lost copy."""


def _reversed_moves(executor: ToyExecutor, moves: Any) -> None:
    original_moves(executor, list(reversed(moves)))


original_moves = ToyExecutor._run_moves
original_pack = BatchBuilder.pack


def _late_slot(builder: BatchBuilder, runs: Any) -> Any:
    """Writes one token of a batch into its neighbour's slot."""
    batch = original_pack(builder, runs)
    batch.slot_mapping[-1] ^= 1
    return batch


def _stale_length(builder: BatchBuilder, runs: Any) -> Any:
    """Key length set to the full prompt while only a chunk is stored."""
    batch = original_pack(builder, runs)
    batch.kv_lens[:] = [len(r.seq.tokens) for r in runs]
    return batch


@pytest.mark.parametrize("fault", [_drop_moves, _reversed_moves])
def test_a_lost_or_misordered_move_changes_the_output(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order matters where a block is swapped out and taken again in one step: some pool size below makes that happen."""
    monkeypatch.setattr(ToyExecutor, "_run_moves", fault)
    swap = Swap(
        choose="longest", min_progress=0
    )  # long ones come back while others go: moves of both kinds meet in a step
    sizes = [(n, b) for n in range(8, 20) for b in (4, 9)]
    assert "other tokens" in {outcome(num_blocks=n, max_num_batched_tokens=b, preemption=swap) for n, b in sizes}


def test_a_token_written_to_the_wrong_slot_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchBuilder, "pack", _late_slot)
    assert outcome() == "other tokens"


def test_a_token_lost_between_sampler_and_state_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Committer._append

    def lossy(committer: Committer, runs: Any, output: Any, now: float) -> Any:
        drawing, tokens = [run for run in runs if run.samples], output.token_ids
        if len(drawing) == len(tokens):  # no branch starts here
            tokens = [0 if len(run.seq.tokens) == 12 else token for run, token in zip(drawing, tokens, strict=True)]
        return append(committer, runs, attrs.evolve(output, token_ids=tokens), now)

    monkeypatch.setattr(Committer, "_append", lossy)
    assert outcome() == "other tokens"


def test_the_toy_answer_depends_on_every_token_it_sees() -> None:
    base = Work(tuple(range(12)), 4)
    answers = {tuple(alone(base)[0])}
    for i in range(12):
        changed = tuple(t if j != i else VOCAB - 1 for j, t in enumerate(base.prompt))
        answers.add(tuple(alone(attrs.evolve(base, prompt=changed))[0]))
    answers.add(tuple(alone(attrs.evolve(base, prompt=tuple(reversed(base.prompt))))[0]))
    assert len(answers) == 14
