"""What the policies are worth, in the simulator: the experiments of conf/experiment, five seeds each, paired, with intervals.

    python -m benchmarks.schedulers [batching interference goodput preemption prediction sessions fairness] [--seeds 5]

Every run has a virtual clock, so figures are the same on any machine. A ratio is formed within a seed (the same requests), then
averaged over seeds in the logarithm; ± is the 95 % interval of Student's t over the seeds. ``promise`` is what the project
promises of it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from core.config import compose, instantiate, option_name
from core.start import start
from core.types import StepReport

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t, two-sided, by degrees of freedom."""

Record = dict[str, Any]


def run(experiment: str, seed: int, *overrides: str) -> Record:
    """The record of one run, with the share of decoded tokens whose step also computed a prompt (``met_prefill``)."""
    config = compose([f"experiment={experiment}", f"seed={seed}", *overrides])
    started = start(config, say=lambda _: None)
    frontend = instantiate(config.frontend, option_name(config, "frontend"))
    decoded, met = 0, 0
    step = started.engine.step

    def counted() -> StepReport:
        nonlocal decoded, met
        report = step()
        ones = sum(1 for chunk in report.plan.chunks if chunk.num_tokens == 1)
        decoded += ones
        met += ones if ones < len(report.plan.chunks) else 0
        return report

    started.engine.step = counted  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            record = frontend.run(started)
    finally:
        started.engine.close()
    if record["status"] != "ok":
        raise RuntimeError(f"{experiment} {overrides}: {record.get('error')}")
    record["met_prefill"] = met / decoded if decoded else 0.0
    record["sessions"] = dict(started.engine.sessions.counts)
    return record


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of paired ratios and its 95 % interval."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    mean = statistics.fmean(logs)
    half = T_95[min(len(logs) - 1, 9)] * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def say_ratio(what: str, above: Sequence[float], below: Sequence[float], promise: str) -> None:
    mean, low, high = ratio(above, below)
    print(f"  {what}: ratio {mean:.5g} [{low:.5g}, {high:.5g}]   promise: {promise}", flush=True)


