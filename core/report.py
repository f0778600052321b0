"""``python -m core.report [FOLDER]``: the jobs of a sweep beside one another, as a table or a picture.

Reads the ``summary.json`` that a sweep leaves; without a folder, of the newest sweep under ``multirun/``. Columns are what the jobs
differ in, then figures of ``result.json`` under their dotted keys. Exit codes: 0 ok, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from core.discovery import did_you_mean
from core.results import flatten, percent, seconds
from core.types import ConfigError

SUMMARY_FILE = "summary.json"
FIGURES = {
    "output_tokens_per_s": "tokens/s",
    "concurrency.mean": "running",
    "preempted": "preempted",
    "ttft_s.p50": "TTFT p50",
    "ttft_s.p90": "TTFT p90",
    "tpot_s.p50": "TPOT p50",
    "tpot_s.p90": "TPOT p90",
    "kv.used_of_pool.mean": "pool used",
}
"""What a table shows unless it is told, and under which heading."""
WHEN_PRESENT = {"not_finished": "not finished", "service.attainment": "in time", "prefix.hit_share": "from cache"}
"""Shown too when any job has something to say there."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided, by degrees of freedom from 1; the last one serves for all above, which is wider than needed."""
WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""


@attrs.frozen
class Job:
    """One job of a sweep: what was asked for, and its figures under dotted keys."""

    number: str
    choices: Mapping[str, str]  # override name -> value, as given
    figures: Mapping[str, Any]
    status: str
    clock: str  # "virtual", "real"; "" of a job that did not start
    spread: Mapping[str, float] = attrs.field(factory=dict)  # of merged jobs: half of each mean's 95 % interval


def read(folder: Path) -> list[Job]:
    """The jobs of a sweep's folder. ConfigError when there is none."""
    path = folder / SUMMARY_FILE
    if not path.is_file():
        raise ConfigError(f"{folder}: no {SUMMARY_FILE} in it; allowed is the folder of a sweep that has ended")
    return [to_job(row, str(row["job"]), row["overrides"]) for row in json.loads(path.read_text())]


def to_job(record: Mapping[str, Any], number: str, overrides: Sequence[str]) -> Job:
    """A job from its record (``result.json``) and its overrides, with three figures more that a comparison wants."""
    words = [str(override).lstrip("+~").partition("=") for override in overrides]
    figures = {key: value for key, value in flatten(record).items() if key not in ("job", "overrides", "status")}
    if "preemptions" in record:
        figures["preempted"] = sum(record["preemptions"].values())
        figures["not_finished"] = sum(num for what, num in record["requests"].items() if what != "finished")
        prefix = record["prefix"]
        figures["prefix.hit_share"] = prefix["hit_tokens"] / prefix["query_tokens"] if prefix["hit_tokens"] else None
    executor = record.get("manifest", {}).get("executor", {})
    return Job(
        number=number,
        choices={key: value for key, _, value in words},
        figures=figures,
        status=record.get("status", "failed"),
        clock=str(executor.get("clock", "")).partition(",")[0],
    )


def newest(root: Path = Path("multirun")) -> Path:
    """The folder of the newest sweep that has ended."""
    found = sorted(root.rglob(SUMMARY_FILE), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"no sweep has ended under {root}/ here; give its folder, or run one with -m")
    return found[-1].parent


def swept(jobs: Sequence[Job]) -> list[str]:
    """The overrides in which the jobs differ, in the order they were given."""
    names = list(dict.fromkeys(name for job in jobs for name in job.choices))
    return [name for name in names if len({job.choices.get(name) for job in jobs}) > 1]


