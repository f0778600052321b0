"""From overrides to checked configs and objects: the only module that composes.

* ``compose(["allocator=paged", "cache.num_blocks=64"])`` gives the config that the same words on the command line give.
* ``check_root(config)`` gives the checked values of everything that is no option group.
* ``instantiate(node, "allocator=paged")`` builds an option (``core/construct.py``).

Every error is a ``ConfigError`` of one line: the field, its value and what is allowed.

Observers are a group of their own whose options add up: ``observers=[recorder,mine]``, with fields such as
``observers.recorder.path=x``. Their YAML begins with a package line, so that each gets its own node::

    # @package observers.mine
    _target_: mine.Mine
    every: 10
"""

from __future__ import annotations

import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import CompactHydraException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from core import help as help_page
from core.construct import check_fields, describe_bad_value, explain_value, instantiate
from core.discovery import KINDS, did_you_mean, discover
from core.kernel import SCALED
from core.levels import ServiceLevels, read_levels
from core.types import CacheConfig, ConfigError

__all__ = [
    "CONF",
    "CONFIG_NAME",
    "VERSION_BASE",
    "Root",
    "check_root",
    "compose",
    "explain",
    "group_values",
    "instantiate",
    "option_name",
    "register",
    "with_choices",
]
CONF = Path(__file__).resolve().parent.parent / "conf"
CONFIG_NAME = "config"
VERSION_BASE = "1.3"
DTYPES = ("auto", "float32", "bfloat16", "float16")

_lock = threading.RLock()
_registered = False


class QuireSearchPath(SearchPathPlugin):
    """Adds the config packages of installed plugins behind our own. Registered in code: no ``hydra_plugins`` folder is needed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for dist, path in discover().paths:
            search_path.append(provider=dist, path=path)


def register() -> None:
    """Make Hydra know our search path and resolvers; once a process, harmless when repeated."""
    global _registered
    with _lock:
        if not _registered:
            Plugins.instance().register(QuireSearchPath)
            OmegaConf.register_new_resolver("quire_run_dir", run_dir, replace=True)
            OmegaConf.register_new_resolver("quire_version", help_page.version, replace=True)
            OmegaConf.register_new_resolver("quire_options", help_page.options_for_template, replace=True)
            _registered = True


def run_dir(frontend: str, day: str, time: str) -> str:
    """Folder of one run: ``outputs/`` here, or for a server one under the cache folder, so that it leaves nothing behind."""
    if frontend != "http":
        return f"outputs/{day}/{time}"
    from core.fetch import cache_dir

    return str(cache_dir() / "runs" / day / f"{time}-{os.getpid()}")


# ------------------------------------------------------------------------------------------------ compose


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The config for these overrides; ``choices`` in it has the names of the options. From any thread, also inside a job."""
    register()
    discover().require_no_clash()
    try:
        with _composer():
            composed = hydra.compose(CONFIG_NAME, list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, overrides) from error
    choices = OmegaConf.to_container(composed.hydra.runtime.choices)
    OmegaConf.set_readonly(composed.hydra, None)
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    return with_choices(composed, choices)


@contextmanager
def _composer() -> Iterator[None]:
    """Hydra's global state set for our config folder, and put back as it was: a job may be running."""
    with _lock:
        running = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(config_dir=str(CONF), version_base=VERSION_BASE, job_name="quire"):
                yield
        finally:
            GlobalHydra.instance().hydra = running


def with_choices(config: DictConfig, choices: Mapping[Any, Any] | Any) -> DictConfig:
    """The config with ``choices`` (group -> option), from which errors and the manifest take names."""
    names = {
        kind: choices[kind] for kind in KINDS if kind in choices and kind != "observers" and choices[kind] is not None
    }
    OmegaConf.set_struct(config, False)
    config["choices"] = names
    OmegaConf.set_struct(config, True)
    return config


