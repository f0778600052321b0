"""Finds the installed plugins, once a process.

``discover()`` asks the built-ins and every distribution with an entry point in group ``quire`` what they offer. Each is asked
on its own: a broken one is listed with its reason, leaves nothing behind, and the rest load. Nothing found here is active: what
an engine is made of is chosen in its config (``core/plugins.py``).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import attrs
import pluggy

import core
from core import hookspecs
from core.types import API_VERSION, ConfigError, Policy

OFF_VARIABLE = "QUIRE_PLUGINS_OFF"
"""Environment variable: entry points or distributions that are not loaded, ``a,b``, or ``*`` for all but the built-ins."""
BUILTINS = "plugins"
KINDS = (
    "executor",
    "frontend",
    "model",
    "allocator",
    "scheduler",
    "predictor",
    "admission",
    "preemption",
    "idle",
    "kernel",
    "linears",
    "workload",
    "observers",
    "machine",
    "experiment",
)


@attrs.frozen
class Option:
    """One thing that can be chosen with ``kind=name``, and who offers it."""

    kind: str
    name: str
    target: str
    summary: str
    dist: str
    version: str


@attrs.frozen
class Broken:
    """A distribution whose entry point could not be used, and why."""

    dist: str
    version: str
    entry_point: str
    error: str

    def __str__(self) -> str:
        return f"{self.dist} {self.version} (entry point {self.entry_point}): {self.error}"


@attrs.frozen
class Discovery:
    """What is installed. ``paths`` are Hydra search paths by distribution; ``packages`` says who owns a top-level package."""

    options: tuple[Option, ...]
    broken: tuple[Broken, ...]
    clashes: tuple[str, ...]
    off: tuple[str, ...]
    paths: tuple[tuple[str, str], ...]
    packages: Mapping[str, tuple[str, str]]

    def find(self, kind: str, name: str) -> Option | None:
        return next((option for option in self.options if (option.kind, option.name) == (kind, name)), None)

    def provider(self, target: str) -> tuple[str, str]:
        """Distribution and version that own a dotted path; a module that is only trusted has no version."""
        package = target.partition(".")[0]
        return self.packages.get(package, (f"module {package}", "unpackaged"))

    def require_no_clash(self) -> None:
        if self.clashes:
            raise ConfigError("; ".join(self.clashes) + f" (uninstall one, or set {OFF_VARIABLE})")


_found: Discovery | None = None


def discover(refresh: bool = False) -> Discovery:
    """What is installed in this process: looked up once, again with ``refresh``."""
    global _found
    if _found is None or refresh:
        _found = _discover()
    return _found


def _discover() -> Discovery:
    options, paths, broken, off = list[Option](), list[tuple[str, str]](), list[Broken](), list[str]()
    packages = {BUILTINS: ("quire", core.__version__), "core": ("quire", core.__version__)}
    try:
        policies, _ = _ask(_builtins(), BUILTINS, frozenset(packages))
    except Exception as error:
        raise ConfigError(f"quire {core.__version__}: the built-in plugins do not load: {describe(error)}") from error
    options += [Option(p.kind, p.name, p.target, p.summary, "quire", core.__version__) for p in policies]

    modules: list[object] = []
    for entry, dist, version in _entry_points():
        if _switched_off(entry.name, dist):
            off.append(f"{dist} {version} (entry point {entry.name})")
            continue
        try:
            module = entry.load()
            if any(module is other for other in modules):
                continue  # the same module under two names loads once
            _check_api_version(module)
            own = _packages(entry)
            policies, path = _ask(module, entry.name, own)
        except (Exception, SystemExit) as error:  # whatever a stranger's module does at import
            broken.append(Broken(dist, version, entry.name, describe(error)))
            continue
        modules.append(module)
        options += [Option(p.kind, p.name, p.target, p.summary, dist, version) for p in policies]
        paths += [(dist, each) for each in path]
        packages |= {package: (dist, version) for package in own if package not in packages}
    return Discovery(tuple(options), tuple(broken), _clashes(options), tuple(off), tuple(paths), packages)


def _builtins() -> ModuleType:
    module = importlib.import_module(BUILTINS)
    ours = Path(core.__file__).resolve().parent.parent
    if module.__file__ is None or Path(module.__file__).resolve().parent.parent != ours:
        where = module.__file__ or "a folder without __init__.py"
        raise ImportError(f"the package name {BUILTINS!r} is taken by {where}; start from another folder")
    return module


def _entry_points() -> list[tuple[importlib.metadata.EntryPoint, str, str]]:
    """Entry points with their distribution, sorted, so that what is loaded first does not depend on the environment."""
    found: dict[tuple[str, str, str], tuple[importlib.metadata.EntryPoint, str, str]] = {}
    for entry in importlib.metadata.entry_points(group=hookspecs.PROJECT):
        dist = entry.dist.name if entry.dist is not None else "unknown"
        version = entry.dist.version if entry.dist is not None else "unknown"
        found.setdefault((dist.lower().replace("_", "-"), entry.name, entry.value), (entry, dist, version))
    return [found[key] for key in sorted(found)]


def _switched_off(entry_point: str, dist: str) -> bool:
    names = {name.strip() for name in os.environ.get(OFF_VARIABLE, "").split(",")} - {""}
    return bool(names & {"*", entry_point, dist})


def _packages(entry: importlib.metadata.EntryPoint) -> frozenset[str]:
    """Top-level packages of the entry point's distribution."""
    listed = (entry.dist.read_text("top_level.txt") or "") if entry.dist is not None else ""
    return frozenset([entry.module.partition(".")[0], *listed.split()]) - {"core", "plugins", "conf"}