def merge(jobs: Sequence[Job], over: str) -> list[Job]:
    """One job for all that differ in ``over`` alone (a seed): means, with the half of their 95 % intervals (Student's t).

    A figure that one of them lacks is left out; a failed one fails the whole. ConfigError when the jobs do not differ in ``over``.
    """
    if over not in swept(jobs):
        raise ConfigError(
            f"--over {over}: the jobs do not differ in it; allowed: {', '.join(swept(jobs)) or 'nothing'}"
        )
    groups: dict[tuple[tuple[str, str], ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(tuple((name, each) for name, each in job.choices.items() if name != over), []).append(job)
    return [_mean(group, dict(key)) for key, group in groups.items()]


def _mean(group: Sequence[Job], choices: Mapping[str, str]) -> Job:
    figures, spread = {}, {}
    for name in group[0].figures:
        values = [value for job in group if isinstance(value := job.figures.get(name), int | float)]
        if len(values) == len(group):
            figures[name] = statistics.fmean(values)
            if len(values) > 1:
                t_95 = T_95[min(len(values) - 1, len(T_95)) - 1]
                spread[name] = t_95 * statistics.stdev(values) / len(values) ** 0.5
    status = next((job.status for job in group if job.status != "ok"), "ok")
    clock = next((job.clock for job in group if job.clock != "virtual"), "virtual")
    return Job(f"{len(group)} runs", choices, figures, status, clock, spread)


def short_names(names: Sequence[str]) -> list[str]:
    """The last word of each dotted name, or the whole where two end alike."""
    last = [name.rpartition(".")[2] for name in names]
    return [word if last.count(word) == 1 else name for word, name in zip(last, names)]


def check_figures(jobs: Sequence[Job], names: Sequence[str]) -> list[str]:
    """These figures, if the jobs have them. ConfigError with the nearest name otherwise."""
    known = list(dict.fromkeys(name for job in jobs for name in job.figures))
    for name in names:
        if name not in known:
            inside = [each for each in known if each.startswith(name)]
            groups = ", ".join(dict.fromkeys(each.partition(".")[0] for each in known))
            listed = ", ".join(inside) if inside else f"keys of result.json, with dots: {groups}"
            raise ConfigError(f"{name}: no such figure{'' if inside else did_you_mean(name, known)}; allowed: {listed}")
    return list(names)


def default_figures(jobs: Sequence[Job]) -> list[str]:
    """The usual ones, without those that no job of this sweep has, and what else there is something to say of."""
    usual = [name for name in FIGURES if any(job.figures.get(name) is not None for job in jobs)]
    return usual + [name for name in WHEN_PRESENT if any(job.figures.get(name) for job in jobs)]


# ------------------------------------------------------------------------------------------------ the table


def cells(jobs: Sequence[Job], figures: Sequence[str]) -> list[list[str]]:
    """Heading and rows: what differs, then the figures in units that need no manual."""
    differs = swept(jobs)
    rows = [[*(short_names(differs) or ["job"]), *({**FIGURES, **WHEN_PRESENT}.get(name, name) for name in figures)]]
    for job in jobs:
        named = [job.choices.get(name, "-") for name in differs] or [job.number]
        shown = [job.status if job.status != "ok" and not i else shorten(name, job) for i, name in enumerate(figures)]
        rows.append([*named, *shown])
    return rows


def shorten(name: str, job: Job) -> str:
    """A figure for people: times with a unit, fractions of the pool in percent; of merged jobs with ± its interval."""
    if name in job.spread:
        within = attrs.evolve(job, figures=job.spread, spread={})
        return f"{shorten(name, attrs.evolve(job, spread={}))} ± {shorten(name, within)}"
    value = job.figures.get(name)
    if value is None or isinstance(value, str):
        return value or "-"
    if any(part.endswith(("_s", "_seconds")) and not part.endswith("per_s") for part in name.split(".")):
        return seconds(value)
    if name.startswith("kv.") or name.endswith((".attainment", ".hit_share")):
        return percent(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def table(jobs: Sequence[Job], figures: Sequence[str] | None = None) -> Table:
    """The comparison for the screen."""
    heading, *rows = cells(jobs, figures or default_figures(jobs))
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(heading):
        is_choice = i < max(1, len(swept(jobs)))
        shown.add_column(column, justify="left" if is_choice else "right", no_wrap=is_choice)
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(jobs: Sequence[Job], figures: Sequence[str] | None = None) -> str:
    """The comparison for a page."""
    heading, *rows = cells(jobs, figures or default_figures(jobs))
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def note(jobs: Sequence[Job]) -> str:
    """What the times of these jobs are worth."""
    if all(job.clock in ("virtual", "") for job in jobs):
        return "times on a virtual clock: the same on every machine"
    return "times of this machine: what differs little may be noise"


# ------------------------------------------------------------------------------------------------ the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code."""
    options = _parser().parse_args(arguments)
    try:
        folder = options.folder or newest()
        jobs = read(folder)
        if options.over:
            jobs = merge(jobs, options.over)
        figures = check_figures(jobs, options.figures.split(",")) if options.figures else None
        if options.plot:
            print(_draw(jobs, options, folder))
        elif options.markdown:
            print(markdown(jobs, figures))
        else:
            show(jobs, figures)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(jobs: Sequence[Job], figures: Sequence[str] | None = None) -> None:
    """Print the table. On a screen too narrow for the usual figures the last ones are left out, and named."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=WIDTH, highlight=False)
    shown = list(figures or default_figures(jobs))
    left_out: list[str] = []
    while figures is None and len(shown) > 1 and _width(console, table(jobs, shown)) > console.width:
        left_out.insert(0, shown.pop())
    console.print(table(jobs, shown))
    console.print(note(jobs), style="dim")
    if left_out:
        console.print(f"not shown on this screen: {', '.join(left_out)}", style="dim")


def _width(console: Console, shown: Table) -> int:
    return console.measure(shown, options=console.options.update(width=10 * WIDTH)).maximum


def _draw(jobs: Sequence[Job], options: argparse.Namespace, folder: Path) -> Path:
    from core.plot import draw

    check_figures(jobs, [options.plot])
    path = options.out or folder / f"{options.plot}.svg"
    path.write_text(draw(jobs, options.plot, options.x))
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.report",
        description="The jobs of a sweep beside one another.",
        epilog="Figures are the keys of result.json with dots, as in the sweep's summary.csv: ttft_s.p90, kv.to_write.mean.",
    )
    parser.add_argument("folder", nargs="?", type=Path, help="of a sweep (default: the newest one under multirun/)")
    parser.add_argument("--figures", metavar="A,B", help="columns to show instead of the usual ones")
    parser.add_argument(
        "--over", metavar="FIELD", help="one row for all that differ in this field alone (seed): mean ± 95 %% interval"
    )
    parser.add_argument("--markdown", action="store_true", help="for a page")
    parser.add_argument("--plot", metavar="FIGURE", help="write a picture (SVG) of one figure and print its path")
    parser.add_argument("--x", metavar="FIELD", help="what --plot puts on the x axis (default: a field of numbers)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="where --plot writes (default: FIGURE.svg in the folder)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
