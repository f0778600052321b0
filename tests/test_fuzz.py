"""Random engines under random requests: any policies together, sessions, beams, branches, scores, aborts and resets at any step.

Each case is a function of its seed. ``python -m tests.test_fuzz FIRST LAST`` runs a range of seeds and prints those that fail.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from typing import Any

import attrs
import pytest

from core.types import SamplingParams, StepReport
from plugins.admission.deadline import Deadline
from plugins.allocators.naive import NaiveAllocator
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.idle import breakeven, discard, keep, swap
from plugins.predictors.quantile import Quantile
from plugins.preemption.breakeven import BreakEven
from plugins.preemption.recompute import Recompute
from plugins.preemption.swap import Swap
from plugins.preemption.victims import CHOICES
from plugins.schedulers.chunked import ChunkedScheduler
from plugins.schedulers.fair import FairScheduler
from plugins.schedulers.fcfs import FcfsScheduler
from plugins.schedulers.prefix_aware import PrefixAwareScheduler
from plugins.schedulers.priority import PriorityScheduler
from plugins.schedulers.sjf import SjfScheduler
from plugins.schedulers.slo import SloScheduler
from plugins.schedulers.static import StaticScheduler
from tests.strategies import ByRank
from tests.toy import check_cache, chosen, make_engine

SECONDS = 60.0
STEP_CAP = 4000
IDLE = (keep.Keep, swap.Swap, discard.Discard, breakeven.BreakEven)
SCHEDULERS: tuple[Any, ...] = (
    ChunkedScheduler,
    FcfsScheduler,
    StaticScheduler,
    PriorityScheduler,
    SjfScheduler,
    FairScheduler,
    SloScheduler,
    PrefixAwareScheduler,
    ByRank,
)


@attrs.define
class Answer:
    """What one branch of a request got."""

    tokens: list[int] = attrs.field(factory=list)
    text: str = ""
    reason: str | None = None
    scores: list[tuple[int, float]] = attrs.field(factory=list)

    def take(self, output: Any) -> None:
        assert self.reason is None, "an output after the end"
        self.tokens += output.token_ids
        self.text += output.text
        self.reason = output.finish_reason
        self.scores += [(one.token_id, round(one.logprob, 9)) for one in output.prompt_logprobs]


ALONE: dict[Any, dict[int, Answer]] = {}  # a cache of what follows


def alone(prompt: tuple[int, ...], params: SamplingParams) -> dict[int, Answer]:
    """What a request gets by itself on a large pool."""
    key = prompt, repr(params)
    if key not in ALONE:
        engine = make_engine(num_blocks=1024, max_num_batched_tokens=4096, max_num_seqs=64, max_model_len=2048)
        engine.submit(prompt, params)
        answers: dict[int, Answer] = {}
        while engine.has_work():
            for output in engine.step().outputs:
                answers.setdefault(output.branch, Answer()).take(output)
        ALONE[key] = answers
    return ALONE[key]


class Case:
    """One engine and its requests, drawn from a seed."""

    def __init__(self, seed: int):
        self.draw = draw = random.Random(seed)
        self.sessions = draw.random() < 0.5  # most requests are turns of sessions
        self.longest = draw.choice([64, 90, 140] if self.sessions else [40, 64, 90])
        self.idle = draw.choice(IDLE if self.sessions else (None, *IDLE))
        self.allocator = self._allocator()
        self.engine = self._engine(seed)
        self.params: dict[int, SamplingParams] = {}
        self.turns: dict[int, int] = {}  # request -> session
        self.want: dict[int, dict[int, Answer]] = {}
        self.got: dict[int, dict[int, Answer]] = {}
        self.histories: dict[int, list[int]] = {}

    def _allocator(self) -> Any:
        draw = self.draw
        kind = draw.choice(["paged", "prefix", "prefix", "prefix", "naive"])
        if kind == "paged":
            return PagedAllocator()
        if kind == "prefix":
            return PrefixAllocator(evict=draw.choice(["lru", "lfu", "cost"]), host=draw.random() < 0.5)
        return NaiveAllocator(reserve=draw.choice(["limit", "declared", "pow2"]), fit=draw.choice(["first", "best"]))  # type: ignore[arg-type]

    def _scheduler(self) -> Any:
        draw = self.draw
        kind = draw.choice(SCHEDULERS)
        if kind is ChunkedScheduler:
            return kind(headroom=draw.choice([0, 0.5, 1.0]), max_chunk=draw.choice([None, 3]))
        if kind is PriorityScheduler:
            return kind(age_s=draw.choice([None, 3.0, 60.0]))
        if kind in (SjfScheduler, SloScheduler):
            return kind(patience_s=draw.choice([None, 5.0, 0.0]))
        return kind()

    def _engine(self, seed: int) -> Any:
        draw, scheduler = self.draw, self._scheduler()
        policies = [chosen("idle", self.idle())] if self.idle else []
        if draw.random() < 0.25:
            late: Any = draw.choice(["refuse", "demote"])
            policies.append(chosen("admission", Deadline(late=late, patience=draw.choice([0, 0.5, 1.0]))))
        if draw.random() < 0.3:
            policies.append(chosen("predictor", Quantile(min_seen=1)))
        block_size = draw.choice([1, 2, 3, 4, 5, 8])
        budget = draw.randint(1, 24)
        return make_engine(
            num_blocks=max(2, -(-self.longest // block_size) + draw.randint(0, 8)),
            block_size=block_size,
            num_swap_blocks=draw.choice([0, 2, 6, 40]),
            max_num_batched_tokens=self.longest if isinstance(scheduler, FcfsScheduler | StaticScheduler) else budget,
            max_num_seqs=draw.randint(1, 6),
            max_model_len=self.longest,
            allocator=self.allocator,
            scheduler=scheduler,
            preemption=draw.choice([Swap, Recompute, BreakEven])(
                choose=draw.choice(sorted(CHOICES)), min_progress=draw.choice([0, 3, 16])
            ),
            policies=policies,
            link_bytes_per_s=draw.choice([1e3, 1e6, 1e9]),
            seed=seed,
        )

    # -------------------------------------------------------------------------------------------- requests

    def submit(self) -> None:
        draw, engine = self.draw, self.engine
        prompt = [(draw.choice([0, 100, 200]) + i) % 300 for i in range(draw.randint(1, 20))]
        kind = draw.random() + (0.0 if self.idle else 0.3)
        labels: dict[str, Any] = {"cache_salt": draw.choice(["", "", "b"]), "client_id": draw.choice("ab")}
        special: dict[str, Any] = {"temperature": draw.choice([0.0, 0.0, 0.9])}
        session = None
        if kind < (0.6 if self.sessions else 0.3):
            session, prompt = self._turn()
            labels = {"session_id": str(session), "stall_s": draw.choice([0.0, 2.0, 30.0, 90.0])}
        elif kind < 0.7:
            special = {"temperature": 0.9, "n": draw.randint(2, 4)}
        elif kind < 0.8:
            width = draw.randint(1, 4)
            special = {"temperature": 0.0, "beam_width": width, "n": draw.randint(1, width)}
        elif kind < 0.9:
            special["prompt_logprobs"] = draw.randint(0, 3)
        elif kind < 1.1:
            special["stop"] = ("a", "b", "xy")
        params = SamplingParams(
            max_tokens=max(1, min(draw.randint(1, 16), self.longest - len(prompt))),
            seed=draw.randint(0, 3),
            detokenize="stop" in special or draw.random() < 0.2,
            **special,
        )
        want = alone(tuple(prompt), params)
        labels["priority"] = draw.randint(0, 3)
        if draw.random() < 0.3:
            labels["recorded_output_tokens"] = draw.randint(1, max(len(one.tokens) for one in want.values()))
        if draw.random() < 0.3:
            labels["deadline_s"] = engine._now() + draw.randint(0, 40)
        if draw.random() < 0.3:
            labels["tpot_s"] = draw.choice([0.5, 1.5, 3.0])
        id = engine.submit(tuple(prompt), params, **labels)
        self.want[id], self.got[id], self.params[id] = want, {}, params
        if session is not None:
            self.turns[id] = session
            self.histories[session] = prompt + want[0].tokens

    def _turn(self) -> tuple[int, list[int]]:
        """A session, where one is left without a turn under way, and its next prompt: all of the conversation, or a part of it."""
        draw = self.draw
        busy = {session for id, session in self.turns.items() if 0 not in self.got[id] or not self.got[id][0].reason}
        idle = [session for session in range(4) if session not in busy]
        session = draw.choice(idle if self.sessions and idle else range(4))
        history = self.histories.get(session, [])
        if history and draw.random() < 0.4:
            history = history[: draw.randint(0, len(history))]
        return session, (history + [60 + draw.randint(0, 3)] * draw.randint(1, 4))[: self.longest - 2]

    # -------------------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Serve to the end; raise ``AssertionError`` or what the engine raised."""
        draw, engine = self.draw, self.engine
        to_come, steps = draw.randint(6, 24) if self.sessions else draw.randint(3, 16), 0
        total = to_come
        while to_come or engine.has_work():
            if to_come and (draw.random() < 0.35 or not engine.has_work()):
                self.submit()
                to_come -= 1
            if self.got and draw.random() < 0.03:
                engine.abort(draw.choice(sorted(self.got)))
            if isinstance(self.allocator, PrefixAllocator) and draw.random() < 0.01:
                engine.reset_cache()
            if draw.random() < 0.01:
                engine.end_sessions()
            self._check_step(engine.step())
            steps += 1
            assert steps < STEP_CAP, engine.stats()
        engine.end_sessions()
        engine.step()
        engine.assert_idle()
        summary = engine.metrics.summary()
        delivered = sum(len(one.tokens) for answers in self.got.values() for one in answers.values())
        assert (summary["output_tokens"], sum(summary["requests"].values())) == (delivered, total)
        assert isinstance(self.allocator, PrefixAllocator) or not summary["prefix"]["hit_tokens"]
        for table in ("_room", "_due"):
            assert not getattr(self.allocator, table, None), f"{table} knows sequences that ended"
        self._check_answers()

    def _check_step(self, report: StepReport) -> None:
        memory = report.memory
        assert memory is not None and memory.reserved == memory.written + memory.to_write + memory.internal_waste
        parts = (memory.written, memory.to_write, memory.internal_waste, memory.external_waste, memory.shared)
        assert min(parts) >= 0, memory
        check_cache(self.engine)
        for output in report.outputs:
            assert output.finish_reason != "error", output.error
            self.got[output.request_id].setdefault(output.branch, Answer()).take(output)
        ended = any(output.finish_reason in ("refused", "abort") for output in report.outputs)
        assert report.num_tokens or ended or not self.engine.state.sequences, "a step with work computed nothing"

    def _check_answers(self) -> None:
        for id, want in self.want.items():
            for branch in range(self.params[id].n):
                got = self.got[id].get(branch, Answer())
                assert got.reason, f"request {id} branch {branch} has no end"
                if got.reason == "abort":
                    assert got.tokens == want[branch].tokens[: len(got.tokens)], (
                        f"request {id} branch {branch}, aborted"
                    )
                elif got.reason != "refused":
                    assert got == want[branch], f"request {id} branch {branch}: {self.params[id]}"


@pytest.mark.slow
def test_random_engines_give_every_request_what_it_gets_alone() -> None:
    """As many seeds as a minute allows, the same ones in the same order; the seed of a failure is printed."""
    until, seed = time.monotonic() + SECONDS, 0
    while time.monotonic() < until:
        try:
            Case(seed).run()
        except BaseException:
            print(f"seed {seed}: python -m tests.test_fuzz {seed} {seed + 1}")
            raise
        seed += 1
    print(f"{seed} cases")
    assert seed > 50


def main(first: int, last: int, seconds: float = 110.0) -> int:
    """Run seeds ``first`` to ``last`` - 1, or as many as fit in the time; print each failure once. Gives how many failed."""
    until, failed = time.monotonic() + seconds, 0
    for seed in range(first, last):
        if time.monotonic() > until:
            break
        try:
            Case(seed).run()
        except Exception:
            failed += 1
            print(f"seed {seed}:", *traceback.format_exc().splitlines()[-4:], sep="\n  ")
    print(f"seeds {first} to {seed}: {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]), int(sys.argv[2])) else 0)
