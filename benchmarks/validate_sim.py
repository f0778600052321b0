"""Is the simulator to be believed? The same workloads on ``executor=torch`` and on the calibrated ``executor=roofline``.

    python -m benchmarks.validate_sim [--policy NAME:OVERRIDE,OVERRIDE ...] [--load closed=8 --load rate=1.5 ...]
                                      [--repeat 2] [--json FILE] [group=option ...]

For each policy and load the real engine runs ``--repeat`` times, round by round, so that a slow minute hits all alike, and
the simulator once (it always gives the same). Printed are p50 and p90 of TTFT, TPOT and E2E and the throughput: the mean of
the real runs, the spread between them (largest over smallest, less one), the simulator's figure and its error against the
mean. Then, for each load and figure, whether pairs of policies are ranked alike; pairs that differ by less than the spread
of the real runs are left out, and counted. Run ``python -m core.calibrate`` with the same kernels and threads before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from core.config import compose, instantiate
from core.frontends.replay import ReplayFrontend
from core.machines import calibration_path, read_calibration
from core.start import Started, start
from core.types import ConfigError, QuireError

POLICIES = ("swap:preemption=swap", "recompute:preemption=recompute", "chunks of 32:scheduler.max_chunk=32")
LOADS = ("closed=4", "closed=12", "rate=1.5")
BASE = [
    "frontend=replay",
    "model=smollm2",
    "max_num_seqs=16",
    "max_model_len=512",
    "cache.num_blocks=72",
    "cache.swap_gb=0.5",
    "workload.num_requests=24",
    "workload.prompt_tokens={kind:uniform,low:16,high:160}",
    "workload.output_tokens={kind:uniform,low:8,high:56}",
]
FIGURES = {
    "TTFT p50": ("ttft_s", "p50"),
    "TTFT p90": ("ttft_s", "p90"),
    "TPOT p50": ("tpot_s", "p50"),
    "TPOT p90": ("tpot_s", "p90"),
    "E2E p50": ("e2e_s", "p50"),
    "E2E p90": ("e2e_s", "p90"),
    "tokens/s": ("output_tokens_per_s",),
}


@attrs.frozen
class Row:
    """One figure of one policy at one load."""

    policy: str
    load: str
    figure: str
    real: tuple[float, ...]
    simulated: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.real)

    @property
    def spread(self) -> float:
        """Largest real run over the smallest, less one."""
        return max(self.real) / min(self.real) - 1

    @property
    def error(self) -> float:
        return self.simulated / self.mean - 1


def load_overrides(load: str) -> list[str]:
    """``closed=8``: so many in flight; ``rate=1.5``: Poisson arrivals, requests a second."""
    kind, _, value = load.partition("=")
    if kind == "closed" and value.isdecimal():
        return [f"workload.concurrency={value}"]
    if kind == "rate":
        return [f"workload.arrivals={{kind:poisson,rate_per_s:{float(value)}}}"]
    raise ConfigError(f"--load {load}: give closed=N or rate=R")


def serve(overrides: Sequence[str]) -> tuple[dict[str, Any], Started]:
    """One run; its record, and what ran."""
    config = compose(overrides)
    started = start(config, say=lambda line: None)
    try:
        workload = instantiate(config.workload, "workload")
        with quiet():
            record = ReplayFrontend(workload, progress=False).run(started)
    finally:
        started.engine.close()
    if record["status"] != "ok":
        raise QuireError(f"{' '.join(overrides)}: {record.get('error', record['status'])}")
    return record, started


def quiet() -> Any:
    """The replay frontend prints a table; here there will be one for all."""
    import contextlib
    import io

    return contextlib.redirect_stdout(io.StringIO())


def figure(record: dict[str, Any], path: Sequence[str]) -> float:
    value: Any = record
    for key in path:
        value = value[key]
    return float(value)


def check_calibration(described: dict[str, Any]) -> None:
    """The calibration must speak for the kernels, linears and threads that just ran."""
    measured = read_calibration(calibration_path(described["model"], described["dtype"]))
    if differences := measured.differences(described):
        raise ConfigError(f"{'; '.join(differences)}: run python -m core.calibrate with the same options")


def run(
    policies: Sequence[str], loads: Sequence[str], repeat: int, overrides: Sequence[str]
) -> Iterator[str | list[Row]]:
    """Yields a line for each run that ended, and last the rows."""
    real: dict[tuple[str, str], list[dict[str, Any]]] = {}
    cases = list(itertools.product(policies, loads))
    for number in range(repeat):
        for policy, load in cases:
            name, words = _policy(policy)
            record, started = serve(["executor=torch", *BASE, *overrides, *words, *load_overrides(load)])
            if not real:
                check_calibration(started.manifest["executor"])
            real.setdefault((policy, load), []).append(record)
            speed = f"{record['output_tokens_per_s']:.1f} tokens/s in {record['duration_s']:.1f} s"
            yield f"real run {number + 1}: {name}, {load}: {speed}"
    rows = []
    for policy, load in cases:
        name, words = _policy(policy)
        # the engine's model is described by its config; kernels and threads are in the calibration
        record, _ = serve(
            ["executor=roofline", "machine=local", *BASE, *_simulable(overrides), *words, *load_overrides(load)]
        )
        for title, path in FIGURES.items():
            values = tuple(figure(each, path) for each in real[policy, load])
            rows.append(Row(name, load, title, values, figure(record, path)))
    yield rows


def _policy(text: str) -> tuple[str, list[str]]:
    name, _, words = text.partition(":")
    return name, [word for word in words.split(",") if word]


def _simulable(overrides: Sequence[str]) -> list[str]:
    return [word for word in overrides if word.partition("=")[0] not in ("kernel", "linears", "num_threads", "device")]


def ranking(rows: Sequence[Row]) -> tuple[int, int, int]:
    """(pairs of policies ranked alike, ranked otherwise, too close in reality to be ranked), over loads and figures."""
    alike = otherwise = close = 0
    by_case: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_case.setdefault((row.load, row.figure), []).append(row)
    for group in by_case.values():
        for one, two in itertools.combinations(group, 2):
            separate = max(one.real) < min(two.real) or max(two.real) < min(one.real)
            if not separate:
                close += 1
            elif (one.mean < two.mean) == (one.simulated < two.simulated):
                alike += 1
            else:
                otherwise += 1
    return alike, otherwise, close


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="real engine against simulator", title_justify="left")
    for column in ("policy", "load", "figure"):
        shown.add_column(column, no_wrap=True)
    for column in ("real", "spread", "simulated", "error"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        unit = 1.0 if row.figure == "tokens/s" else 1e3
        text = "" if row.figure == "tokens/s" else " ms"
        values = f"{row.mean * unit:.4g}{text}", f"{100 * row.spread:.1f} %", f"{row.simulated * unit:.4g}{text}"
        shown.add_row(row.policy, row.load, row.figure, *values, f"{100 * row.error:+.1f} %")
    return shown


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    errors = sorted(abs(row.error) for row in rows)
    spreads = [row.spread for row in rows]
    alike, otherwise, close = ranking(rows)
    by_figure = {name: statistics.median(abs(r.error) for r in rows if r.figure == name) for name in FIGURES}
    return {
        "figures": len(rows),
        "median_error": statistics.median(errors),
        "p90_error": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "worst_error": errors[-1],
        "within_5_percent": sum(e <= 0.05 for e in errors) / len(errors),
        "within_9_percent": sum(e <= 0.09 for e in errors) / len(errors),
        "median_error_by_figure": by_figure,
        "median_spread": statistics.median(spreads),
        "worst_spread": max(spreads),
        "pairs_ranked_alike": alike,
        "pairs_ranked_otherwise": otherwise,
        "pairs_too_close": close,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validate_sim", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--policy", action="append", help=f"NAME:OVERRIDES by comma; default: {'; '.join(POLICIES)}")
    parser.add_argument("--load", action="append", help=f"closed=N or rate=R; default: {', '.join(LOADS)}")
    parser.add_argument("--repeat", type=int, default=2, help="real runs of each (default 2, at least 2)")
    parser.add_argument("--json", type=Path, help="write rows and summary there too")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    console = Console(width=110)
    rows: list[Row] = []
    try:
        if options.repeat < 2:
            raise ConfigError(
                f"--repeat {options.repeat}: allowed is a number from 2, or there is no spread to compare with"
            )
        for item in run(options.policy or POLICIES, options.load or LOADS, options.repeat, options.overrides):
            if isinstance(item, str):
                print(item, file=sys.stderr, flush=True)
            else:
                rows = item
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    found = summary(rows)
    console.print(table(rows))
    for name, value in found.items():
        if isinstance(value, dict):
            console.print(
                f"{name}: " + ", ".join(f"{key} {100 * each:.1f} %" for key, each in value.items()), highlight=False
            )
        else:
            console.print(f"{name}: {value if isinstance(value, int) else f'{100 * value:.1f} %'}", highlight=False)
    if options.json:
        options.json.write_text(
            json.dumps({"summary": found, "rows": [attrs.asdict(row) for row in rows]}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
