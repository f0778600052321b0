"""Runs single cases of the kit in this process, without a pytest of its own: fast enough for dozens of planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _pytest.outcomes import Skipped

from core.conformance.subject import Subject


def subject_for(folder: Path, kind: str, target: str, yaml: str = "", **fields: Any) -> Subject:
    """A subject whose YAML lies in ``folder`` and whose class is a dotted path below ``tests``."""
    name = target.rpartition(".")[2].lower()
    (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / kind / f"{name}.yaml").write_text(f"_target_: {target}\n{yaml}")
    return Subject(kind, name, config_dir=str(folder), trust=("tests",), **{"examples": 60, **fields})


def cases_of(cls: type) -> list[str]:
    return [name for name in dir(cls) if name.startswith("test_")]


def calls(cls: type, name: str) -> list[dict[str, Any]]:
    """The arguments of each call that pytest would make of a case: its parametrize marks multiplied out."""
    found: list[dict[str, Any]] = [{}]
    for mark in getattr(getattr(cls, name), "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args[0], mark.args[1]
            keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
            rows = [value if len(keys) > 1 else (value,) for value in values]
            found = [{**one, **dict(zip(keys, row, strict=True))} for one in found for row in rows]
    return found


def failure(cls: type, subject: Subject, name: str) -> str | None:
    """How a case ends: None when it passes, "skipped: ..." when it does not apply, else the error."""
    skipped = None
    for arguments in calls(cls, name):
        try:
            getattr(cls(), name)(subject, **arguments)
        except Skipped as skip:
            skipped = f"skipped: {skip.msg}"
        except (Exception, pytest.fail.Exception) as error:
            return f"{type(error).__name__}: {error}"
    return skipped
