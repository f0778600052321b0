"""Schedulers and preemption policies with one planted fault each."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, Eviction, Plan, Shortfall, View
from plugins.preemption.swap import Swap
from plugins.schedulers.chunked import ChunkedScheduler


class Scheduler(ChunkedScheduler):
    """Plans what the shipped one plans, after ``change``."""

    @hookimpl
    def plan_step(self, view: View) -> Any:
        return self.change(view, ChunkedScheduler.plan_step(self, view))

    def change(self, view: View, plan: Plan) -> Any:
        return plan


class OverBudget(Scheduler):
    """Adds a token where the budget is spent."""

    def change(self, view: View, plan: Plan) -> Any:
        chunks = plan.chunks
        return Plan((chunks[0]._replace(num_tokens=view.max_num_batched_tokens + 1), *chunks[1:]))


class TooMany(Scheduler):
    """Forgets max_num_seqs."""

    def change(self, view: View, plan: Plan) -> Any:
        running = {s.id for s in view.running}
        every = [*view.running, *view.waiting][: view.max_num_batched_tokens]
        return Plan(tuple(Chunk(s.id, 1, s.id in running) for s in every))


class Twice(Scheduler):
    """Names its first sequence again."""

    def change(self, view: View, plan: Plan) -> Any:
        total = sum(chunk.num_tokens for chunk in plan.chunks)
        return (
            Plan((*plan.chunks, plan.chunks[0]._replace(num_tokens=1))) if total < view.max_num_batched_tokens else plan
        )


class Unknown(Scheduler):
    """Plans a sequence that has ended."""

    def change(self, view: View, plan: Plan) -> Any:
        return Plan((Chunk(12345, 1), *plan.chunks[1:]))


class Empty(Scheduler):
    """Rests every third step without saying until when."""

    def change(self, view: View, plan: Plan) -> Any:
        return Plan() if view.step % 3 == 2 else plan


class Spins(Scheduler):
    """Waits until now."""

    def change(self, view: View, plan: Plan) -> Any:
        return Plan(wait_until=view.now) if view.step % 3 == 2 else plan


class NeverPreempts(Scheduler):
    """Leaves may_preempt out."""

    def change(self, view: View, plan: Plan) -> Any:
        return Plan(tuple(chunk._replace(may_preempt=False) for chunk in plan.chunks))


class Greedy(Scheduler):
    """Prompts before decodes: while prompts arrive, running sequences stand still."""

    def change(self, view: View, plan: Plan) -> Any:
        prompts = [s for s in view.running if s.num_missing_tokens > 1]
        waiting = list(view.waiting)[: view.max_num_seqs - len(view.running)]
        if not prompts and not waiting:
            if view.step % 100:  # decodes get a turn now and then
                return Plan(wait_until=view.now + 1) if view.step % 100 > 1 and view.step < 900 else plan
            return plan
        budget, chunks = view.max_num_batched_tokens, []
        for sequence in [*prompts, *waiting]:
            tokens = min(budget, sequence.num_missing_tokens)
            if tokens:
                budget -= tokens
                chunks.append(Chunk(sequence.id, tokens, sequence.where == "device"))
        return Plan(tuple(chunks))


class NewestFirst(Scheduler):
    """Serves the newest of those that wait: under load the oldest never get a turn."""

    def change(self, view: View, plan: Plan) -> Any:
        running = {sequence.id for sequence in view.running}
        chunks = [chunk for chunk in plan.chunks if chunk.sequence in running]
        budget = view.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks)
        rows = view.max_num_seqs - len(running)
        for sequence in [*reversed(view.waiting)][:rows]:
            tokens = min(sequence.num_missing_tokens, budget)
            if tokens < 1:
                break
            budget -= tokens
            chunks.append(Chunk(sequence.id, tokens))
        return Plan(tuple(chunks))


class SetOrder(Scheduler):
    """Plans in the order of a set of strings."""

    def change(self, view: View, plan: Plan) -> Any:
        by_name = {f"sequence {chunk.sequence}": chunk for chunk in plan.chunks}
        return Plan(tuple(by_name[name] for name in set(by_name)))


class Counts(Scheduler):
    """A counter in the class: a run depends on those before it."""

    steps: ClassVar[list[int]] = []

    def change(self, view: View, plan: Plan) -> Any:
        self.steps.append(1)
        return Plan(plan.chunks[: 1 + len(self.steps) // 10])


class Takes(Scheduler):
    """Reserves a block by itself."""

    @hookimpl
    def setup(self, engine_info: Any) -> None:
        object.__setattr__(self, "pool", engine_info.pool)

    def change(self, view: View, plan: Plan) -> Any:
        if self.pool.num_free > 3:  # type: ignore[attr-defined]
            self.pool.take(1)  # type: ignore[attr-defined]
        return plan


class SlowPlan(Scheduler):
    """Takes its time."""

    def change(self, view: View, plan: Plan) -> Any:
        time.sleep(0.03)
        return plan


class QuadraticPlan(Scheduler):
    """Compares every sequence with every other."""

    def change(self, view: View, plan: Plan) -> Any:
        for one in view.running:
            assert sum(other.id == one.id for other in view.running) == 1
        return plan


class PriorityNewcomers(Scheduler):
    """Right: newcomers may preempt, which its docs say. A newcomer that does not fit must not harm those that run."""

    def change(self, view: View, plan: Plan) -> Any:
        return Plan(tuple(chunk._replace(may_preempt=True) for chunk in plan.chunks))


@attrs.define(eq=False)
class WholePrompts:
    """Right: refuses a budget below max_model_len, computes prompts whole, in arrival order."""

    @hookimpl
    def setup(self, engine_info: Any) -> None:
        limits = engine_info.limits
        if limits.max_num_batched_tokens < limits.max_model_len:
            from core.types import ConfigError

            raise ConfigError(
                f"max_num_batched_tokens={limits.max_num_batched_tokens}: max_model_len is {limits.max_model_len}"
            )

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        budget, chunks = view.max_num_batched_tokens, []
        room = view.max_num_seqs - len(view.running)
        for sequence in [*view.running, *list(view.waiting)[:room]]:
            tokens = sequence.num_missing_tokens
            if tokens > budget:
                break
            budget -= tokens
            chunks.append(Chunk(sequence.id, tokens, sequence.where == "device"))
        return Plan(tuple(chunks))


# ------------------------------------------------------------------------------------------------ preemption


class Victims(Swap):
    """Names whom the shipped policy names, after ``change``."""

    @hookimpl
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Any:
        return self.change(view, plan, shortfall, Swap.choose_victims(self, view, plan, shortfall))

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        return victims


class TheFirst(Victims):
    """Pushes out the most wanted sequence."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        return [Eviction(plan.chunks[0].sequence, "swap")]


