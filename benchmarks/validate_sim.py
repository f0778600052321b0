"""Is the simulator to be believed? The same workloads on ``executor=torch`` and on the calibrated ``executor=roofline``.

    python -m benchmarks.validate_sim [--policy NAME:OVERRIDE,OVERRIDE ...] [--load closed=8 --load rate=1.5 ...]
                                      [--repeat 2] [--others 0.02] [--kept] [--json FILE] [group=option ...]

A real engine is started for each policy and stays. Round by round each serves every load once, so that a slow minute hits
all alike; the simulator serves each once (it always gives the same). The first ``--warm-up`` requests are left out of the
figures on both sides: a real engine's first steps touch memory that was never used. Printed are p50 and p90 of TTFT, TPOT
and E2E and the throughput: the mean of the real runs, the spread between them (largest over smallest, less one), the
simulator's figure and its error against the mean. Then, for each load and figure, whether pairs of policies are ranked
alike; pairs that differ by less than the spread of the real runs are left out, and counted.

A real run during which other processes used more than ``--others`` of the processors' time says nothing of the simulator: it
is made again, at most three times, and that is said; figures for which none was quiet are in the table, and the summary is
given with and without them. Between the real runs one more engine is calibrated, a round before each,
because a shared machine is not equally fast all the time; ``--kept`` takes what ``python -m core.calibrate`` kept instead, which
adds what has changed since.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from core.calibrate import BASE as CALIBRATED
from core.config import compose, instantiate
from core.executors.bench import Bench
from core.frontends.replay import ReplayFrontend
from core.machines import Company, calibration_path, differences, read_calibration
from core.start import Started, start
from core.types import ConfigError, QuireError

POLICIES = (
    "swap:preemption=swap",
    "recompute:preemption=recompute",
    "chunks of 32:scheduler.max_chunk=32",
    "static:scheduler=static,max_num_batched_tokens=512",
)
LOADS = ("closed=4", "closed=12", "rate=2.5")
BASE = [
    "frontend=replay",
    "model=smollm2",
    "max_num_seqs=16",
    "max_model_len=512",
    "cache.num_blocks=72",
    "cache.swap_gb=0.5",
    "workload.num_requests=40",
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
DEVICE_WORDS = ("kernel", "linears", "num_threads", "device")
"""Overrides that say what runs the model, which a simulation takes from the calibration."""
TRIES = 4
"""Real runs of one case in one round, or starts of the engines, at most, while others disturb."""


@attrs.frozen
class Row:
    """One figure of one policy at one load."""

    policy: str
    load: str
    figure: str
    real: tuple[float, ...]
    simulated: float
    others: tuple[float | None, ...] = ()  # share of the processors that other processes used during each real run

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


def begin(overrides: Sequence[str]) -> Started:
    """A running engine for these overrides."""
    return start(compose(overrides), say=lambda line: None)


def serve(started: Started, overrides: Sequence[str], warm_up: int) -> dict[str, Any]:
    """Serve these overrides' workload; its record. The engine is left idle."""
    workload = instantiate(compose(overrides).workload, "workload")
    started.engine.metrics.reset()
    with quiet():
        record = ReplayFrontend(workload, progress=False, warmup_requests=warm_up).run(started)
    if record["status"] != "ok":
        raise QuireError(f"{' '.join(overrides)}: {record.get('error', record['status'])}")
    return record


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


class Unlike(ConfigError):
    """An engine runs other kernels, linears or threads than the calibrated one."""


def begin_alike(policies: Sequence[str], overrides: Sequence[str], kept: bool) -> Reality:
    """Engines that run what is calibrated; started again where they do not: linears are chosen by time, which others disturb."""
    for _ in range(TRIES - 1):
        try:
            return Reality(policies, overrides, kept)
        except Unlike as error:
            print(f"{error}; starting again", file=sys.stderr, flush=True)
    return Reality(policies, overrides, kept)


class Reality:
    """Engines that run a model: one for each policy, and one that is calibrated between their runs."""

    def __init__(self, policies: Sequence[str], overrides: Sequence[str], kept: bool):
        self.engines: dict[str, Started] = {}
        self._bench: Bench | None = None
        self._measured: Started | None = None
        try:
            if not kept:
                words = [word for word in overrides if word.partition("=")[0] in (*DEVICE_WORDS, "model")]
                self._measured = begin([*CALIBRATED, *words])
                self._bench = Bench(self._measured.engine, say=lambda line: None)
                self._bench.round(counts=False)
            for policy in policies:
                self.engines[policy] = begin(["executor=torch", *BASE, *overrides, *_policy(policy)[1]])
                self._check(self.engines[policy].manifest["executor"])
        except BaseException:
            self.close()
            raise

    def calibrate(self) -> None:
        """One round of steps, unless the kept calibration is used."""
        if self._bench is not None:
            self._bench.round()

    def calibration(self, folder: Path) -> list[str]:
        """Overrides that give the simulator this machine as it was between the runs, or as it was kept."""
        if self._bench is None:
            return ["machine=local"]
        path = folder / "machine.json"
        self._bench.write(path)
        return ["machine=local", f"machine.file={path}"]

    def _check(self, described: dict[str, Any]) -> None:
        """What is calibrated must run the same kernels, linears and threads as this policy's engine."""
        if self._measured is not None:
            calibrated = self._measured.manifest["executor"]
        else:
            calibrated = read_calibration(calibration_path(described["model"], described["dtype"])).setup
        if found := differences(calibrated, described):
            raise Unlike(f"{'; '.join(found)}: run python -m core.calibrate with the same options")

    def close(self) -> None:
        for started in (*self.engines.values(), *filter(None, [self._measured])):
            started.engine.close()


