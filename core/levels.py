"""Service levels: how soon a first token and how fast the further ones should come, by class of request.

The root group ``slo`` holds one level for everybody and more by name; a request names its class (``service_class``). Policies read
the targets on each sequence (``deadline_s``, ``tpot_s``), core/metrics.py judges by the same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from core.types import ConfigError, RequestError

FIELDS = ("ttft_s", "tpot_s")


def _seconds(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if value is not None and not ok:
        raise ConfigError(f"{attribute.name}={value!r}: allowed is a number of seconds above 0, or null")


@attrs.frozen
class ServiceLevel:
    """Most seconds to the first token, and most seconds a further token may take on average; None: no target."""

    ttft_s: float | None = attrs.field(default=None, validator=_seconds)
    tpot_s: float | None = attrs.field(default=None, validator=_seconds)


@attrs.frozen
class ServiceLevels:
    """One level for requests without a class, and one a class. A class's null is no target, not the general one."""

    general: ServiceLevel = ServiceLevel()
    classes: Mapping[str, ServiceLevel] = attrs.field(factory=dict)

    def of(self, service_class: str) -> ServiceLevel:
        """The level of a class; ``RequestError`` for one that is not there. The empty name is the general level."""
        if not service_class:
            return self.general
        level = self.classes.get(service_class)
        if level is None:
            known = ", ".join(self.classes) or "none is configured (slo.classes)"
            raise RequestError(f"service_class {service_class!r} is unknown; allowed: {known}", "service_class")
        return level


def read_levels(values: Mapping[str, Any]) -> ServiceLevels:
    """From the config's ``slo: {ttft_s, tpot_s, classes: {name: {ttft_s, tpot_s}}}``. ConfigError names the field."""
    classes = values.get("classes") or {}
    if not isinstance(classes, Mapping):
        raise ConfigError(f"slo.classes={classes!r}: it must map names to ttft_s and tpot_s")
    general = _level({key: value for key, value in values.items() if key != "classes"}, "slo")
    return ServiceLevels(general, {str(name): _level(each, f"slo.classes.{name}") for name, each in classes.items()})


def _level(values: Any, where: str) -> ServiceLevel:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}={values!r}: it must be a mapping with {' and '.join(FIELDS)}")
    unknown = sorted(set(map(str, values)) - set(FIELDS))
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: no such field; allowed: {', '.join(FIELDS)}")
    try:
        return ServiceLevel(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error