class Nobody(Victims):
    """Gives an empty list instead of None."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        return []


class OneAtATime(Victims):
    """Names one although more are needed."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        return victims and victims[:1]


class UnknownKind(Victims):
    """A kind that core does not know."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        return victims and [Eviction(victim.sequence, "forget") for victim in victims]


class NamedTwice(Victims):
    """One sequence twice."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        return victims and [*victims, victims[0]]


class Waiting(Victims):
    """A sequence that does not run."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        return [Eviction(view.waiting[0].id, "swap")] if view.waiting else victims


class Everyone(Victims):
    """Leaves nothing of the plan."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        return [Eviction(s.id, "recompute") for s in view.running]


class Oldest(Victims):
    """Always the oldest it may push out, wherever its chunk stands: sequences undo each other's work."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        fitting = {chunk.sequence for chunk in plan.chunks[: shortfall.num_fitting]}
        return [Eviction(s.id, "recompute") for s in view.running if s.id not in fitting][:1] or None


class ByChance(Victims):
    """Chooses the kind by a generator of the process."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        import random

        return victims and [attrs.evolve(v, kind=random.choice(["swap", "recompute"])) for v in victims]


class SlowChoice(Victims):
    """Takes its time."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        time.sleep(0.1)
        return victims


class QuadraticChoice(Victims):
    """Compares every sequence with every other."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        for one in view.running:
            assert sum(other.id == one.id for other in view.running) == 1
        return victims


class GivesBack(Victims):
    """Frees a victim's block by itself."""

    def change(self, view: View, plan: Plan, shortfall: Shortfall, victims: Any) -> Any:
        for victim in (s for s in view.running if victims and s.id == victims[0].sequence):
            victim._pool.give(victim.block_table[-1:])
        return victims