def option_name(config: DictConfig, kind: str) -> str:
    """``allocator=paged``: by what was chosen, else by what the config builds."""
    chosen = config.get("choices", {}).get(kind)
    if chosen is None:
        target = (config.get(kind) or {}).get("_target_", "?")
        known = [option.name for option in discover().options if (option.kind, option.target) == (kind, target)]
        chosen = known[0] if known else str(target).rpartition(".")[2]
    return f"{kind}={chosen}"


# ------------------------------------------------------------------------------------------------ Hydra's errors in one line


def explain(error: Exception, overrides: Sequence[str] = ()) -> ConfigError:
    """One line that says what was wrong with the overrides and what is allowed."""
    text = str(error)
    if isinstance(error, MissingConfigException):
        return ConfigError(_explain_missing(error))
    if found := re.match(r"Could not override '([^']+)'", text):
        return ConfigError(_explain_unknown(found[1], overrides))
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override}: cannot be read as name=value: {text.splitlines()[0]}")
    if isinstance(error, CompactHydraException | OmegaConfBaseException):
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        lines = [line.strip() for part in (text, str(cause or "")) for line in part.splitlines()]
        wanted = [line for line in lines if line and not line.startswith(("See https", "object_type"))]
        return ConfigError("; ".join(wanted) or type(error).__name__)
    return ConfigError(" ".join(text.split()))


def _explain_missing(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group:
        return f"{error.missing_cfg_file or ''}: no such config"
    allowed = _option_names(group)
    broken = "".join(f"; broken: {each}" for each in discover().broken)
    listed = f"allowed: {', '.join(allowed)}" if allowed else f"there is no group {group}"
    close = did_you_mean(name, allowed)
    own = "; a YAML of your own needs --config-dir FOLDER" if allowed and not close else ""
    return f"{group}={name}: no such option{close}; {listed}{own}{broken}"


def _option_names(group: str) -> list[str]:
    with _composer():
        loader = GlobalHydra.instance().config_loader()
        return sorted(name for name in loader.get_group_options(group) if not name.startswith("_"))


def _explain_unknown(key: str, overrides: Sequence[str]) -> str:
    """A key that the config does not have: name the deepest part that exists, and its fields."""
    if key.startswith("hydra."):
        return f"{key}: Hydra has no such setting"
    if key == "observers":
        return "observers takes names, observers=[recorder]; fields follow as observers.recorder.path=decisions.jsonl"
    parent, _, missing = key.partition("@")[0].rpartition(".")
    node = _plain(overrides)
    while parent and not isinstance(OmegaConf.select(node, parent), DictConfig):
        parent, _, missing = parent.rpartition(".")
    fields = [str(name) for name in (OmegaConf.select(node, parent) if parent else node) if name != "_target_"]
    if missing in fields:  # Hydra takes no new names within a group's value
        return f"{key}: names are added to it one by one: +{key}.NAME=VALUE, or +{key}.NAME.FIELD=VALUE"
    if not parent:
        fields += [kind for kind in KINDS if kind not in fields]  # experiment is not there until it is chosen
    listed = f"; allowed: {', '.join(fields)}" if fields else f": {option_name(node, parent)} has no fields"
    if parent == "observers":
        return f"{key}: {missing} is not among the chosen observers; choose it with observers=[{missing}]"
    what = f"{parent} has no field {missing}" if parent else f"there is no group or field {missing}"
    inside = [
        f"{name}.{missing}" for name in fields if isinstance(node.get(name), DictConfig) and missing in node[name]
    ]
    meant = f" (did you mean {' or '.join(inside)}?)" if inside and not parent else did_you_mean(missing, fields)
    return f"{key}: {what}{meant}{listed}"


def _plain(overrides: Sequence[str]) -> DictConfig:
    """The config with the option choices among these overrides, as far as they compose."""
    chosen = []
    for override in overrides:
        key, _, name = override.partition("=")
        if key in KINDS and name in _option_names(key):
            chosen.append(override)
    with _composer():
        config = hydra.compose(CONFIG_NAME, chosen)
    OmegaConf.set_struct(config, False)
    return config


def group_values(overrides: Sequence[str], group: str) -> list[str]:
    """Every option of a group that these overrides may choose, sweeps included."""
    values: list[str] = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group == group:
            swept = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
            values = [str(value) for value in swept]
    return values


# ------------------------------------------------------------------------------------------------ root


def _rule(allowed: str, holds: Callable[[Any], bool]) -> Any:
    def validate(instance: object, attribute: attrs.Attribute, value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"{attribute.name}={value!r}: allowed is {allowed}")

    return attrs.field(validator=validate)


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _whole(low: int, null: bool = False) -> Any:
    allowed = f"a whole number from {low}" + (", or null" if null else "")
    return _rule(allowed, lambda value: (null and value is None) or _is_whole(value, low))


def _one_of(*names: str) -> Any:
    return _rule(" | ".join(names), lambda value: value in names)


def _rate() -> Any:
    return _rule(
        "a number above 0, or null",
        lambda v: v is None or (isinstance(v, int | float) and not isinstance(v, bool) and v > 0),
    )


def _are_module_names(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) and name.isidentifier() for name in value):
        raise ConfigError(f"{attribute.name}={value!r}: allowed is a list of module names, e.g. [mine]")


