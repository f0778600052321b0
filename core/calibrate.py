"""Measure this machine for the simulator and the cost model.

    python -m core.calibrate [--rounds 5] [--show] [group=option ...]

Starts ``executor=torch`` with the given overrides (by default the default model and kernels) and measures read bandwidth,
plain matrix products at the model's shapes, the link (copies of KV blocks to the host pool and back), the model's linear
layers at several numbers of rows, and real steps of several batches and contexts, to which the overheads and the
attention rates are fitted (core/fit.py). It takes about a minute. The result is printed as a table and kept under this
machine's name in the cache folder; ``machine=local`` and the cost model of ``preemption=breakeven`` read it there.
``--show`` prints what is kept. Sampling is greedy throughout.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from core.arithmetic import Machine, Shape
from core.config import compose
from core.machines import FORMAT, Measured, calibration_path, machine_name, read_calibration, write_json
from core.shapes import shape_from_config
from core.types import ConfigError, QuireError

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of tokens at which the linear layers are timed."""
BASE = ["executor=torch", "frontend=replay", "max_num_seqs=32", "cache.num_blocks=1024", "cache.swap_gb=0.25"]
Say = Callable[[str], None]


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
    from core.start import start

    started = start(compose([*BASE, *overrides]), say=lambda line: None)
    engine = started.engine
    try:
        executor: Any = engine.executor
        described = executor.describe()
        if described.get("executor") != "torch":
            raise ConfigError("core.calibrate measures executor=torch; the other executors run nothing")
        shape = _shape(executor)
        machine, points = _measure(engine, shape, rounds, say)
    finally:
        engine.close()
    from core.fit import errors

    setup = {name: described.get(name) for name in ("dtype", "device", "kernels", "linears", "threads", "torch")}
    setup |= {"model": shape.name, "block_size": engine.limits.block_size, "measured": time.strftime("%Y-%m-%d %H:%M")}
    found = errors(shape, machine, points)
    path = calibration_path(shape.name, shape.dtype)
    write_json(path, {"format": FORMAT, "machine": attrs.asdict(machine), "setup": setup, "fit": found})
    return read_calibration(path)


def _shape(executor: Any) -> Shape:
    loaded = executor._need_model()
    return shape_from_config(loaded.model.config.to_dict(), loaded.info.name, loaded.info.dtype)


def _measure(engine: Any, shape: Shape, rounds: int, say: Say) -> tuple[Machine, list[Any]]:
    import torch

    from core.cache import available_memory
    from core.executors.calibration import measure_link
    from core.executors.measure import Stepper, host_seconds, matmul_rate, read_bandwidth
    from core.fit import fit

    executor = engine.executor
    device, dtype = executor._device, getattr(torch, shape.dtype)
    say("reading memory")
    bandwidth = read_bandwidth(device)
    say("multiplying matrices at the model's shapes")
    width, inner = shape.num_heads * shape.head_dim, shape.intermediate_size
    peak = matmul_rate(
        [(shape.hidden_size, width), (shape.hidden_size, inner), (inner, shape.hidden_size)], ROWS[-1], dtype, device
    )
    say("copying KV blocks to the host pool and back")
    link = measure_link(executor._shape, engine.limits.block_size, executor._layout, device)
    stepper = Stepper(engine)
    say("steps of the model, with and without attention")
    kinds = plan(engine.limits.max_model_len, engine.limits.num_blocks * engine.limits.block_size)
    alone, points = stepper.time([[(0, rows)] for rows in ROWS], kinds, rounds, say)
    head_s = shape.head_parameters * shape.dtype_bytes / bandwidth
    curve, best = [], 0.0
    for rows, point in zip(ROWS, alone, strict=True):
        best = max(best, 2 * shape.body_parameters * rows / max(point.seconds - head_s, point.seconds / 4))
        curve.append((rows, best))  # more rows never take longer a row: what says so is noise
    seen = max(rate * shape.dtype_bytes / 2 / rows for rows, rate in curve)  # weights read once, whatever the rows
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available_memory()
    machine = Machine(
        name=machine_name(),
        memory_gb=memory / 1e9,
        bandwidth_bytes_per_s=max(bandwidth, seen),  # what the model itself reached can be had
        flop_per_s=max(peak, best),
        prefill_efficiency=best / max(peak, best),
        link_bytes_per_s=link,
        linear_curve=curve,
    )
    machine = fit(shape, machine, points)
    say("the engine's own time beside the model's")
    few, many = (host_seconds(engine, n, 10) for n in (1, 16))
    a_sequence = max(0.0, (many - few) / 15)
    own = attrs.evolve(
        machine,
        step_overhead_s=machine.step_overhead_s + max(0.0, few - a_sequence),
        sequence_overhead_s=machine.sequence_overhead_s + a_sequence,
    )
    return own, [
        attrs.evolve(p, seconds=p.seconds + max(0.0, few - a_sequence) + a_sequence * p.work.sequences) for p in points
    ]


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
        ("read bandwidth", f"{machine.bandwidth_bytes_per_s / 1e9:.1f} GB/s"),
        ("matrix products at the model's shapes", f"{machine.flop_per_s / 1e9:.0f} GFLOP/s"),
        *((f"linear layers, {rows:.0f} rows", f"{rate / 1e9:.1f} GFLOP/s") for rows, rate in machine.linear_curve),
        ("link, blocks to the host and back", f"{machine.link_bytes_per_s / 1e9:.2f} GB/s"),
        ("attention, reading KV (fitted)", _rate(machine.attention_bytes_per_s, "GB/s")),
        ("attention, prompts (fitted)", _rate(machine.attention_flop_per_s, "GFLOP/s")),
        ("a step (fitted)", f"{machine.step_overhead_s * 1e3:.2f} ms"),
        ("a sequence (fitted)", f"{machine.sequence_overhead_s * 1e6:.0f} µs"),
        ("a token (fitted)", f"{machine.token_overhead_s * 1e6:.1f} µs"),
        ("fit: median error", f"{100 * found['median']:.1f} % of {found['points']} kinds of step"),
        ("fit: p90, worst", f"{100 * found['p90']:.1f} %, {100 * found['worst']:.1f} %"),
        ("kernels", ", ".join(dict.fromkeys(setup["kernels"].values()))),
        ("linears", str(setup["linears"]).removeprefix("linears: ")),
    ):
        shown.add_row(name, value)
    return shown


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