def run(
    policies: Sequence[str], loads: Sequence[str], options: argparse.Namespace, overrides: Sequence[str]
) -> Iterator[str | list[Row]]:
    """Yields a line for each run that ended, and last the rows."""
    cases = list(itertools.product(policies, loads))
    real: dict[tuple[str, str], list[tuple[dict[str, Any], float | None]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        reality = begin_alike(policies, overrides, options.kept)
        try:
            for _ in range(options.repeat):
                for policy, load in cases:
                    words = [*BASE, *overrides, *load_overrides(load)]
                    for made in range(1, TRIES + 1):
                        reality.calibrate()
                        company = Company()
                        record = serve(reality.engines[policy], words, options.warm_up)
                        others = company.share()
                        again = others is not None and others > options.others and made < TRIES
                        yield _said(_policy(policy)[0], load, record, others, again)
                        if not again:
                            break
                    real[policy, load].append((record, others))
            machine = reality.calibration(Path(folder))
        finally:
            reality.close()
        yield [row for case in cases for row in _simulate(case, machine, real[case], options.warm_up, overrides)]


def _simulate(
    case: tuple[str, str],
    machine: Sequence[str],
    real: Sequence[tuple[dict[str, Any], float | None]],
    warm_up: int,
    overrides: Sequence[str],
) -> Iterator[Row]:
    """The simulator on one case, beside its real runs. Kernels and threads are in the calibration."""
    (name, words), load = _policy(case[0]), case[1]
    described = [word for word in overrides if word.partition("=")[0] not in DEVICE_WORDS]
    words = ["executor=roofline", *machine, *BASE, *described, *words, *load_overrides(load)]
    started = begin(words)
    record = serve(started, words, warm_up)
    started.engine.close()
    for title, path in FIGURES.items():
        values = tuple(figure(each, path) for each, _ in real)
        yield Row(name, load, title, values, figure(record, path), tuple(share for _, share in real))


def _said(name: str, load: str, record: dict[str, Any], others: float | None, again: bool) -> str:
    speed = f"{record['output_tokens_per_s']:.1f} tokens/s in {record['duration_s']:.1f} s"
    seen = "" if others is None else f", others used {100 * others:.1f} % of the processors"
    return f"real run: {name}, {load}: {speed}{seen}" + ("; made again" if again else "")


def _policy(text: str) -> tuple[str, list[str]]:
    name, _, words = text.partition(":")
    return name, [word for word in words.split(",") if word]


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
    named = {name: [abs(row.error) for row in rows if row.figure == name] for name in FIGURES}
    by_figure = {name: statistics.median(each) for name, each in named.items() if each}
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
        "others_most": max((share or 0.0 for row in rows for share in row.others), default=0.0),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validate_sim", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--policy", action="append", help=f"NAME:OVERRIDES by comma; default: {'; '.join(POLICIES)}")
    parser.add_argument("--load", action="append", help=f"closed=N or rate=R; default: {', '.join(LOADS)}")
    parser.add_argument("--repeat", type=int, default=2, help="real runs of each (default 2, at least 2)")
    parser.add_argument("--warm-up", type=int, default=16, help="requests before those that count (default 16)")
    parser.add_argument(
        "--others", type=float, default=0.02, help="share of the processors others may use (default 0.02)"
    )
    parser.add_argument("--kept", action="store_true", help="use what python -m core.calibrate kept, measure nothing")
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
        for item in run(options.policy or POLICIES, options.load or LOADS, options, options.overrides):
            if isinstance(item, str):
                print(item, file=sys.stderr, flush=True)
            else:
                rows = item
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    undisturbed = [row for row in rows if max((share or 0.0 for share in row.others), default=0.0) <= options.others]
    console.print(table(rows))
    found = {"all": summary(rows)}
    if undisturbed and len(undisturbed) < len(rows):
        found["undisturbed"] = summary(undisturbed)
    for title, figures in found.items():
        say_summary(console, title, figures)
    if options.json:
        options.json.write_text(json.dumps({**found, "rows": [attrs.asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


def say_summary(console: Console, title: str, found: dict[str, Any]) -> None:
    """One line a figure; shares in percent."""
    console.print(f"{title} figures", style="bold")
    for name, value in found.items():
        if isinstance(value, dict):
            text = ", ".join(f"{key} {100 * each:.1f} %" for key, each in value.items())
        else:
            text = str(value) if isinstance(value, int) else f"{100 * value:.1f} %"
        console.print(f"  {name}: {text}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
