"""A decode step of the whole engine against its floor on this machine.

    python -m benchmarks.step --batch 8 [--context 64] [--threads 2] [--repeat 5] [--clock wall] [group=option ...]
    python -m benchmarks.step --prefill 1024 [max_num_batched_tokens=1024 ...]

The floor is the sum of two phases, which alternate: the weights through all linear layers and the K and V of all
sequences, each the larger of bytes over the read bandwidth and operations over torch's rate for a large product. Both
rates are measured in every turn, beside ten steps of the engine. The prompt is random tokens, greedy. Further words are
overrides of the engine, such as `linears=torch kernel=torch`. With --prefill the same for one prompt, whose floor is all
operations over that rate, the head's for one row.

Weights count in float32, which is what other engines read for the same values. Where they are kept in fewer bits
(`linears=packed`, the form `compact`) a step can be faster than that, so `over_stored_floor: X` compares with the bytes that
are read indeed; `linears=packed linears.forms=[packed]` keeps floats. Last line: `over_floor: X`.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.timing import Run, add_arguments, gemm_run, ratio, read_run, set_up, take_turns
from core.config import compose
from core.engine import Engine
from core.start import start
from core.types import SamplingParams

STEPS = 10


def make_engine(args: argparse.Namespace, batch: int, tokens: int) -> Engine:
    """An engine for ``batch`` sequences of up to ``tokens`` tokens each."""
    blocks = batch * -(-tokens // 16) + 1
    fixed = ["executor=torch", "cache.block_size=16", f"cache.num_blocks={max(blocks, 64)}", "cache.swap_gb=0"]
    fixed += ["cost.link_bytes_per_s=1e10", "cost.prefill_flop_per_s=1e11", f"num_threads={args.threads}"]
    return start(compose([*fixed, f"max_num_seqs={batch}", *args.overrides]), say=print).engine


def submit(engine: Engine, count: int, prompt_tokens: int, max_tokens: int) -> None:
    """Random prompts, greedy."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(0)
    for _ in range(count):
        engine.submit(rng.integers(3, engine.model.vocab_size, prompt_tokens).tolist(), params)


def decode_turns(args: argparse.Namespace) -> tuple[Engine, Run, int]:
    """An engine with ``batch`` sequences that all decode, some steps of it, and how many."""
    total = args.context + STEPS * (args.repeat + 2)
    engine = make_engine(args, args.batch, total)
    submit(engine, args.batch, args.context, total)
    while engine.step().num_sampled < args.batch:
        pass

    def run() -> None:
        for _ in range(STEPS):
            engine.step()

    return engine, run, STEPS


def prefill_turns(args: argparse.Namespace) -> tuple[Engine, Run, int]:
    """An engine, and one prompt through it up to its first token."""
    engine = make_engine(args, 1, args.prefill + 1)

    def run() -> None:
        submit(engine, 1, args.prefill, 1)
        while engine.step().num_sampled < 1:
            pass

    return engine, run, 1


def floor_seconds(
    engine: Engine, weight_bytes: int, batch: int, context: int, bytes_per_s: float, flop_per_s: float
) -> tuple[float, float]:
    """Least seconds of the linear layers and of attention for one token of each of ``batch`` sequences."""
    model = engine.model
    linear = max(weight_bytes / bytes_per_s, 2 * model.num_parameters * batch / flop_per_s)
    flop = 4 * model.num_layers * model.num_heads * model.head_dim * context * batch
    return linear, max(model.kv_bytes_per_token * context * batch / bytes_per_s, flop / flop_per_s)


def prefill_floor_seconds(engine: Engine, tokens: int, flop_per_s: float) -> tuple[float, float]:
    """Least seconds of the linear layers and of attention for a prompt of ``tokens`` tokens with one row of logits."""
    model = engine.model
    head = model.vocab_size * model.hidden_size  # tied to the embedding: of the parameters, it is not in the body
    linear = 2 * ((model.num_parameters - head) * tokens + head)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * tokens * (tokens + 1)
    return linear / flop_per_s, attention / flop_per_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=64, help="tokens of each sequence when measuring starts")
    parser.add_argument(
        "--prefill", type=int, default=0, help="tokens of one prompt to measure instead of decode steps"
    )
    add_arguments(parser, repeat=5)
    parser.add_argument("overrides", nargs="*", help="overrides of the engine, such as linears=torch")
    args = parser.parse_intermixed_args()
    set_up(args)
    engine, turn, num_steps = prefill_turns(args) if args.prefill else decode_turns(args)
    (read, read_bytes), (gemm, gemm_flop) = read_run(), gemm_run()
    runs: dict[str, Run] = {"read": read, "gemm": gemm, "steps": turn}
    with torch.inference_mode():
        seconds = take_turns(runs, args.repeat, args.clock)
    mean_context = args.context + STEPS * (args.repeat + 2) // 2
    rates = [(read_bytes / r, gemm_flop / g) for r, g in zip(seconds["read"], seconds["gemm"], strict=True)]
    step = [each / num_steps for each in seconds["steps"]]

    def floors_of(weight_bytes: int) -> list[tuple[float, float]]:
        if args.prefill:
            return [prefill_floor_seconds(engine, args.prefill, flop) for _, flop in rates]
        return [floor_seconds(engine, weight_bytes, args.batch, mean_context, read, flop) for read, flop in rates]

    floors = floors_of(4 * engine.model.num_parameters)
    executor: Any = engine.executor
    stored = getattr(executor._need_model().model, "weight_bytes", 4 * engine.model.num_parameters)
    over, over_stored = (ratio(step, [sum(floor) for floor in each]) for each in (floors, floors_of(stored)))
    linear, attention = (statistics.median(floor[i] for floor in floors) * 1e3 for i in (0, 1))
    speeds = f"{read_bytes / statistics.median(seconds['read']) / 1e9:.1f} GB/s, "
    speeds += f"{gemm_flop / statistics.median(seconds['gemm']) / 1e9:.0f} GFLOP/s"
    what = f"prefill of {args.prefill} tokens" if args.prefill else "step"
    floor = f"floor {linear:.1f} ms linear + {attention:.1f} ms attention"
    print(f"{speeds}; {floor}; {what} {statistics.median(step) * 1e3:.1f} ms")
    engine.close()
    if not args.prefill:  # its floor has no bytes in it
        print(f"{stored / 1e6:.0f} MB of weights are kept; over_stored_floor: {over_stored:.3f}")
    print(f"over_floor: {over:.3f}")


if __name__ == "__main__":
    main()
