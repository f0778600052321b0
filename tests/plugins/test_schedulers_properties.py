"""What every scheduler promises, on the toy model and a virtual clock of one second a step: budgets, endings, bounds,
independence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from core.executors.toy import ToyExecutor
from core.types import ConfigError
from plugins.allocators.naive import NaiveAllocator
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
from tests.core.test_engine import assert_as_alone
from tests.strategies import contests
from tests.toy import VOCAB, Result, Work, make_engine, run

ROOT = Path(__file__).parents[2]
PATIENCE, AGE = 20.0, 5.0
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "static": StaticScheduler,
    "fcfs": FcfsScheduler,
    "chunked": ChunkedScheduler,
    "chunked in pieces": lambda: ChunkedScheduler(max_chunk=3, headroom=0.5),
    "priority": lambda: PriorityScheduler(age_s=AGE),
    "sjf": lambda: SjfScheduler(patience_s=PATIENCE),
    "prefix_aware": lambda: PrefixAwareScheduler(max_passed=2),
    "fair": FairScheduler,
    "slo": lambda: SloScheduler(patience_s=PATIENCE),
}
WHOLE = ("static", "fcfs")
names = st.sampled_from(sorted(SCHEDULERS))
PROPERTY = settings(
    max_examples=150,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@st.composite
def labels(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "priority": draw(st.integers(0, 3)),
        "client_id": draw(st.sampled_from(["", "a", "b"])),
        "deadline_s": draw(st.sampled_from([None, 3.0, 10.0, 40.0])),
        "tpot_s": draw(st.sampled_from([None, 0.5, 1.0, 2.0])),
    }


@st.composite
def served(draw: st.DrawFn) -> tuple[list[Work], dict[str, Any]]:
    """Requests that compete, with labels; any allocator, a scheduler by name and a preemption by any choice."""
    work, pool = draw(contests(draw(st.sampled_from(["paged", "paged", "prefix", "naive"]))))
    name = draw(names)
    pool["scheduler"] = SCHEDULERS[name]()
    if name in WHOLE:
        pool["max_num_batched_tokens"] = pool["max_model_len"]
    kind = draw(st.sampled_from([Recompute, Swap, BreakEven]))
    pool["preemption"] = kind(choose=draw(st.sampled_from(CHOICES)), min_progress=draw(st.sampled_from([0, 1, 4])))
    return [attrs.evolve(w, labels=draw(labels())) for w in work], pool


@PROPERTY
@given(case=served())
def test_whoever_is_served_first_gets_the_tokens_it_gets_alone(case: tuple[list[Work], dict[str, Any]]) -> None:
    """Every scheduler with every preemption and every choice of victims: the same tokens, one ending each, nothing left behind."""
    work, pool = case
    result = run(make_engine(**pool), work)
    assert_as_alone(work, result)
    for report in result.reports:
        assert report.num_tokens <= pool["max_num_batched_tokens"]
        assert report.num_running <= pool["max_num_seqs"]
    assert max_preemptions(result) <= preemption_bound(work, pool)


def max_preemptions(result: Result) -> int:
    return max((f.num_preemptions for report in result.reports for f in report.finished), default=0)


def preemption_bound(work: list[Work], pool: dict[str, Any]) -> int:
    """All tokens that are ever computed for the first time, plus one block a sequence: each of them pushes out a sequence once."""
    tokens = sum((len(w.prompt) + w.max_tokens) * w.n for w in work)
    return tokens + sum(w.n for w in work)


@PROPERTY
@given(case=served(), offset=st.sampled_from([0.0, 1e6]))
def test_decisions_do_not_depend_on_when_the_clock_began(
    case: tuple[list[Work], dict[str, Any]], offset: float
) -> None:
    """The same run, twice, and with a clock that starts elsewhere: the same plans, step for step."""
    work, pool = case
    if isinstance(pool["scheduler"], (PriorityScheduler, SjfScheduler, SloScheduler)):
        offset = min(offset, 4096.0)  # ranks add times: beyond 2**12 the last bits of a rank may round another way
    plans = []
    for start in (0.0, offset):
        executor = ToyExecutor(vocab_size=VOCAB, step_seconds=1.0)
        executor.wait_until(start)
        moved = [attrs.evolve(w, labels=_later(w.labels, start)) for w in work]
        scheduler = attrs.evolve(pool["scheduler"])
        result = run(make_engine(**{**pool, "scheduler": scheduler}, executor=executor), moved)
        plans.append([report.plan.chunks for report in result.reports])
    assert plans[0] == plans[1]


def _later(given: dict[str, Any], seconds: float) -> dict[str, Any]:
    deadline = given.get("deadline_s")
    return {**given, "deadline_s": None if deadline is None else deadline + seconds}


HASHED = """
from tests.plugins.test_schedulers_properties import SCHEDULERS
from tests.toy import Work, make_engine, run
for name in sorted(SCHEDULERS):
    work = [Work(tuple(range(i, i + 9)), 12, arrives=i, labels={"client_id": f"c{i % 4}", "priority": i % 3}) for i in range(12)]
    engine = make_engine(scheduler=SCHEDULERS[name](), num_blocks=14, max_num_batched_tokens=56)
    print(name, [tuple(r.plan.chunks) for r in run(engine, work).reports])
