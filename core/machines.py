"""Machines that were measured: where a calibration is kept, and ``machine=local`` which reads it. No torch.

``python -m core.calibrate`` writes one file a machine and model, ``<cache>/machines/<machine>/<model>-<dtype>.json``: rates
and fitted overheads (the fields of ``core.arithmetic.Machine``), the set-up they belong to, and how well they fit.
"""

from __future__ import annotations

import json
import logging
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

LOG = logging.getLogger(__name__)
FORMAT = 3
SETUP = ("kernels", "linears", "threads")
"""What must be equal for a calibration to speak for a run."""
TIMES = re.compile(r" \([^()]* ms\)")


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
        return differences(self.setup, setup)


def differences(calibrated: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    """In which of ``SETUP`` two set-ups (``TorchExecutor.describe()``) differ, in words."""
    pairs = [(name, plain(runs.get(name)), plain(calibrated.get(name))) for name in SETUP]
    return [f"{name} is {one!r}, calibrated with {other!r}" for name, one, other in pairs if one != other]


def plain(value: Any) -> Any:
    """A set-up's value without the times in brackets that a choice was made by: no two starts measure the same."""
    return TIMES.sub("", value) if isinstance(value, str) else value


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


def calibrated(model: str, dtype: str, setup: Mapping[str, Any]) -> tuple[float, float] | None:
    """(link bytes/s, prefill FLOP/s) of this machine for the cost model; None where none were measured with this set-up.

    The link's rate is that of blocks as they were moved, what each costs by itself included.
    """
    path = calibration_path(model, dtype)
    if not path.exists():
        return None
    try:
        found = read_calibration(path)
    except ConfigError as error:  # no reason not to start: without it the cost model measures by itself
        LOG.warning("%s", error)
        return None
    if found.differences(setup):
        return None
    machine, block_bytes = found.machine, found.setup["block_bytes"]
    seconds = block_bytes / machine.link_bytes_per_s + machine.move_overhead_s
    return block_bytes / seconds, machine.prefill_rate


class Company:
    """What other processes use of this machine's processors, from ``/proc/stat``: whether a measurement was disturbed."""

    def __init__(self) -> None:
        self._began = self._ticks()

    def share(self) -> float | None:
        """Of all processors' time since this was made, what neither stood idle nor was this process's: 0 to 1. None: not known."""
        began, ended = self._began, self._ticks()
        if began is None or ended is None:
            return None
        passed, busy, own = (after - before for after, before in zip(ended, began, strict=True))
        return max(0.0, busy - own) / passed if passed > 0 else 0.0

    @staticmethod
    def _ticks() -> tuple[float, float, float] | None:
        """Seconds since the start of the machine, over all processors: all, those not idle, those of this process."""
        try:
            fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
        except OSError:
            return None
        ticks = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields]
        times = os.times()
        return sum(ticks), sum(ticks) - ticks[3] - ticks[4], times.user + times.system


@attrs.frozen(eq=False, kw_only=True)
class Local:
    """``machine=local``: this machine as ``python -m core.calibrate`` measured it, for one model and type."""

    model: str = "SmolLM2-135M-Instruct"  # whose calibration: rates of small matmuls belong to its shapes
    dtype: str = "float32"
    file: str | None = None  # a calibration file, from another machine too; None: this machine's, in the cache folder

    def read(self) -> Measured:
        return read_calibration(Path(self.file).expanduser() if self.file else calibration_path(self.model, self.dtype))
