"""Every hook is called when, with what and as often as its contract says: one test a hook, named after it."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from core import hookspecs
from core.discovery import discover
from core.hookspecs import ForkGroup, hookimpl
from core.kernel import AttentionCase
from core.plugins import EngineHooks
from core.types import (
    Chunk,
    ConfigError,
    EngineInfo,
    Eviction,
    Finished,
    IdleChoice,
    Lease,
    Plan,
    Policy,
    PolicyError,
    Preempted,
    Refusal,
    Release,
    Request,
    RequestError,
    Shortfall,
    StepReport,
    Triage,
)
from plugins.allocators.naive import NaiveAllocator
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.preemption.recompute import Recompute
from plugins.preemption.swap import Swap
from plugins.schedulers.chunked import ChunkedScheduler
from tests.toy import Work, chosen, make_engine, run

HOOKS = [name for spec in hookspecs.SPECS for name in vars(spec) if not name.startswith("_")]
WORK = [Work(tuple(range(i, i + 9)), 12, 0.9, i, n=1 + i % 2) for i in range(4)]
SIZES = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 9}


class Spy:
    """Notes the arguments and answers of one deciding hook."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], Any]] = []


def spy_on(hook: str, base: type) -> tuple[Any, Spy]:
    """A policy like ``base`` whose ``hook`` is noted in the returned spy."""
    spy = Spy()
    original = getattr(base, hook)
    names = tuple(inspect.signature(original).parameters)[1:]
    source = f"def {hook}(self, {', '.join(names)}):\n    return _noted(self, {', '.join(names)})"

    def noted(self: Any, *args: Any) -> Any:
        answer = original(self, *args)
        spy.calls.append((dict(zip(names, args, strict=True)), answer))
        return answer

    scope: dict[str, Any] = {"_noted": noted}
    exec(compile(source, hook, "exec"), scope)  # a hook's argument names matter, so the function needs a real signature
    return attrs.define(type("Spied", (base,), {hook: hookimpl(scope[hook])}), eq=False)(), spy


def test_every_hook_has_a_contract_and_a_test_of_its_name() -> None:
    tests = [
        name
        for name, _ in inspect.getmembers(sys.modules[__name__], inspect.isfunction)
        if name.startswith("test_hook_")
    ]
    for hook in HOOKS:
        spec = next(getattr(s, hook) for s in hookspecs.SPECS if hasattr(s, hook))
        assert spec.__doc__ and len(spec.__doc__) > 80, f"{hook} needs a contract"
        assert "Called" in spec.__doc__ or "called" in spec.__doc__, f"{hook}: say when it is called"
        assert f"test_hook_{hook}" in tests, f"write test_hook_{hook}"


def test_a_step_calls_few_hooks_whatever_the_number_of_sequences() -> None:
    counts = {}
    for n in (1, 8):
        engine = make_engine(max_num_seqs=8)
        calls = []
        engine.hooks._manager.add_hookcall_monitoring(lambda name, *_, calls=calls: calls.append(name), lambda *_: None)
        for hook in hookspecs.DECIDERS_REQUIRED + hookspecs.DECIDERS_OPTIONAL:
            if hook != "prepare_model":
                original = getattr(engine.hooks, hook)
                setattr(engine.hooks, hook, lambda _f=original, _n=hook, _c=calls, **kw: (_c.append(_n), _f(**kw))[1])
        for i in range(n):
            engine.submit((1, 2, i), Work((1,), 6).params())
        engine.step()
        calls.clear()
        engine.step()
        counts[n] = len(calls)
    assert counts[1] == counts[8] <= 4


# ---------------------------------------------------------------------------------------------------- discovery and start


def test_hook_provide_policies() -> None:
    import plugins

    offered = list(plugins.provide_policies())
    assert all(isinstance(p, Policy) and p.summary for p in offered)
    assert {(o.kind, o.name) for o in discover().options} >= {(p.kind, p.name) for p in offered}


