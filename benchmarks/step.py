"""A decode step of the whole engine against its floor on this machine.

    python -m benchmarks.step --batch 8 [--context 64] [--threads 2] [--repeat 5] [--clock wall] [group=option ...]

The floor is the sum of two phases, which alternate: the weights through all linear layers and the K and V of all
sequences, each the larger of bytes over the read bandwidth and operations over torch's rate for a large product. Both
rates are measured in every turn, beside ten steps of the engine. The prompt is random tokens, greedy. Further words are
overrides of the engine, such as `linears=torch kernel=torch`. Last line: `over_floor: X`.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch

from benchmarks.timing import Run, add_arguments, gemm_run, ratio, read_run, set_up, take_turns
from core.config import compose
from core.engine import Engine
from core.start import start
from core.types import SamplingParams

STEPS = 10


def engine_in_decode(args: argparse.Namespace) -> Engine:
    """An engine with ``batch`` sequences of ``context`` tokens, all of which decode."""
    total = args.context + STEPS * (args.repeat + 2)
    blocks = args.batch * -(-total // 16) + 1
    fixed = ["executor=torch", "cache.block_size=16", f"cache.num_blocks={max(blocks, 64)}", "cache.swap_gb=0"]
    fixed += ["cost.link_bytes_per_s=1e10", "cost.prefill_flop_per_s=1e11", f"num_threads={args.threads}"]
    engine = start(compose([*fixed, f"max_num_seqs={args.batch}", *args.overrides]), say=print).engine
    params = SamplingParams(max_tokens=total, temperature=0.0, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(0)
    for _ in range(args.batch):
        engine.submit(rng.integers(3, engine.model.vocab_size, args.context).tolist(), params)
    while engine.step().num_sampled < args.batch:
        pass
    return engine


def floor_seconds(
    engine: Engine, batch: int, context: int, bytes_per_s: float, flop_per_s: float
) -> tuple[float, float]:
    """Least seconds of the linear layers and of attention for one token of each of ``batch`` sequences."""
    model = engine.model
    weights = 4 * model.num_parameters
    linear = max(weights / bytes_per_s, 2 * model.num_parameters * batch / flop_per_s)
    flop = 4 * model.num_layers * model.num_heads * model.head_dim * context * batch
    return linear, max(model.kv_bytes_per_token * context * batch / bytes_per_s, flop / flop_per_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=64, help="tokens of each sequence when measuring starts")
    add_arguments(parser, repeat=5)
    parser.add_argument("overrides", nargs="*", help="overrides of the engine, such as linears=torch")
    args = parser.parse_intermixed_args()
    set_up(args)
    engine = engine_in_decode(args)
    stages: dict[str, float] = {}

    def steps() -> None:
        for _ in range(STEPS):
            for stage, seconds in engine.step().stage_seconds.items():
                stages[stage] = stages.get(stage, 0.0) + seconds

    (read, read_bytes), (gemm, gemm_flop) = read_run(), gemm_run()
    runs: dict[str, Run] = {"read": read, "gemm": gemm, "steps": steps}
    with torch.inference_mode():
        seconds = take_turns(runs, args.repeat, args.clock)
    mean_context = args.context + STEPS * (args.repeat + 2) // 2
    floors = [
        floor_seconds(engine, args.batch, mean_context, read_bytes / r, gemm_flop / g)
        for r, g in zip(seconds["read"], seconds["gemm"], strict=True)
    ]
    step = [each / STEPS for each in seconds["steps"]]
    over = ratio(step, [sum(floor) for floor in floors])
    linear, attention = (statistics.median(floor[i] for floor in floors) * 1e3 for i in (0, 1))
    rates = f"{read_bytes / statistics.median(seconds['read']) / 1e9:.1f} GB/s, "
    rates += f"{gemm_flop / statistics.median(seconds['gemm']) / 1e9:.0f} GFLOP/s"
    total = sum(stages.values())
    shares = ", ".join(f"{stage} {100 * each / total:.1f} %" for stage, each in stages.items() if each > total / 1000)
    print(
        f"{rates}; floor {linear:.1f} ms linear + {attention:.1f} ms attention; step {statistics.median(step) * 1e3:.1f} ms"
    )
    print(f"share of a step by the wall clock: {shares}")
    engine.close()
    print(f"over_floor: {over:.3f}")


if __name__ == "__main__":
    main()
