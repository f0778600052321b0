"""What a sweep leaves behind: one ``summary.json`` and ``summary.csv`` over all jobs, and exit code 3 when one failed.

Jobs pass their records by file (``result.json`` in the job's folder), since a launcher may run them in other processes.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from core.types import ConfigError

LOG = logging.getLogger(__name__)


class SweepSummary(Callback):
    """Hydra's callback for a sweep; named in conf/config.yaml."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse before the first job what no job could do."""
        from core.app import NO_SWEEP, Ended
        from core.config import group_values

        swept = group_values(list(config.hydra.overrides.task), "frontend")
        if "http" in (swept or [config.hydra.runtime.choices.frontend]):
            raise Ended(ConfigError(NO_SWEEP))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Merge the jobs' records, show them beside one another, name the failed ones: exit code 3 if there are any."""
        from core import report

        folder = Path(config.hydra.sweep.dir)
        rows = collect(folder)
        write_summary(folder, rows)
        failed = [row for row in rows if row["record"].get("status") != "ok"]
        jobs = [report.to_job(row["record"], row["job"], row["overrides"]) for row in rows]
        if len(jobs) > 1 and report.default_figures(jobs):
            report.show(jobs)
        print(f"{len(rows)} jobs, {len(failed)} failed; summary: {folder / 'summary.csv'}", flush=True)
        differs = report.swept(jobs)
        for row, job in zip(rows, jobs):
            if row in failed:
                reason = row["record"].get("error", row["record"].get("status"))
                asked = " ".join(f"{name}={job.choices[name]}" for name in differs if name in job.choices)
                print(f"job {row['job']} ({asked or ' '.join(row['overrides'])}) failed: {reason}", file=sys.stderr)
        if failed:
            raise SystemExit(3)


def collect(folder: Path) -> list[dict[str, Any]]:
    """Number, overrides and record of each job of a sweep, in the order of their numbers."""
    rows = []
    for job in sorted((path for path in folder.iterdir() if path.is_dir()), key=_number):
        overrides_file = job / ".hydra" / "overrides.yaml"
        if not overrides_file.exists():
            continue
        record = {"status": "failed", "error": "the job left no result"}
        if (job / "result.json").exists():
            record = json.loads((job / "result.json").read_text())
        overrides = yaml.safe_load(overrides_file.read_text()) or []
        rows.append({"job": job.name, "overrides": overrides, "record": record})
    return rows


def _number(path: Path) -> tuple[int, str]:
    return (int(path.name), "") if path.name.isdecimal() else (sys.maxsize, path.name)


def write_summary(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """``summary.json`` has whole records; ``summary.csv`` a row a job: its number, the override columns, then dotted keys."""
    from core.results import flatten

    text = json.dumps([{"job": row["job"], "overrides": row["overrides"], **row["record"]} for row in rows], indent=2)
    (folder / "summary.json").write_text(text + "\n")
    flat = []
    for row in rows:
        words = [str(override).lstrip("+~").partition("=") for override in row["overrides"]]
        figures = {key: value for key, value in flatten(row["record"]).items() if key != "job"}
        flat.append(({"job": row["job"], **{key: value for key, _, value in words}}, figures))
    columns = list(dict.fromkeys(key for given, _ in flat for key in given))
    columns += [key for key in dict.fromkeys(key for _, figures in flat for key in figures) if key not in columns]
    with (folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({**figures, **given} for given, figures in flat)