def test_hook_provide_config_path() -> None:
    """Called by discovery, which hands the paths to Hydra; tests/core/test_plugins.py and the example package use it for real."""
    for _, path in discover().paths:
        assert path.startswith("pkg://")


def test_hook_setup() -> None:
    class Watcher:
        seen: list[EngineInfo] = []  # noqa: RUF012

        @hookimpl
        def setup(self, engine_info: EngineInfo) -> None:
            self.seen.append(engine_info)

    engine = make_engine(observers=[Watcher()], num_blocks=30, seed=5)
    (info,) = Watcher.seen
    assert info.pool is engine.pool and info.limits.num_blocks == 30 and info.cost is engine.cost and info.seed == 5


def test_hook_prepare_model() -> None:
    class Doubles:
        @hookimpl
        def prepare_model(self, model: Any) -> Any:
            return model * 2, "doubled"

    policies = [
        chosen("allocator", PagedAllocator()),
        chosen("scheduler", ChunkedScheduler()),
        chosen("preemption", Swap()),
    ]
    assert EngineHooks(policies).prepare_model(4) == (4, None)
    assert EngineHooks([*policies, chosen("linears", Doubles())]).prepare_model(4) == (8, "doubled")


CASE = AttentionCase(
    phase="decode", dtype="float32", kv_dtype="float32", head_dim=64, group_size=3, window=None, soft_cap=None, block_size=16, device="cpu"
)  # fmt: skip


def test_hook_select_kernel() -> None:
    class Never:
        @hookimpl
        def select_kernel(self, case: AttentionCase) -> Any:
            return Refusal(f"no head_dim {case.head_dim} here")

    class Always:
        @hookimpl
        def select_kernel(self, case: AttentionCase) -> Any:
            return "a kernel"

    policies = [
        chosen("allocator", PagedAllocator()),
        chosen("scheduler", ChunkedScheduler()),
        chosen("preemption", Swap()),
    ]
    never, always = chosen("kernel", Never()), chosen("kernel", Always())
    assert EngineHooks([*policies, never, always]).select_kernel(CASE) == "a kernel"
    with pytest.raises(ConfigError, match="no head_dim 64 here"):
        EngineHooks([*policies, never]).select_kernel(CASE)


# ---------------------------------------------------------------------------------------------------- the step


def test_hook_admit() -> None:
    class Picky(PagedAllocator):
        @hookimpl
        def admit(self, sequences: Any) -> Any:
            return [Refusal("only short prompts") if s.num_prompt_tokens > 4 else None for s in sequences]

    result = run(make_engine(allocator=Picky()), [Work((1, 2, 3), 3), Work(tuple(range(9)), 3)])
    assert result.reason == {(0, 0): "length", (1, 0): "refused"}
    assert result.error[(1, 0)] == "only short prompts"

    class Wrong(PagedAllocator):
        @hookimpl
        def admit(self, sequences: Any) -> Any:
            return []

    engine = make_engine(allocator=Wrong())
    engine.submit((1,), Work((1,), 3).params())
    with pytest.raises(PolicyError, match="admit: gave"):
        engine.step()


def test_hook_cached_tokens() -> None:
    """What the allocator finds reaches the scheduler's view for a bounded head of the queue, and changes nothing by itself."""
    seen: list[dict[int, int]] = []

    class Looks(PagedAllocator):
        @hookimpl
        def cached_tokens(self, sequences: Any) -> Any:
            assert len(sequences) <= 2
            return [2 for _ in sequences]

    class Reads(ChunkedScheduler):
        @hookimpl
        def plan_step(self, view: Any) -> Plan:
            seen.append(dict(view.cached_tokens))
            return ChunkedScheduler.plan_step(self, view)

    result = run(
        make_engine(allocator=Looks(), scheduler=Reads(), max_num_seqs=2), [Work((1, 2, 3, i), 3) for i in range(5)]
    )
    assert seen[0] == {0: 2, 1: 2}
    assert all(reason == "length" for reason in result.reason.values())