def say_mean(what: str, values: Sequence[float], unit: str = "") -> None:
    half = T_95[min(len(values) - 1, 9)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    print(f"  {what}: {statistics.fmean(values):.4g} ± {half:.2g}{unit}", flush=True)


def tokens_per_s(records: Sequence[Record]) -> list[float]:
    return [record["output_tokens_per_s"] for record in records]


def batching(seeds: range) -> None:
    """Promise: fcfs at least twice static's output tokens/s."""
    by = {
        name: [run("batching", seed, f"scheduler={name}") for seed in seeds] for name in ("static", "fcfs", "chunked")
    }
    for name, records in by.items():
        say_mean(f"{name}: output", tokens_per_s(records), " tokens/s")
    say_ratio("fcfs / static, tokens/s", tokens_per_s(by["fcfs"]), tokens_per_s(by["static"]), ">= 2")


def interference(seeds: range) -> None:
    """Promise: p99 ITL of chunked at least 3 times better than fcfs's, throughput at most 10 % lower."""
    fcfs = [run("interference", seed, "scheduler=fcfs") for seed in seeds]
    chunked = [run("interference", seed, "scheduler=chunked", "max_num_batched_tokens=256") for seed in seeds]
    for name, records in (("fcfs, step of 2048", fcfs), ("chunked, step of 256", chunked)):
        say_mean(f"{name}: p99 ITL", [1e3 * record["itl_s"]["p99"] for record in records], " ms")
        say_mean(f"{name}: gaps that meet a prefill", [100 * record["met_prefill"] for record in records], " %")
        say_mean(f"{name}: output", tokens_per_s(records), " tokens/s")
    itl = [[record["itl_s"]["p99"] for record in records] for records in (fcfs, chunked)]
    say_ratio("p99 ITL, fcfs / chunked", itl[0], itl[1], ">= 3")
    say_ratio("tokens/s, chunked / fcfs", tokens_per_s(chunked), tokens_per_s(fcfs), ">= 0.9")


def goodput(seeds: range) -> None:
    """Promise: goodput of slo at least 1.3 times chunked's with the same bounded queue."""
    closed = ("scheduler=chunked", "max_queue=null", "workload.concurrency=256")
    closed = (*closed, "workload.arrivals.kind=closed", "workload.arrivals.rate_per_s=null")
    saturated = [run("goodput", seed, *closed) for seed in seeds]
    say_mean(
        "saturation, closed loop of 256",
        [r["requests"]["finished"] / r["duration_s"] for r in saturated],
        " requests/s",
    )
    arriving = compose(["experiment=goodput"]).workload.arrivals.rate_per_s
    say_ratio(
        "arrivals / saturation",
        [arriving] * len(seeds),
        [r["requests"]["finished"] / r["duration_s"] for r in saturated],
        "1.5",
    )
    cases = {
        "chunked": ("scheduler=chunked",),
        "slo": ("scheduler=slo",),
        "chunked, admission=deadline": ("scheduler=chunked", "admission=deadline"),
        "slo, admission=deadline": ("scheduler=slo", "admission=deadline"),
    }
    for tpot in (0.02, 0.016):
        by = {name: [run("goodput", s, *words, f"slo.tpot_s={tpot}") for s in seeds] for name, words in cases.items()}
        good = {name: [record["service"]["goodput_per_s"] for record in records] for name, records in by.items()}
        for name, records in by.items():
            say_mean(f"TPOT {1e3 * tpot:g} ms, {name}: goodput", good[name], " requests/s")
            say_mean(
                f"TPOT {1e3 * tpot:g} ms, {name}: in time", [100 * r["service"]["attainment"] for r in records], " %"
            )
        say_ratio(f"goodput, slo / chunked, TPOT {1e3 * tpot:g} ms", good["slo"], good["chunked"], ">= 1.3")


def preemption(seeds: range) -> None:
    """Promise: breakeven within 3 % of the better of the two everywhere, and strictly better than both on at least one mix."""
    for experiment, links in (("preemption", (8, 16, 24, 32, 40, 48, 64)), ("preemption_long", (8, 24, 64))):
        for link in links:
            _one_link(experiment, link, seeds)


def _one_link(experiment: str, link: int, seeds: range) -> None:
    word = f"machine.link_bytes_per_s={link}e9"
    by = {k: [run(experiment, s, f"preemption={k}", word) for s in seeds] for k in ("swap", "recompute", "breakeven")}
    seconds = {kind: [record["duration_s"] for record in records] for kind, records in by.items()}
    better = min("swap", "recompute", key=lambda kind: statistics.fmean(seconds[kind]))
    kinds = {kind: sum(record["preemptions"][kind] for record in by["breakeven"]) for kind in ("swap", "recompute")}
    name = f"{experiment}, {link} GB/s"
    print(
        f"  {name}: breakeven swapped {kinds['swap']} and recomputed {kinds['recompute']}; better of the two: {better}"
    )
    say_ratio(f"{name}: time, breakeven / {better}", seconds["breakeven"], seconds[better], "<= 1.03")
    for kind in ("swap", "recompute"):
        say_ratio(f"{name}: time, {kind} / breakeven", seconds[kind], seconds["breakeven"], "> 1 for both on some mix")


def prediction(seeds: range) -> None:
    """What a wrong prediction costs: mean time of an answer, against arrival order."""
    cases = {
        "chunked": ("scheduler=chunked", "predictor=declared"),
        "sjf, oracle": ("scheduler=sjf", "predictor=oracle"),
        "sjf, oracle with error 0.5": ("scheduler=sjf", "predictor=oracle", "predictor.error=0.5"),
        "sjf, oracle with error 1.5": ("scheduler=sjf", "predictor=oracle", "predictor.error=1.5"),
        "sjf, quantile": ("scheduler=sjf", "predictor=quantile"),
        "sjf, declared (all alike)": ("scheduler=sjf", "predictor=declared"),
    }
    by = {name: [run("prediction", seed, *words) for seed in seeds] for name, words in cases.items()}
    for name, records in by.items():
        say_mean(f"{name}: mean E2E", [record["e2e_s"]["mean"] for record in records], " s")
        say_mean(f"{name}: p99 E2E", [record["e2e_s"]["p99"] for record in records], " s")
        if name != "chunked":
            times = [[record["e2e_s"]["mean"] for record in each] for each in (records, by["chunked"])]
            say_ratio(f"mean E2E, {name} / chunked", times[0], times[1], "none")


def sessions(seeds: range) -> None:
    """What becomes of the KV of agents that stall."""
    by = {k: [run("sessions", s, f"idle={k}") for s in seeds] for k in ("discard", "keep", "swap", "breakeven")}
    for name, records in by.items():
        say_mean(f"{name}: whole run", [record["duration_s"] for record in records], " s")
        say_mean(f"{name}: mean TTFT", [record["ttft_s"]["mean"] for record in records], " s")
        share = [100 * record["prefix"]["hit_tokens"] / record["prefix"]["query_tokens"] for record in records]
        say_mean(f"{name}: prompt tokens not computed again", share, " %")
        print(f"  {name}: {records[0]['sessions']} (seed {seeds[0]})")
    seconds = {name: [record["duration_s"] for record in records] for name, records in by.items()}
    better = min(("discard", "keep", "swap"), key=lambda name: statistics.fmean(seconds[name]))
    say_ratio(f"time, breakeven / {better} (best of the others)", seconds["breakeven"], seconds[better], "none")


def fairness(seeds: range) -> None:
    """What a modest client gets beside a greedy one."""
    for name in ("chunked", "fair"):
        records = [run("fairness", seed, f"scheduler={name}") for seed in seeds]
        for client in ("modest", "greedy"):
            groups = [record["service"]["clients"][client] for record in records]
            say_mean(f"{name}, {client}: p90 TTFT", [group["ttft_s"]["p90"] for group in groups], " s")
            say_mean(f"{name}, {client}: in time", [100 * group["attainment"] for group in groups], " %")


EXPERIMENTS: dict[str, Callable[[range], None]] = {
    function.__name__: function
    for function in (batching, interference, goodput, preemption, prediction, sessions, fairness)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)}; none: all")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    unknown = set(arguments.experiments) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    logging.disable(logging.WARNING)  # requests cut to max_model_len, refused ones: counted in the figures
    for name in arguments.experiments or EXPERIMENTS:
        print(f"{name}: {(EXPERIMENTS[name].__doc__ or '').strip()}", flush=True)
        EXPERIMENTS[name](range(arguments.seeds))


if __name__ == "__main__":
    main()
