"""The task that Hydra runs: one config in, one record out. In a module of its own, so that launchers can send it by reference."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from core.config import CONF, CONFIG_NAME, VERSION_BASE, check_root, instantiate, option_name, register, with_choices
from core.discovery import discover
from core.types import ConfigError, PolicyError, QuireError

LOG = logging.getLogger(__name__)
NO_SWEEP = "http cannot be swept; use frontend=replay"

register()  # a launcher's worker imports this module and nothing else of ours


class Ended(SystemExit):
    """Ends a run with an error that ``core.serve`` says in one line. No Exception: Hydra would add lines of its own."""

    def __init__(self, error: Exception):
        super().__init__(1)
        self.error = error


def task(config: DictConfig) -> dict[str, Any] | None:
    """Serve one config. A failing job of a sweep answers with a record, so that the others run and the summary is written."""
    job = HydraConfig.get()
    config = with_choices(config, job.runtime.choices)
    folder = Path(job.runtime.output_dir)
    if job.mode == RunMode.MULTIRUN:
        return _run_job(config, folder, job.job.num)
    try:
        record = serve(config)
        if record is not None:
            _write(record, folder)
    except Exception as error:
        raise Ended(error) from error
    _stop_if_aborted(record)
    if record is not None and record.get("status") == "failed":
        raise Ended(PolicyError(str(record.get("error", "the run failed"))))
    return record


def _run_job(config: DictConfig, folder: Path, number: int) -> dict[str, Any]:
    if option_name(config, "frontend") == "frontend=http":
        raise Ended(ConfigError(NO_SWEEP))
    try:
        record = serve(config) or {"status": "ok"}
    except Exception as error:
        LOG.error("job %s failed: %s", number, error, exc_info=None if isinstance(error, QuireError) else error)
        record = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    record = {"job": number, **record}
    _write(record, folder)
    _stop_if_aborted(record)
    return record


def _stop_if_aborted(record: dict[str, Any] | None) -> None:
    """Ctrl-C ended the run early; what was measured is written, and now the command, or the sweep, ends too."""
    if record is not None and record.get("status") == "aborted":
        raise KeyboardInterrupt


def serve(config: DictConfig) -> dict[str, Any] | None:
    """Start the engine of a config, run its frontend on it, and give the frontend's record (a server has none)."""
    from core.start import start  # after the config is known to be good: it may import torch

    discover().require_no_clash()
    check_root(config)
    frontend = instantiate(config.frontend, option_name(config, "frontend"))
    if hasattr(frontend, "check"):
        frontend.check()  # the port, before anything expensive
    started = start(config, say=_say, max_queue=getattr(frontend, "max_queue", None))
    try:
        return frontend.run(started)
    finally:
        started.engine.close()


def _write(record: dict[str, Any], folder: Path) -> None:
    from core.results import write_result

    LOG.info("result: %s", write_result(record, folder))


def _say(line: str) -> None:
    print(line, flush=True)


run = hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name=CONFIG_NAME)(task)
"""Reads ``sys.argv``. Apart from ``task``, which launchers pickle by its name."""