def test_hook_predict_output() -> None:
    seen: list[int] = []

    class Predicts:
        @hookimpl
        def predict_output(self, sequences: Any) -> Any:
            seen.append(len(sequences))
            return [None if s.num_prompt_tokens > 4 else 7 for s in sequences]

    engine = make_engine(policies=[chosen("predictor", Predicts())])
    for prompt in ((1, 2), tuple(range(9))):
        engine.submit(prompt, Work((1,), 12).params())
    engine.step()
    assert seen == [2] and [v.predicted_output_tokens for v in engine.state.running] == [7, 12]
    engine.step()
    assert seen == [2], "asked once, at arrival"

    class Wrong:
        @hookimpl
        def predict_output(self, sequences: Any) -> Any:
            return [0]

    engine = make_engine(policies=[chosen("predictor", Wrong())])
    engine.submit((1, 2), Work((1,), 12).params())
    with pytest.raises(PolicyError, match="predictor=wrong predict_output: gave"):
        engine.step()


def test_hook_triage() -> None:
    seen: list[int] = []

    class Refuses:
        @hookimpl
        def triage(self, view: Any) -> Any:
            seen.append(len(view.waiting))
            return Triage(refused=tuple((s.id, "not today") for s in view.waiting if s.num_prompt_tokens > 4))

    engine = make_engine(policies=[chosen("admission", Refuses())])
    result = run(engine, [Work((1, 2, 3), 3), Work(tuple(range(9)), 3)])
    assert result.reason == {(0, 0): "length", (1, 0): "refused"} and result.error[1, 0] == "not today"
    assert seen == [2], "asked only while something waits"


def test_hook_plan_idle() -> None:
    seen: list[tuple[int, int]] = []

    class Keeps:
        @hookimpl
        def plan_idle(self, view: Any) -> Any:
            seen.append((len(view.idle), view.blocks_missing))
            return [IdleChoice(s.id, "keep") for s in view.idle]

    engine = make_engine(policies=[chosen("idle", Keeps())], num_blocks=8, max_model_len=32)
    engine.submit(tuple(range(12)), Work((1,), 2).params(), session_id="s", stall_s=1.0)
    while engine.has_work():
        engine.step()
    assert not seen and engine.state.view.idle[0].where == "device"
    engine.submit(tuple(range(9)), Work((1,), 20).params())
    while engine.has_work():
        engine.step()
    assert (1, 0) in seen and any(missing for _, missing in seen), "asked each step, and again when blocks are missing"
    engine.assert_idle()  # core forgot what nobody gave up

    class Wrong:
        @hookimpl
        def plan_idle(self, view: Any) -> Any:
            return [IdleChoice(99, "keep")]

    engine = make_engine(policies=[chosen("idle", Wrong())])
    for length in (2, 9):
        engine.submit((1, 2, 3), Work((1,), length).params(), session_id=f"s{length}", stall_s=1.0)
    with pytest.raises(PolicyError, match="idle=wrong plan_idle"):
        while engine.has_work():
            engine.step()


def test_hook_plan_step() -> None:
    policy, spy = spy_on("plan_step", ChunkedScheduler)
    result = run(make_engine(scheduler=policy, **SIZES), WORK)
    assert len(spy.calls) == len(result.reports)
    for (arguments, plan), report in zip(spy.calls, result.reports, strict=True):
        assert arguments["view"].max_num_batched_tokens == 9
        assert isinstance(plan, Plan) and sum(c.num_tokens for c in plan.chunks) <= 9
        assert report.num_tokens <= sum(c.num_tokens for c in plan.chunks)


def test_hook_plan_step_may_wait() -> None:
    class Waits(ChunkedScheduler):
        @hookimpl
        def plan_step(self, view: Any) -> Plan:
            return Plan(wait_until=10.0) if view.now < 10.0 else ChunkedScheduler.plan_step(self, view)

    engine = make_engine(scheduler=Waits())
    engine.submit((1, 2), Work((1,), 2).params())
    report = engine.step()
    assert report.idle and report.wait_until == 10.0 and engine.has_work()
    engine.executor.wait_until(report.wait_until)
    assert engine.step().num_tokens == 2


