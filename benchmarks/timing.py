"""Taking turns: what is compared runs in one process, one after the other, again and again, and ratios are taken turn by turn.

A machine's speed moves by more than most differences, and moves all that is measured within a turn alike. ``cpu`` times
count only the seconds in which the calling thread ran: for one thread on a machine that others load too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from core.hugepages import huge_empty
from plugins.kernels import cpu_build

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
READ_BYTES = 512 * 2**20
GEMM_SIZE = 2048

Run = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser, repeat: int) -> None:
    """--threads, --repeat and --clock."""
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=repeat, help=f"turns (default {repeat})")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: needs --threads 1")


def set_up(args: argparse.Namespace) -> None:
    """Threads as asked for; refuses a clock that would not see the work of other threads."""
    if args.clock == "cpu" and args.threads != 1:
        raise SystemExit("--clock cpu counts one thread only: give --threads 1")
    torch.set_num_threads(args.threads)


def take_turns(runs: dict[str, Run], repeat: int, clock: str = "wall") -> dict[str, list[float]]:
    """Seconds of every run in every turn, after one turn that is not counted."""
    now = CLOCKS[clock]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            started = now()
            run()
            if turn:
                seconds[name].append(now() - started)
    return seconds


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios of two runs within a turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def full_memory(count: int) -> torch.Tensor:
    """float32 [count] in large pages, random: a host may keep pages of equal content once, and reads of them are no measure."""
    return huge_empty((count,), torch.float32).uniform_(-0.01, 0.01)


def read_of(memory: torch.Tensor) -> Run:
    """A plain sum over float32 memory [N], by our operator where it can be had (it fetches ahead), else by torch."""
    try:
        cpu_build.load()
    except cpu_build.Unavailable:
        return memory.sum
    return partial(torch.ops.quire_cpu.read_all.default, memory)


def read_run() -> tuple[Run, int]:
    """A plain sum over memory larger than caches, and its bytes."""
    return read_of(full_memory(READ_BYTES // 4)), READ_BYTES


def gemm_run() -> tuple[Run, int]:
    """A large float32 matrix product by torch, and its floating-point operations."""
    left, right = torch.randn(2, GEMM_SIZE, GEMM_SIZE)
    return lambda: torch.mm(left, right), 2 * GEMM_SIZE**3