"""


def test_decisions_do_not_depend_on_the_order_of_sets() -> None:
    """Two processes that hash strings differently plan the same."""
    outs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", HASHED], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120
        )
        assert done.returncode == 0, done.stderr
        outs.append(done.stdout)
    assert outs[0] == outs[1] and len(outs[0].splitlines()) == len(SCHEDULERS)


# ---------------------------------------------------------------------------------------------------- streams and starvation


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - set(WHOLE) - {"slo"}))
def test_a_stream_gets_its_token_in_every_step_of_anothers_prefill(name: str) -> None:
    """Every scheduler that cuts prompts serves decodes first."""
    work = [Work(tuple(range(4)), 150), Work(tuple(range(200)), 2, arrives=5), Work(tuple(range(90)), 2, arrives=7)]
    engine = make_engine(num_blocks=128, max_num_batched_tokens=16, scheduler=SCHEDULERS[name]())
    result = run(engine, work)
    prefills = [r for r in result.reports if any(c.num_tokens > 1 and c.sequence > 0 for c in r.plan.chunks)]
    assert len(prefills) >= 12
    assert all(any(o.request_id == 0 for o in r.outputs) for r in prefills)


@pytest.mark.parametrize("reserve", ["limit", "declared"])
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_newcomers_that_would_fill_the_step_but_find_no_slot_wait(name: str, reserve: str) -> None:
    """Their blocks are there by number; ``naive`` wants room for all they may become. What runs goes on."""
    late = {"arrives": 1, "labels": {"priority": -5, "deadline_s": 5.0}}
    work = [Work(tuple(range(40)), 24), Work(tuple(range(32)), 20, **late), Work(tuple(range(32)), 20, **late)]
    engine = make_engine(
        num_blocks=24,
        max_model_len=64,
        max_num_batched_tokens=64 if name in WHOLE else 8,
        allocator=NaiveAllocator(reserve=reserve),  # type: ignore[arg-type]
        scheduler=SCHEDULERS[name](),
    )
    result = run(engine, work)
    assert_as_alone(work, result)
    assert sum(r.num_running > 1 for r in result.reports) == 0


def test_slo_lets_a_prefill_wait_only_as_far_as_a_target_demands() -> None:
    """With a step that takes 1 s whatever it computes and targets of 2 s, streams and prefills go on side by side."""
    work = [Work(tuple(range(4)), 60, labels={"tpot_s": 2.0}), Work(tuple(range(100)), 2, arrives=5)]
    result = run(make_engine(num_blocks=128, max_num_batched_tokens=16, scheduler=SloScheduler()), work)
    prefills = [r for r in result.reports if any(c.num_tokens > 1 and c.sequence == 1 for c in r.plan.chunks)]
    assert prefills and all(any(o.request_id == 0 for o in r.outputs) for r in prefills)


RIVALS = 60


def _ends_after(scheduler: Any, victim: Work, rival: Work, **sizes: Any) -> int:
    """Steps from the arrival of ``victim`` to its end, while a rival arrives in every step for as long as that takes, at most
    RIVALS."""
    work = [attrs.evolve(victim, arrives=2), *(attrs.evolve(rival, arrives=i) for i in range(RIVALS))]
    engine = make_engine(scheduler=scheduler, **sizes)
    result = run(engine, work)
    for number, report in enumerate(result.reports):
        if any(o.finish_reason and result.last[(0, 0)] is o for o in report.outputs.ended):
            return number - 2
    raise AssertionError("it never ended")


VICTIM = Work(tuple(range(30)), 20, labels={"priority": 2, "client_id": "a", "deadline_s": 1.0})
RIVAL = Work(tuple(range(6)), 3, labels={"priority": 0, "client_id": "b", "deadline_s": 1e6})
SIZES = {"num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": 60}
OWN = 30 + 20
BEFORE = 3 * (6 + 3)  # tokens of the rivals that are there when the victim arrives
BOUNDS = {
    # R batches of the longest output, then its own
    "static": 4 * (20 + 1) + 20,
    "fcfs": BEFORE + OWN,
    "chunked": BEFORE + OWN,
    "chunked in pieces": BEFORE + OWN,
    "prefix_aware": BEFORE + OWN + 2,
    # two levels of ageing, then what arrived before that; nine tokens a rival
    "priority": int(2 * AGE) + (3 + int(2 * AGE)) * 9 + OWN,
    "sjf": int(PATIENCE) + 3 * 9 + OWN,
    "slo": int(PATIENCE) + 3 * 9 + OWN,
    # clients - 1 times 2 max(prompt, 2 x output of the pool) in output tokens, each at most a step
    "fair": 2 * max(30, 2 * 20) + BEFORE + OWN,
}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_nobody_starves_beyond_the_bound_that_the_scheduler_states(name: str) -> None:
    steps = _ends_after(SCHEDULERS[name](), VICTIM, RIVAL, **SIZES)
    assert steps <= BOUNDS[name], f"{name}: {steps} steps, bound {BOUNDS[name]}"


@pytest.mark.parametrize(
    ("bounded", "unbounded"),
    [
        (SjfScheduler(patience_s=PATIENCE), SjfScheduler(patience_s=None)),
        (PriorityScheduler(age_s=AGE), PriorityScheduler(age_s=None)),
        (SloScheduler(patience_s=PATIENCE), SloScheduler(patience_s=None)),
    ],
)
def test_without_ageing_the_same_request_waits_for_all_who_come_later(bounded: Any, unbounded: Any) -> None:
    """The bounds above are the ageing's doing: without it the victim ends last."""
    assert _ends_after(bounded, VICTIM, RIVAL, **SIZES) < RIVALS < _ends_after(unbounded, VICTIM, RIVAL, **SIZES)


@pytest.mark.parametrize("name", WHOLE)
def test_a_scheduler_of_whole_prompts_refuses_a_step_shorter_than_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=63 must be at least max_model_len=64"):
        make_engine(scheduler=SCHEDULERS[name](), max_model_len=64, max_num_batched_tokens=63)
    make_engine(scheduler=SCHEDULERS[name](), max_model_len=64, max_num_batched_tokens=64)