def test_hook_reserve() -> None:
    policy, spy = spy_on("reserve", PagedAllocator)
    run(make_engine(allocator=policy, **SIZES), WORK)
    shortfalls = [answer for _, answer in spy.calls if isinstance(answer, Shortfall)]
    assert shortfalls and all(s.blocks_missing >= 1 for s in shortfalls)
    for arguments, answer in spy.calls:
        assert all(c.sequence in arguments["sequences"] or True for c in arguments["plan"].chunks)
        if not isinstance(answer, Shortfall):
            assert len(answer) == len(arguments["plan"].chunks) and all(isinstance(x, Lease) for x in answer)


def test_hook_choose_victims() -> None:
    policy, spy = spy_on("choose_victims", Recompute)
    result = run(make_engine(preemption=policy, **SIZES), WORK)
    assert spy.calls
    for arguments, evictions in spy.calls:
        plan, shortfall = arguments["plan"], arguments["shortfall"]
        assert all(isinstance(c, Chunk) and c.may_preempt for c in plan.chunks), "newcomers leave the plan first"
        assert 0 <= shortfall.num_fitting < len(plan.chunks)
        assert all(isinstance(e, Eviction) for e in evictions or ())
    assert result.preemptions("recompute") == sum(len(e or ()) for _, e in spy.calls)


def test_hook_fork() -> None:
    policy, spy = spy_on("fork", PagedAllocator)
    work = [Work(tuple(range(9)), 4, 0.9, 3, n=3)]
    result = run(make_engine(allocator=policy), work)
    ((arguments, leases),) = spy.calls
    (group,) = arguments["groups"]
    assert isinstance(group, ForkGroup) and len(group.children) == 2 and len(leases[0]) == 2
    assert set(range(3)) == {branch for _, branch in result.tokens}

    class CannotShare(PagedAllocator):
        @hookimpl
        def fork(self, groups: Any) -> Any:
            return Shortfall(0, 1)

    assert run(make_engine(allocator=CannotShare()), work).tokens == result.tokens


def test_hook_commit() -> None:
    seen: list[list[int]] = []

    class Notes(PagedAllocator):
        @hookimpl
        def commit(self, sequences: Any) -> None:
            seen.append([s.num_computed_tokens for s in sequences])
            assert all(s.num_computed_tokens <= len(s.block_table) * 4 for s in sequences)

    run(make_engine(allocator=Notes(), max_num_batched_tokens=5), [Work(tuple(range(8)), 3)])
    assert seen == [[5], [8], [9], [10]]


def test_hook_release() -> None:
    policy, spy = spy_on("release", PagedAllocator)
    work = [Work(tuple(range(7)), 12, aborts=3), *WORK]
    run(make_engine(allocator=policy, preemption=Swap(), **SIZES), work)
    releases = [r for arguments, _ in spy.calls for r in arguments["releases"]]
    assert all(isinstance(r, Release) and -1 not in r.block_ids for r in releases)
    assert {r.reason for r in releases} >= {"finish", "swap", "abort"}


def test_hook_external_waste() -> None:
    """Asked with the head of the queue, and only while something waits and blocks are free; core then names what nobody can use."""
    policy, spy = spy_on("external_waste", NaiveAllocator)
    policy.reserve_for = "declared"
    work = [Work((1,) * 6, 6), Work((2,) * 4, 12), Work((3,) * 6, 6)]  # 3, 4 and 3 blocks of 4 in a pool of 8
    result = run(make_engine(allocator=policy, num_blocks=8, block_size=4), work)
    assert spy.calls and all(arguments["sequences"] and answer == 1 for arguments, answer in spy.calls)
    waste = [r.memory.external_waste for r in result.reports if r.num_waiting]
    assert waste and set(waste) == {4}  # 8 - 3 - 4 = 1 block free, 3 are wanted


