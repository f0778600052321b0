"""Measure this machine for the simulator and the cost model.

    python -m core.calibrate [--rounds 5] [--show] [group=option ...]

Starts ``executor=torch`` with the given overrides (by default the default model and kernels) and measures read bandwidth,
plain matrix products at the model's shapes, the link (copies of KV blocks to the host pool and back), the model's linear
layers and its head at many numbers of rows, and real steps of several batches and contexts, to which the overheads and
the attention rates are fitted (core/fit.py). It takes about a minute. The result is printed as a table and kept under
this machine's name in the cache folder; ``machine=local`` and the cost model of ``preemption=breakeven`` read it there.
``--show`` prints what is kept. Sampling is greedy throughout. Other processes spoil it: what they used meanwhile is shown.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from core.config import compose
from core.machines import Measured, calibration_path, read_calibration
from core.types import ConfigError, Limits, QuireError

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens at which the linear layers are timed: a CPU's time is no line in them, nor one of a few levels."""
HEAD_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of sampled rows at which the head is timed, each of them one of ``ROWS``."""
BASE = ["executor=torch", "frontend=replay", "max_num_seqs=32", "cache.num_blocks=1024", "cache.swap_gb=0.25"]
Say = Callable[[str], None]


def rows_alone(limits: Limits) -> tuple[list[int], list[int]]:
    """Those of ``ROWS`` and of ``HEAD_ROWS`` for which there is room."""
    most = min(limits.max_model_len, int(0.9 * limits.num_blocks * limits.block_size))
    return [rows for rows in ROWS if rows <= most], [rows for rows in HEAD_ROWS if rows <= min(most, limits.num_blocks)]


def plan(max_len: int, pool_tokens: int) -> list[list[tuple[int, int]]]:
    """The kinds of step to time, as (start, end) a sequence: decodes, prompts and chunks of prompts, and both together."""
    steps = [[(context - 1, context)] * size for size in (1, 4, 16) for context in (32, 128, 512)]
    steps += [[(context - 1, context)] * size for size, context in ((2, 256), (8, 64), (32, 32), (32, 128))]
    steps += [[(start, start + chunk)] for chunk in (32, 128) for start in (0, 128, 384)]
    steps += [[(0, 32)] * 4, [(0, 16)] * 8]
    steps += [[(255, 256)] * size + [(start, start + 96)] for size, start in ((4, 256), (16, 0))]
    longest = [max(end for _, end in step) for step in steps]
    tokens = [sum(end for _, end in step) for step in steps]
    return [
        s for s, long, all in zip(steps, longest, tokens, strict=True) if long <= max_len and all <= 0.9 * pool_tokens
    ]


def calibrate(overrides: Sequence[str], rounds: int, say: Say) -> Measured:
    """Measure, fit and keep. ConfigError for bad overrides or a model that cannot be described."""
    from core.executors.bench import Bench
    from core.start import start

    engine = start(compose([*BASE, *overrides]), say=lambda line: None).engine
    try:
        bench = Bench(engine, say)
        bench.round(counts=False)
        say("warmed up")
        for number in range(1, rounds + 1):
            bench.round()
            say(f"{number} of {rounds} rounds")
        path = calibration_path(bench.shape.name, bench.shape.dtype)
        bench.write(path)
    finally:
        engine.close()
    return read_calibration(path)


# ------------------------------------------------------------------------------------------------ what is shown


def table(measured: Measured) -> Table:
    """Every rate and overhead, with its unit."""
    machine, setup, found = measured.machine, measured.setup, measured.fit
    shown = Table(
        title=f"{machine.name}: {setup['model']}, {setup['dtype']}, {setup['threads']} threads", title_justify="left"
    )
    shown.add_column("measured")
    shown.add_column("value", justify="right")
    for name, value in (
        ("memory", f"{machine.memory_gb:.1f} GB"),
        ("read bandwidth", f"{setup['read_bytes_per_s'] / 1e9:.1f} GB/s"),
        (f"weights read, in {setup['dtype']} bytes", f"at most {machine.bandwidth_bytes_per_s / 1e9:.1f} GB/s"),
        ("matrix products at the model's shapes", f"{machine.flop_per_s / 1e9:.0f} GFLOP/s"),
        *((f"linear layers, {rows:.0f} rows", f"{rate / 1e9:.1f} GFLOP/s") for rows, rate in machine.linear_curve),
        *((f"head, {rows:.0f} rows", f"{rate / 1e9:.1f} GFLOP/s") for rows, rate in machine.head_curve),
        ("link, blocks to the host and back", f"{machine.link_bytes_per_s / 1e9:.2f} GB/s"),
        ("a block moved", f"{machine.move_overhead_s * 1e6:.1f} µs"),
        ("attention, reading KV (fitted)", _rate(machine.attention_bytes_per_s, "GB/s")),
        ("attention, prompts (fitted)", _rate(machine.attention_flop_per_s, "GFLOP/s")),
        ("a step (fitted)", f"{machine.step_overhead_s * 1e3:.2f} ms"),
        ("a sequence (fitted)", f"{machine.sequence_overhead_s * 1e6:.0f} µs"),
        ("a token (fitted)", f"{machine.token_overhead_s * 1e6:.1f} µs"),
        ("fit: median error", f"{100 * found['median']:.1f} % of {found['points']} kinds of step"),
        ("fit: p90, worst", f"{100 * found['p90']:.1f} %, {100 * found['worst']:.1f} %"),
        ("other processes meanwhile", _share(setup["others"])),
        ("kernels", ", ".join(dict.fromkeys(setup["kernels"].values()))),
        ("linears", str(setup["linears"]).removeprefix("linears: ")),
    ):
        shown.add_row(name, value)
    return shown


def _share(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{100 * value:.1f} % of the processors" + ("" if value < 0.05 else ": measure again without them")


def _rate(value: float | None, unit: str) -> str:
    if value is None or value > 1e16:
        return "too fast to be seen"
    return f"{value / 1e9:.1f} {unit}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.calibrate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times that each kind of step runs (default 5)")
    parser.add_argument("--show", action="store_true", help="print what is kept, measure nothing")
    parser.add_argument("overrides", nargs="*", help="as for core.serve, e.g. model=smollm2 num_threads=2 kernel=torch")
    options = parser.parse_args(arguments)
    console, began = Console(), time.perf_counter()
    try:
        if options.show:
            folder = calibration_path("", "").parent
            files = sorted(folder.glob("*.json"))
            if not files:
                raise ConfigError(
                    f"this machine has not been measured ({folder} has no files); run: python -m core.calibrate"
                )
            for path in files:
                console.print(table(read_calibration(path)))
            return 0
        if options.rounds < 1:
            raise ConfigError(f"--rounds {options.rounds}: allowed is a number from 1")
        measured = calibrate(options.overrides, options.rounds, lambda line: _progress(began, line))
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    console.print(table(measured))
    console.print(
        f"kept in {measured.path} ({time.perf_counter() - began:.0f} s); use it with executor=roofline machine=local",
        soft_wrap=True,
    )
    return 0


def _progress(began: float, line: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} s  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
