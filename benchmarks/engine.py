"""Python's own time in a decode step: every stage but those of the model (move, forward, sample) and text.

    python -m benchmarks.engine [--steps 200] [--repeat 3] [group=option ...]

For 1, 8, 16, 32 and 256 running sequences on ``executor=toy`` it prints microseconds a step by stage (the median of the
repetitions), the time outside all stages ("between": report, metrics, observers), and what ``Metrics.update`` costs by
itself. With ``executor=roofline`` pricing the step counts too, so "all" is the host time of a simulated step;
"whole step, CPU" is the thread's own time in the fastest repetition, which a busy machine disturbs least. The last line
is the time a step at 256 running sequences, over 256: ``own_us_per_sequence: X``. Further words are overrides of the
engine, such as ``allocator=paged``.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import attrs
from rich.console import Console
from rich.table import Table

from core.config import compose
from core.executors import TakesRuns
from core.metrics import Metrics
from core.scratch import STAGES
from core.start import start
from core.types import Finished, MemoryReport, Plan, SamplingParams, StepReport

SIZES = (1, 8, 16, 32, 256)
NOT_OWN = ("move", "forward", "sample", "text")
OWN = tuple(stage for stage in STAGES if stage not in NOT_OWN)
PROMPT_TOKENS = 8
BASE = ["executor=toy", "cache.block_size=16", "cache.swap_gb=0", "max_num_seqs=256", "max_num_batched_tokens=4096"]


@attrs.frozen
class Measured:
    """Microseconds a step at one number of running sequences."""

    num_running: int
    stages: dict[str, float]
    between: float  # the step's wall time that no stage accounts for
    cpu: float  # the thread's own time, all stages

    @property
    def own(self) -> float:
        return sum(self.stages.values()) + self.between


def measure(num_running: int, num_steps: int, overrides: list[str]) -> Measured:
    """Decode steps of ``num_running`` equal sequences, after their prefill and some warm-up steps."""
    warm_up = 20
    num_output = num_steps + warm_up + 2
    blocks = num_running * (-(-(PROMPT_TOKENS + num_output) // 16))
    engine = start(compose([*BASE, f"cache.num_blocks={max(2, blocks)}", *overrides])).engine
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False)
    for _ in range(num_running):
        engine.submit(range(1, 1 + PROMPT_TOKENS), params)
    while engine.step().num_sampled < num_running:
        pass
    for _ in range(warm_up):
        engine.step()
    stages = dict.fromkeys(STAGES, 0.0)
    started, cpu = time.perf_counter(), time.thread_time()
    for _ in range(num_steps):
        for stage, seconds in engine.step().stage_seconds.items():
            stages[stage] += seconds
    wall, cpu = time.perf_counter() - started, time.thread_time() - cpu
    simulated = isinstance(engine.executor, TakesRuns)
    engine.close()
    to_us = 1e6 / num_steps
    own = {stage: stages[stage] * to_us for stage in (*OWN, *(("forward",) if simulated else ()))}
    return Measured(num_running, own, (wall - sum(stages.values())) * to_us, cpu * to_us)


def median(runs: list[Measured]) -> Measured:
    """The run whose total is in the middle."""
    return sorted(runs, key=lambda run: run.own)[len(runs) // 2]


def metrics_cost() -> tuple[float, float]:
    """``Metrics.update``: microseconds a step, and on top of that for each sequence of 32 tokens that finishes."""
    stages, memory = dict.fromkeys(STAGES, 1e-5), MemoryReport(1000, 900, 700, 100, 100, 0, 0, 0)

    def a_step(finished: tuple[Finished, ...]) -> StepReport:
        return StepReport(0, 0.0, 1.0, Plan(), (), (), finished, 256, 256, 256, 0, stages, memory)

    times = tuple(itertools.accumulate([0.01] * 32, initial=1.0))[:32]
    done = Finished(0, 0, 0, "", 8, 0, 32, "length", 0.5, 0.6, 0.7, times, times[-1])
    plain, busy, num = a_step(()), a_step((done,) * 100), 2000
    per_step = _time(lambda metrics: metrics.update(plain), num)
    return per_step, (_time(lambda metrics: metrics.update(busy), num // 20) - per_step) / 100


def _time(call: Callable[[Metrics], None], num: int) -> float:
    best = float("inf")
    for _ in range(5):
        metrics = Metrics()
        started = time.perf_counter()
        for _ in range(num):
            call(metrics)
        best = min(best, time.perf_counter() - started)
    return best / num * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps measured for each size (default 200)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions, of which the median is shown (default 3)")
    parser.add_argument("overrides", nargs="*", help="overrides of the engine, such as scheduler=chunked")
    given = parser.parse_intermixed_args()
    runs = [[measure(size, given.steps, given.overrides) for _ in range(given.repeat)] for size in SIZES]
    results = [median(each) for each in runs]
    shown = Table(title="own Python, µs a step", title_justify="left")
    shown.add_column("stage")
    for result in results:
        shown.add_column(f"{result.num_running} running", justify="right")
    for stage in results[0].stages:
        shown.add_row(stage, *(f"{result.stages[stage]:.1f}" for result in results))
    shown.add_row("between", *(f"{result.between:.1f}" for result in results))
    shown.add_section()
    shown.add_row("all", *(f"{result.own:.1f}" for result in results))
    if "forward" in results[0].stages:
        shown.add_row("whole step, CPU", *(f"{min(run.cpu for run in each):.1f}" for each in runs))
    shown.add_row("a sequence", *(f"{result.own / result.num_running:.2f}" for result in results))
    Console().print(shown)
    per_step, per_finished = metrics_cost()
    print(f"Metrics.update: {per_step:.2f} µs a step, {per_finished:.2f} µs a finished sequence of 32 tokens")
    largest = results[-1]
    print(f"own_us_per_sequence: {largest.own / largest.num_running:.3f}")


if __name__ == "__main__":
    main()