def test_external_waste_beyond_the_free_blocks_is_named() -> None:
    class Short(NaiveAllocator):
        @hookimpl
        def external_waste(self, sequences: Any) -> Any:
            return 9

    engine = make_engine(allocator=Short(reserve="declared"), num_blocks=8, block_size=4)
    for i in range(3):
        engine.submit((i,) * 6, Work((1,), 6).params())
    with pytest.raises(PolicyError, match="allocator=short external_waste: gave 9: of 2 free blocks"):
        engine.step()


def test_hook_reset_cache() -> None:
    """Called at intake when an operator asked, before the requests that came with it are admitted; refused without a provider."""
    policy, spy = spy_on("reset_cache", PrefixAllocator)
    engine = make_engine(allocator=policy)
    run(engine, [Work(tuple(range(9)), 2)])
    assert engine.pool.num_cached == 2
    engine.reset_cache()
    result = run(engine, [Work(tuple(range(9)), 2)])
    assert len(spy.calls) == 1 and result.last[(0, 0)].num_cached_tokens == 0
    with pytest.raises(RequestError, match="allocator=pagedallocator keeps no cache"):
        make_engine().reset_cache()


# ---------------------------------------------------------------------------------------------------- observers and the end


class Observer:
    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {hook: [] for hook in (*hookspecs.OBSERVER_HOOKS, "teardown")}

    @hookimpl
    def requests_arrived(self, requests: Any) -> None:
        self.seen["requests_arrived"].append(requests)

    @hookimpl
    def sequences_preempted(self, preempted: Any) -> None:
        self.seen["sequences_preempted"].append(preempted)

    @hookimpl
    def sequences_finished(self, finished: Any) -> None:
        self.seen["sequences_finished"].append(finished)

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self.seen["step_finished"].append(report)

    @hookimpl
    def teardown(self) -> None:
        self.seen["teardown"].append(None)


@pytest.fixture(scope="module")
def observed() -> dict[str, list[Any]]:
    observer = Observer()
    engine = make_engine(observers=[observer], preemption=Swap(), **SIZES)
    observer.seen["reports"] = run(engine, WORK).reports
    engine.close()
    engine.close()
    return observer.seen


def test_hook_requests_arrived(observed: dict[str, list[Any]]) -> None:
    (requests,) = observed["requests_arrived"]
    assert len(requests) == 4 and all(isinstance(r, Request) for r in requests)


def test_hook_sequences_preempted(observed: dict[str, list[Any]]) -> None:
    flat = [p for call in observed["sequences_preempted"] for p in call]
    assert (
        flat == [p for r in observed["reports"] for p in r.preempted]
        and all(isinstance(p, Preempted) for p in flat)
        and flat
    )


def test_hook_sequences_finished(observed: dict[str, list[Any]]) -> None:
    flat = [f for call in observed["sequences_finished"] for f in call]
    assert len(flat) == 6 and all(isinstance(f, Finished) for f in flat)
    assert all(call for call in observed["sequences_finished"])


def test_hook_step_finished(observed: dict[str, list[Any]]) -> None:
    assert observed["step_finished"] == observed["reports"]


def test_hook_teardown(observed: dict[str, list[Any]]) -> None:
    assert observed["teardown"] == [None]


def test_an_observer_that_fails_is_named_and_the_others_are_still_told() -> None:
    class Fails:
        @hookimpl
        def step_finished(self, report: StepReport) -> None:
            raise RuntimeError("disk full")

    observer = Observer()
    engine = make_engine(observers=[Fails(), observer])
    engine.submit((1,), Work((1,), 2).params())
    with pytest.raises(PolicyError, match="observers=fails step_finished: RuntimeError: disk full"):
        engine.step()
    assert len(observer.seen["step_finished"]) == 1


def test_the_contract_page_names_every_hook_with_its_signature() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    for spec in hookspecs.SPECS:
        for name, function in vars(spec).items():
            if not name.startswith("_"):
                arguments = ", ".join(p for p in inspect.signature(function).parameters if p != "self")
                assert f"{name}({arguments})" in page, f"docs/hooks.md lacks {name}({arguments}): run `make docs`"