@attrs.frozen(kw_only=True)
class Rates:
    """The root group ``cost``: what null leaves to be measured at start."""

    link_bytes_per_s: float | None = _rate()
    prefill_flop_per_s: float | None = _rate()
    memory_bytes_per_s: float | None = _rate()


@attrs.frozen(kw_only=True)
class Root:
    """The checked values of the root that belong to no option."""

    cache: CacheConfig
    cost: Rates
    max_model_len: int | None = _whole(1, null=True)
    max_num_seqs: int = _whole(1)
    max_num_batched_tokens: int = _whole(1)
    max_queue: int | str | None = _rule(
        "a whole number from 1, null or auto", lambda value: value in (None, "auto") or _is_whole(value, 1)
    )
    slo: ServiceLevels
    device: str = _one_of("auto", "cpu", "cuda")
    dtype: str = _one_of(*DTYPES)
    num_threads: int | None = _whole(1, null=True)
    seed: int = _whole(0)
    checks: str = _one_of("cheap", "full")
    observer_errors: str = _one_of("raise", "disable")
    trust: list[str] = attrs.field(validator=_are_module_names)


def check_root(config: DictConfig) -> Root:
    """The root's own fields, checked. ConfigError for an unknown, missing or bad one."""
    fields = [field.name for field in attrs.fields(Root)]
    for name in map(str, config):
        if name not in (*fields, *KINDS, "choices", "hydra"):
            raise ConfigError(
                f"{name}: there is no such field{did_you_mean(name, fields)}; allowed: {', '.join(fields)}"
            )
    values: dict[str, Any] = {name: plain(config, name) for name in fields}
    values["cache"] = build_values(CacheConfig, values["cache"], "cache")
    values["cost"] = build_values(Rates, values["cost"], "cost")
    values["slo"] = read_levels(values["slo"])
    kv_dtypes = (*DTYPES[1:], *SCALED)
    if values["cache"].kv_dtype not in (None, *kv_dtypes):
        raise ConfigError(f"cache.kv_dtype={values['cache'].kv_dtype!r}: allowed is null | {' | '.join(kv_dtypes)}")
    return Root(**values)


def plain(config: DictConfig, name: str) -> Any:
    """A root field as plain Python, its interpolations resolved."""
    if name not in config:
        raise ConfigError(f"{name} is missing from the config")
    try:
        value = config[name]
        return (
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value
        )
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error, name)) from error


def build_values(cls: type, values: Any, where: str) -> Any:
    """``cls(**values)`` with its errors in one line."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where}={values!r}: it must be a mapping with {', '.join(inspect.signature(cls).parameters)}"
        )
    check_fields(cls, values, where)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(describe_bad_value(cls, values, where, error)) from error
