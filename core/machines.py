"""Machines that were measured: where a calibration is kept, and ``machine=local`` which reads it. No torch.

``python -m core.calibrate`` writes one file a machine and model, ``<cache>/machines/<machine>/<model>-<dtype>.json``: rates
and fitted overheads (the fields of ``core.arithmetic.Machine``), the set-up they belong to, and how well they fit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from core.arithmetic import Machine
from core.fetch import cache_dir
from core.types import ConfigError

FORMAT = 1
SETUP = ("kernels", "linears", "threads")
"""What must be equal for a calibration to speak for a run."""


def machine_name() -> str:
    """The host and its processor: a cache folder may be shared by several machines."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{platform.node()}, {models[0] if models else processor}"


def slug(text: str) -> str:
    """A name as a file's: letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-") or "unnamed"


def calibration_path(model: str, dtype: str, machine: str | None = None) -> Path:
    """Where the calibration of a model on a machine (None: this one) lies, or will lie."""
    return cache_dir() / "machines" / slug(machine or machine_name()) / f"{slug(model)}-{dtype}.json"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(json.dumps(value, indent=2) + "\n")
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


@attrs.frozen(eq=False)
class Measured:
    """A calibration as it was read: the machine, and what it was measured with."""

    machine: Machine
    setup: Mapping[str, Any]  # model, dtype, device, kernels, linears, threads, torch
    fit: Mapping[str, Any]  # how far the fitted steps lie from the measured ones
    path: Path

    def differences(self, setup: Mapping[str, Any]) -> list[str]:
        """What of a run's set-up (``TorchExecutor.describe()``) is not as it was measured, in words."""
        return [
            f"{name} is {setup.get(name)!r}, calibrated with {self.setup.get(name)!r}"
            for name in SETUP
            if setup.get(name) != self.setup.get(name)
        ]


def read_calibration(path: Path) -> Measured:
    """ConfigError when there is none, or none that this version reads, with the command that makes one."""
    again = "run: python -m core.calibrate"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise ConfigError(f"{path}: format {raw['format']}, this version reads {FORMAT}; {again}")
        return Measured(Machine(**raw["machine"]), raw["setup"], raw["fit"], path)
    except FileNotFoundError as error:
        raise ConfigError(f"this machine has not been measured ({path} is missing); {again}") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} cannot be used ({error}); {again}") from error


@attrs.frozen(eq=False, kw_only=True)
class Local:
    """``machine=local``: this machine as ``python -m core.calibrate`` measured it, for one model and type."""

    model: str = "SmolLM2-135M-Instruct"  # whose calibration: rates of small matmuls belong to its shapes
    dtype: str = "float32"
    file: str | None = None  # a calibration file, from another machine too; None: this machine's, in the cache folder

    def read(self) -> Measured:
        return read_calibration(Path(self.file).expanduser() if self.file else calibration_path(self.model, self.dtype))
