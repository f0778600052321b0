"""All linear layers of one decode step, in every form of ``plugins/kernels/linears.py``, against their floor.

    python -m benchmarks.linears [--weights file|bfloat16|random] [--rows 1 8 32 128] [--threads 2] [--repeat 5] [--clock wall]

The shapes are SmolLM2-135M's: 30 layers and the head, float32. Each form has weights of its own for every layer, as in a
run, so that they come from memory. Their values are those of a quantised file (4 bits, the head 8: what the default model
is loaded from), of a bfloat16 checkpoint, or any; `compact` keeps the first two in fewer bytes. The floor is the larger of
float32 weights over the read bandwidth and of the operations over torch's rate for a large product, both measured in the
same turn; what reads fewer bytes can be below it. Last line: `over_floor: X`, of the fastest form at the last number of rows.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.timing import Run, add_arguments, gemm_run, ratio, read_run, set_up, take_turns
from plugins.kernels.linears import FORMS, Inexact, available

LAYER = {"q+k+v": (960, 576), "o": (576, 576), "gate+up": (3072, 576), "down": (576, 1536)}
HEAD = (49152, 576)
NUM_LAYERS = 30


def weight_of(shape: tuple[int, int], kind: str) -> torch.Tensor:
    """A random weight [N, K] whose values a file of this kind can hold."""
    if kind == "random":
        return torch.randn(shape)
    if kind == "bfloat16":
        return torch.randn(shape).bfloat16().float()
    blocks = torch.randn(shape).view(-1, 32)  # inputs that share a grid: Q8_0's for the head, Q4_1's for the others
    if shape == HEAD:
        unit = (blocks.abs().amax(1, keepdim=True) / 127).half().float()
        return ((blocks / unit).round().clamp(-127, 127) * unit).view(shape)
    low = blocks.amin(1, keepdim=True).half().float()
    unit = ((blocks.amax(1, keepdim=True) - low) / 15).half().float()
    return (((blocks - low) / unit).round().clamp(0, 15) * unit + low).view(shape)


def step_run(form: str, rows: int, weights: list[torch.Tensor]) -> Run:
    """One product with each weight [N, K], in turn."""
    linears = [FORMS[form](weight, None) for weight in weights]
    inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in weights}
    outs = {len(weight): torch.empty(rows, len(weight)) for weight in weights}
    pairs = [(linear, inputs[w.shape[1]], outs[len(w)]) for linear, w in zip(linears, weights, strict=True)]

    def run() -> None:
        for linear, x, out in pairs:
            linear(x, out)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=["file", "bfloat16", "random"], default="file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    add_arguments(parser, repeat=5)
    args = parser.parse_args()
    set_up(args)
    forms, reasons = available(list(FORMS))
    print(*reasons, sep="\n", end="\n" if reasons else "")
    shapes = [*list(LAYER.values()) * NUM_LAYERS, HEAD]
    weights = [weight_of(shape, args.weights) for shape in shapes]
    floats = sum(weight.numel() for weight in weights)
    (read, read_bytes), (gemm, gemm_flop) = read_run(), gemm_run()
    least = float("nan")
    print(f"{floats * 4 / 1e6:.0f} MB of weights, {args.threads} threads, ms a step by the {args.clock} clock")
    with torch.inference_mode():
        for rows in args.rows:
            runs: dict[str, Run] = {"read": read, "gemm": gemm}
            for form in forms:
                try:
                    runs[form] = step_run(form, rows, weights)
                except Inexact as error:
                    print(f"{form}: {error}")
            timed = [form for form in forms if form in runs]
            seconds = take_turns(runs, args.repeat, args.clock)
            floor = [
                max(floats * 4 / read_bytes * r, 2 * rows * floats / gemm_flop * g)
                for r, g in zip(seconds["read"], seconds["gemm"], strict=True)
            ]
            over = {form: ratio(seconds[form], floor) for form in timed}
            times = ", ".join(
                f"{form} {statistics.median(seconds[form]) * 1e3:.1f} ({over[form]:.2f}x)" for form in timed
            )
            print(f"{rows:4} rows: floor {statistics.median(floor) * 1e3:.1f}, {times}")
            least = min(over.values())
    print(f"over_floor: {least:.3f}")


if __name__ == "__main__":
    main()