def _check_api_version(module: object) -> None:
    version = getattr(module, "quire_api_version", None)
    if version is None:
        raise TypeError(f"it does not declare quire_api_version (this is {API_VERSION})")
    if version != API_VERSION:
        raise TypeError(f"it was written for quire_api_version {version}, this is {API_VERSION}")


def _ask(module: object, name: str, packages: frozenset[str]) -> tuple[list[Policy], list[str]]:
    """What one plugin module offers. The manager is the module's own, so that an error leaves no half registration behind."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs.DiscoverySpec)
    manager.register(module, name=name)
    check_hook_names(manager, module)
    policies = [policy for given in manager.hook.provide_policies() for policy in given]
    paths = manager.hook.provide_config_path()
    seen = set()
    for policy in policies:
        _check_policy(policy, packages)
        if (policy.kind, policy.name) in seen:
            raise ValueError(f"it offers {policy.kind}={policy.name} twice")
        seen.add((policy.kind, policy.name))
    for path in paths:
        _check_config_path(path)
    return policies, paths


def _check_policy(policy: object, packages: frozenset[str]) -> None:
    if not isinstance(policy, Policy):
        raise TypeError(f"provide_policies must give core.types.Policy values, it gave {policy!r}")
    if policy.kind not in KINDS:
        raise ValueError(
            f"{policy.kind}={policy.name}: no such kind{did_you_mean(policy.kind, KINDS)}; kinds: {', '.join(KINDS)}"
        )
    package = policy.target.partition(".")[0]
    if package not in packages:
        raise ValueError(
            f"{policy.kind}={policy.name}: target {policy.target!r} is not in {', '.join(sorted(packages))}"
        )


def _check_config_path(path: object) -> None:
    if not isinstance(path, str) or not path.startswith("pkg://"):
        raise ValueError(f"provide_config_path must give 'pkg://package.conf', it gave {path!r}")
    spec = importlib.util.find_spec(path.removeprefix("pkg://"))
    if spec is None or spec.origin is None:
        raise ValueError(f"{path}: no such package (it needs an __init__.py)")


def _clashes(options: Iterable[Option]) -> tuple[str, ...]:
    owners: dict[tuple[str, str], list[str]] = {}
    for option in options:
        owners.setdefault((option.kind, option.name), []).append(f"{option.dist} {option.version}")
    return tuple(
        f"{kind}={name} is given by both {' and '.join(who)}" for (kind, name), who in owners.items() if len(who) > 1
    )


def describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """``" (did you mean x?)"`` or nothing."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_hook_names(manager: pluggy.PluginManager, plugin: object) -> None:
    """``check_pending()`` for one plugin: a hook that no specification knows is a misspelt one."""
    known = [name for spec in hookspecs.SPECS for name in vars(spec) if not name.startswith("_")]
    for caller in manager.get_hookcallers(plugin) or []:
        impls = [impl for impl in caller.get_hookimpls() if impl.plugin is plugin]
        if not caller.has_spec() and any(not impl.optionalhook for impl in impls):
            if caller.name in known:
                raise TypeError(f"hook {caller.name} belongs in a policy class that provide_policies names, not here")
            raise TypeError(f"unknown hook {caller.name}{did_you_mean(caller.name, known)}")
        for impl in impls:
            if inspect.iscoroutinefunction(impl.function):
                raise TypeError(f"hook {caller.name} is async: hooks are called, not awaited")
