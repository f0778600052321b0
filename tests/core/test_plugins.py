"""Finding plugins (core/discovery.py) and binding those of one engine (core/plugins.py)."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import time
from types import SimpleNamespace

import attrs
import pytest

from core import hookspecs
from core.blocks import BlockPool
from core.discovery import KINDS, discover
from core.help import options_page
from core.hookspecs import hookimpl
from core.plugins import Chosen, EngineHooks
from core.types import ConfigError, PolicyError, Refusal
from tests.dists import HEADER, add_dist, offers

BROKEN = HEADER + "raise ImportError('no such thing')\n"
HALF = (
    HEADER
    + "@hookimpl\ndef provide_policies():\n    yield Policy('allocator', 'half', 'half.X', 's')\n    raise OSError('gone')\n"
)
MISSPELT = HEADER + "@hookimpl\ndef provide_polices():\n    return []\n"
MISPLACED = HEADER + "@hookimpl\ndef plan_step(view):\n    return None\n"
UNVERSIONED = offers("allocator", "old", "unversioned.X").replace("quire_api_version = 1", "")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path for made-up distributions; what was found and imported is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    modules = set(sys.modules)
    yield folder
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]
    monkeypatch.undo()
    discover(refresh=True)


def found():
    importlib.invalidate_caches()
    return discover(refresh=True)


# ------------------------------------------------------------------------------------------------ discovery


def test_built_ins_are_offered_once_and_cached():
    first = discover()
    assert discover() is first
    assert first.find("allocator", "paged").dist == "quire"
    assert {option.kind for option in first.options} <= set(KINDS)
    assert all(option.summary and "\n" not in option.summary for option in first.options)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (BROKEN, "ImportError: no such thing"),
        (HALF, "OSError: gone"),
        (MISSPELT, "unknown hook provide_polices (did you mean provide_policies?)"),
        (MISPLACED, "plan_step belongs in a policy class"),
        (UNVERSIONED, "does not declare quire_api_version"),
        (HEADER.replace("= 1", "= 99"), "written for quire_api_version 99, this is 1"),
        (offers("alocator", "x", "bad.X"), "no such kind (did you mean allocator?)"),
        (offers("allocator", "x", "os.system"), "target 'os.system' is not in bad"),
        (HEADER + "@hookimpl\ndef provide_config_path():\n    return 'pkg://bad.conf'\n", "bad.conf"),
        (HEADER + "import sys\nsys.exit('bye')\n", "SystemExit: bye"),
        ("syntax error\n", "SyntaxError"),
    ],
)
def test_a_broken_distribution_is_listed_and_leaves_nothing(site, source, reason):
    add_dist(site, "bad", source, version="2.5")
    add_dist(site, "good", offers("allocator", "good", "good.Good"))
    now = found()
    assert [(broken.dist, broken.version) for broken in now.broken] == [("bad", "2.5")]
    assert reason in now.broken[0].error
    assert now.find("allocator", "good") and not [option for option in now.options if option.dist == "bad"]
    assert not [path for path in now.paths if path[0] == "bad"]
    assert f"! broken: bad 2.5 (entry point bad): {now.broken[0].error}" in options_page(now)
    now.require_no_clash()


def test_two_distributions_with_one_name_stop_the_start_naming_both(site):
    add_dist(site, "one", offers("allocator", "mine", "one.X"))
    add_dist(site, "two", offers("allocator", "mine", "two.X"), version="2.0")
    with pytest.raises(ConfigError, match="allocator=mine is given by both one 1.0 and two 2.0"):
        found().require_no_clash()
    assert "! clash: allocator=mine" in options_page(discover())


def test_an_option_of_ours_cannot_be_taken_over(site):
    add_dist(site, "evil", offers("allocator", "paged", "evil.X"))
    with pytest.raises(ConfigError, match="allocator=paged is given by both quire .* and evil 1.0"):
        found().require_no_clash()


def test_duplicates_load_once(site, tmp_path, monkeypatch):
    """The same distribution in two folders, the same entry point listed twice, the same module under two names."""
    source = offers("allocator", "twin", "twin.X")
    add_dist(site, "twin", source, entry="a = twin\nb = twin")
    add_dist(tmp_path / "again", "twin", source, version="0.9")
    monkeypatch.syspath_prepend(str(tmp_path / "again"))
    now = found()
    now.require_no_clash()
    assert len([option for option in now.options if option.name == "twin"]) == 1
    assert not now.broken


@pytest.mark.parametrize("value", ["*", "alpha", "other, alpha-dist"])
def test_plugins_can_be_switched_off(site, monkeypatch, value):
    add_dist(site, "alpha-dist", offers("allocator", "alpha", "alpha.X"), module="alpha")
    monkeypatch.setenv("QUIRE_PLUGINS_OFF", value)
    now = found()
    assert not now.find("allocator", "alpha") and now.find("allocator", "paged")
    assert now.off == ("alpha-dist 1.0 (entry point alpha)",)
    assert "switched off: alpha-dist 1.0" in options_page(now)


def test_order_does_not_depend_on_the_environment(site):
    for name in ("zeta", "alpha", "mid"):
        add_dist(site, name, offers("allocator", name, f"{name}.X"))
    ours = [option.name for option in found().options if option.dist in ("zeta", "alpha", "mid")]
    assert ours == ["alpha", "mid", "zeta"]


# ------------------------------------------------------------------------------------------------ one engine's hooks


@attrs.define(eq=False)
class Allocator:
    fail: bool = False

    @hookimpl
    def reserve(self, plan):
        if self.fail:
            raise ValueError("no\nblocks")
        return ("leases", plan)

    @hookimpl
    def release(self, releases):
        return True


class Scheduler:
    @hookimpl
    def plan_step(self, view):
        return ("plan", view)


class Preemption:
    @hookimpl
    def choose_victims(self, view, plan, shortfall):
        return None


class Observer:
    def __init__(self, name="observer", seen=None, fail=False):
        self.name, self.seen, self.fail = name, seen if seen is not None else [], fail

    @hookimpl
    def step_finished(self, report):
        self.seen.append((self.name, report))
        if self.fail:
            raise RuntimeError("full")

    @hookimpl
    def teardown(self):
        self.seen.append((self.name, "teardown"))
        if self.fail:
            raise RuntimeError("again")


def one(option, plugin, dist="mine", version="3.1"):
    kind, _, name = option.partition("=")
    return Chosen(kind, name, plugin, dist, version, f"mine.{type(plugin).__name__}")


def chosen(*more, allocator=None):
    return [
        one("allocator=a", allocator or Allocator()),
        one("scheduler=s", Scheduler()),
        one("preemption=p", Preemption()),
        *more,
    ]


def test_a_deciding_hook_gives_the_plugins_value():
    hooks = EngineHooks(chosen())
    assert hooks.plan_step(view=7) == ("plan", 7)
    assert hooks.reserve(plan=1, sequences={}) == ("leases", 1)
    assert hooks.choose_victims(view=1, plan=2, shortfall=3) is None
    assert hooks.has("reserve") and not hooks.has("fork") and hooks.fork(groups=()) is None


def test_an_exception_names_distribution_version_option_and_hook():
    hooks = EngineHooks(chosen(allocator=Allocator(fail=True)))
    with pytest.raises(
        PolicyError, match=r"^mine 3.1: allocator=a reserve: ValueError: no blocks \(test_plugins.py line \d+\)$"
    ) as caught:
        hooks.reserve(plan=1, sequences={})
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(hooks.policy_error("reserve", "gave nonsense")) == "mine 3.1: allocator=a reserve: gave nonsense"


def test_an_exception_names_the_plugins_own_line_also_where_core_raised():
    class Calls:
        @hookimpl
        def plan_step(self, view):
            return BlockPool(num_blocks=2, block_size=1).take(3)  # the line that is wanted

    line = inspect.getsourcelines(Calls.plan_step)[1] + 2
    hooks = EngineHooks([each for each in chosen() if each.kind != "scheduler"] + [one("scheduler=x", Calls())])
    with pytest.raises(PolicyError, match=rf"\(test_plugins.py line {line}\)$"):
        hooks.plan_step(view=1)


def test_a_hook_with_other_arguments_says_what_it_takes():
    class Wrong:
        @hookimpl
        def plan_step(self, vieww): ...

    with pytest.raises(ConfigError, match="vieww.*; plan_step takes self, view$"):
        EngineHooks([one("scheduler=x", Wrong())])


@pytest.mark.parametrize("missing", ["allocator", "scheduler", "preemption"])
def test_a_missing_decision_fails_before_anything_runs(missing):
    hook = {"allocator": "reserve", "scheduler": "plan_step", "preemption": "choose_victims"}[missing]
    with pytest.raises(ConfigError, match=f"nobody decides {hook}: of the chosen plugins .*mine 3.1: "):
        EngineHooks([each for each in chosen() if each.kind != missing])


def test_two_providers_are_both_named():
    with pytest.raises(
        ConfigError, match="plan_step is decided by both mine 3.1: scheduler=s and other 1: preemption=q"
    ):
        EngineHooks(chosen(one("preemption=q", Scheduler(), "other", "1")))


def test_the_allocators_hooks_come_from_one_plugin():
    class Admits:
        @hookimpl
        def admit(self, sequences):
            return None

    with pytest.raises(ConfigError, match="must come from one plugin.*scheduler=x admit.*allocator=a reserve, release"):
        EngineHooks(chosen(one("scheduler=x", Admits())))


def test_misspelt_and_misused_hooks_are_named():
    class Misspelt(Allocator):
        @hookimpl
        def relase(self, releases):
            return True

    class WrongArgument(Allocator):
        @hookimpl
        def admit(self, sequence):
            return None

    class Async(Allocator):
        @hookimpl
        async def commit(self, sequences):
            return None

    for plugin, reason in (
        (Misspelt(), r"mine 3.1: allocator=a: TypeError: unknown hook relase \(did you mean release\?\)"),
        (WrongArgument(), "mine 3.1: allocator=a: .*sequence"),
        (Async(), "hook commit is async"),
    ):
        with pytest.raises(ConfigError, match=reason):
            EngineHooks(chosen(allocator=plugin))


class Wrapper:
    def __init__(self, fail=False):
        self.fail, self.seen = fail, []

    @hookimpl(wrapper=True)
    def plan_step(self, view):
        self.seen.append("before")
        plan = yield
        self.seen.append(plan)
        if self.fail:
            raise KeyError("wrapper")
        return plan


def test_listed_observers_may_wrap_and_the_manifest_says_so():
    wrapper = Wrapper()
    hooks = EngineHooks(chosen(one("observers=w", wrapper)))
    assert hooks.plan_step(view=1) == ("plan", 1)
    assert wrapper.seen == ["before", ("plan", 1)]
    assert hooks.wrappers() == {"plan_step": ["mine 3.1: observers=w"]}
    assert "observers=w" in str(hooks.policy_error("plan_step", "bad"))


def test_the_wrapper_at_fault_is_named_and_not_the_policy_it_wraps():
    hooks = EngineHooks(chosen(one("observers=w", Wrapper(fail=True))))
    with pytest.raises(PolicyError, match="mine 3.1: observers=w plan_step: KeyError"):
        hooks.plan_step(view=1)
    hooks = EngineHooks(chosen(one("observers=w", SimpleNamespace())))
    assert not hooks.wrappers()


def test_only_observers_wrap_and_they_never_decide():
    with pytest.raises(ConfigError, match="only a listed observer may wrap"):
        EngineHooks(chosen(one("kernel=w", Wrapper())))
    with pytest.raises(ConfigError, match="an observer may wrap a deciding hook .*, not decide"):
        EngineHooks(chosen(one("observers=s", Scheduler())))


def test_observers_are_told_in_order_and_isolated(caplog):
    seen = []
    first, second = Observer("first", seen, fail=True), Observer("second", seen)
    hooks = EngineHooks(chosen(one("observers=first", first), one("observers=second", second)))
    with pytest.raises(PolicyError, match="mine 3.1: observers=first step_finished: RuntimeError: full"):
        hooks.observe("step_finished", report=1)
    assert seen == [("first", 1), ("second", 1)]
    assert hooks.has_observers("step_finished") and not hooks.has_observers("requests_arrived")
    assert "observers=first" in caplog.text


def test_a_failing_observer_can_be_switched_off():
    seen = []
    observers = [one("observers=bad", Observer("bad", seen, fail=True)), one("observers=good", Observer("good", seen))]
    hooks = EngineHooks(chosen(*observers), observer_errors="disable")
    for report in (1, 2):
        hooks.observe("step_finished", report=report)
    assert seen == [("bad", 1), ("good", 1), ("good", 2)]
    (disabled,) = hooks.disabled
    assert disabled.startswith("mine 3.1: observers=bad step_finished: RuntimeError: full (test_plugins.py line ")
    assert hooks.plan_step(view=1) == ("plan", 1)


def test_teardown_always_runs_for_all_and_once(caplog):
    seen = []
    hooks = EngineHooks(
        chosen(one("observers=x", Observer("x", seen, fail=True)), one("observers=y", Observer("y", seen)))
    )
    with caplog.at_level(logging.ERROR):
        hooks.teardown()
        hooks.teardown()
    assert seen == [("x", "teardown"), ("y", "teardown")]
    assert "teardown failed: mine 3.1: observers=x" in caplog.text


class Kernel:
    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def select_kernel(self, case):
        return self.answer


def test_kernels_are_asked_in_order_and_all_reasons_are_given():
    fast, slow = one("kernel=fast", Kernel(Refusal("no GPU"))), one("kernel=torch", Kernel("torch kernel"))
    assert EngineHooks(chosen(fast, slow)).select_kernel("case") == "torch kernel"
    with pytest.raises(ConfigError, match="no kernel for case: mine 3.1: kernel=fast: no GPU"):
        EngineHooks(chosen(fast)).select_kernel("case")
    with pytest.raises(PolicyError, match="kernel=none select_kernel: it must give a kernel or a Refusal"):
        EngineHooks(chosen(one("kernel=none", Kernel(None)))).select_kernel("case")


class Linears:
    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def prepare_model(self, model):
        return self.answer


def test_the_first_linears_that_change_the_model_are_the_only_ones():
    hooks = EngineHooks(chosen(*(one(f"linears={n}", Linears(a)) for n, a in (("a", None), ("b", ("m2", "b did it"))))))
    assert hooks.prepare_model("m1") == ("m2", "b did it")
    assert EngineHooks(chosen()).prepare_model("m1") == ("m1", None)


def test_setup_errors_are_named_and_bad_input_stays_bad_input():
    class Refuses(Scheduler):
        def __init__(self, error):
            self.error = error

        @hookimpl
        def setup(self, engine_info):
            raise self.error

    for error, kind in ((ConfigError("too small"), ConfigError), (ValueError("bug"), PolicyError)):
        plugins = [each for each in chosen() if each.kind != "scheduler"] + [one("scheduler=r", Refuses(error))]
        with pytest.raises(kind, match="mine 3.1: scheduler=r setup: "):
            EngineHooks(plugins).setup(engine_info=None)


def test_engines_do_not_see_each_other():
    hooks = EngineHooks(chosen(one("observers=w", Wrapper())))
    assert hooks.wrappers() and not EngineHooks(chosen()).wrappers()


def test_the_direct_path_gives_what_pluggy_gives():
    hooks = EngineHooks(chosen())
    for hook, arguments in (("plan_step", {"view": 3}), ("reserve", {"plan": 1, "sequences": 2})):
        assert getattr(hooks, hook)(**arguments) == getattr(hooks._manager.hook, hook)(**arguments)


def test_a_deciding_call_costs_little():
    hooks = EngineHooks(chosen())
    best = min(_seconds(hooks) for _ in range(20))
    assert best < 4e-6, f"{best * 1e6:.1f} µs a call"


def _seconds(hooks, calls=500):
    started = time.perf_counter()
    for _ in range(calls):
        hooks.plan_step(view=1)
    return (time.perf_counter() - started) / calls


def test_every_hook_core_asks_for_is_specified():
    named = {*hookspecs.DECIDERS_REQUIRED, *hookspecs.DECIDERS_OPTIONAL, *hookspecs.OBSERVER_HOOKS}
    specified = {name for spec in hookspecs.SPECS for name in vars(spec) if not name.startswith("_")}
    assert named <= specified
