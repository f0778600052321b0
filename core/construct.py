"""Builds the objects that a config describes, and says in one line why one cannot be built: the only caller of Hydra's instantiate.

Only classes of ``core``, ``plugins``, installed plugins and the modules named in ``trust`` are built, whatever a config says.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import hydra.utils
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from core.discovery import describe, did_you_mean, discover
from core.types import ConfigError, QuireError


def instantiate(node: DictConfig, where: str) -> Any:
    """Build the option that a node describes. ``where`` is its name in errors (``allocator=paged``)."""
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ConfigError(f"{where}: its YAML has no _target_")
    try:
        values: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error, where)) from error
    root: Any = node._get_root()
    packages = {*discover().packages, *(root.get("trust") or [])}
    cls = _check_targets(values, where, packages)
    options: dict[str, Any] = {"_convert_": "all"}
    if "_execution_whitelist_" in inspect.signature(hydra.utils.instantiate).parameters:  # Hydra 1.4
        options["_execution_whitelist_"] = tuple(f"{package}.*" for package in sorted(packages))
    try:
        return hydra.utils.instantiate(node, **options)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ is not None else error
        if isinstance(cause, QuireError):
            raise ConfigError(f"{where}: {cause}") from error
        where, cls, values = _find_failed(str(error), where, cls, values)
        raise ConfigError(describe_bad_value(cls, values, where, cause)) from error


def _find_failed(message: str, where: str, cls: type, values: dict[str, Any]) -> tuple[str, type, dict[str, Any]]:
    """The part of a nested option that Hydra's message names: ``model`` in an executor that takes one."""
    found = re.search(r"call to target '([^']+)'", message)
    for name, value in values.items():
        if found and isinstance(value, dict) and value.get("_target_") == found[1]:
            module, _, class_name = found[1].rpartition(".")
            return name, getattr(importlib.import_module(module), class_name), value
    return where, cls, values


def _check_targets(values: Any, where: str, packages: set[str]) -> Any:
    """Check every ``_target_`` in a tree before anything is built; gives the outermost class."""
    if isinstance(values, list):
        for value in values:
            _check_targets(value, where, packages)
    if not isinstance(values, dict):
        return None
    for value in values.values():
        _check_targets(value, where, packages)
    if "_target_" not in values:
        return None
    target: object = values["_target_"]
    cls = find_class(target, where, packages)
    check_fields(cls, values, where)
    return cls


def find_class(target: object, where: str, packages: set[str]) -> type:
    """The class at a dotted path, if it belongs to one of these top-level packages."""
    allowed = f"classes of {', '.join(sorted(packages))}; a module of your own needs trust=[its_name]"
    if not isinstance(target, str) or target.partition(".")[0] not in packages:
        raise ConfigError(f"{where}: _target_={target!r} may not be built; allowed: {allowed}")
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        raise ConfigError(f"{where}: cannot import {target}: {describe(error)}") from error
    if not isinstance(cls, type) or cls.__module__.partition(".")[0] not in packages:
        raise ConfigError(f"{where}: _target_={target!r} is no class of its own in there; allowed: {allowed}")
    return cls


def check_fields(cls: type, values: Mapping[str, Any], where: str) -> None:
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    given = {name for name in values if not (name.startswith("_") and name.endswith("_"))}
    for name in sorted(given - set(parameters)):
        listed = f"fields: {', '.join(parameters)}" if parameters else "it has no fields"
        raise ConfigError(f"{where}: no field {name}{did_you_mean(name, parameters)}; {listed}")
    for name, parameter in parameters.items():
        if (
            parameter.default is parameter.empty
            and name not in given
            and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            raise ConfigError(f"{where}: field {name} is missing")


def describe_bad_value(cls: type, values: Mapping[str, Any], where: str, error: BaseException) -> str:
    """Name the field whose attrs validator raised this error, its value and the rule; else just the error."""
    reason = " ".join(str(error.args[0] if error.args else type(error).__name__).split())
    reason = re.sub(r"<class '([\w.]+)'>", r"\1", reason)
    for field in attrs.fields(cls) if attrs.has(cls) else ():
        value = values.get(field.alias)
        for validator in getattr(field.validator, "_validators", (field.validator,)) if field.alias in values else ():
            if validator is not None and _raises(validator, field, value) == str(error):
                if f"'{field.name}'" not in reason and (
                    rule := re.search(r"Validator for ([^>]*[<>=]* ?[\d.-]+)>", repr(validator))
                ):
                    reason = f"allowed is a number, {rule[1]}"
                return f"{where.partition('=')[0]}.{field.alias}={value!r}: {reason}"
    return f"{where}: {type(error).__name__}: {reason}"


def _raises(validator: Callable[..., Any], field: attrs.Attribute, value: Any) -> str | None:
    try:
        validator(None, field, value)
    except Exception as error:
        return str(error)
    return None


def explain_value(error: OmegaConfBaseException, where: str) -> str:
    """An interpolation or a missing value, in one line."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing: give {error.full_key}=VALUE"
    return f"{where}: {' '.join(str(error).split())}"
