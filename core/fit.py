"""From measured steps to a machine's overheads and attention rates: non-negative least squares on relative error. No torch.

A measured step takes the time of its linear layers and head, measured by themselves as curves over rows (``curves``), and

    step_overhead + sequence_overhead x sequences + token_overhead x tokens
    + decode KV tokens x seconds a token + prefill squares x seconds a square

whose five coefficients are fitted together. None may be negative: a negative overhead would pay for a step elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np

from core.arithmetic import Machine, Shape, StepModel, Work

NEVER_S = 1e-15
"""Seconds a token or square where the fit found none: too short to matter, and a rate stays a number."""


Curve = list[tuple[float, float]]  # (rows, FLOP/s)


@attrs.frozen
class Point:
    """One kind of step and how long it took."""

    work: Work
    seconds: float


def nnls(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x >= 0 [n] that minimises |matrix @ x - wanted|, for few columns: the best of all subsets that solve without a sign error.

    The optimum of the constrained problem is the unconstrained one on its own support, so trying every support finds it.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(wanted @ wanted)
    for size in range(1, columns + 1):
        for support in itertools.combinations(range(columns), size):
            part = matrix[:, support]
            found, *_ = np.linalg.lstsq(part, wanted, rcond=None)
            if (found < 0).any():
                continue
            error = float(((part @ found - wanted) ** 2).sum())
            if error < least * (1 - 1e-12):
                best, least = np.zeros(columns), error
                best[list(support)] = found
    return best


def curves(shape: Shape, alone: Sequence[Point]) -> tuple[Curve, Curve]:
    """FLOP/s of the layers and of the head by rows, from steps without attention.

    Steps of one sequence of r tokens sample one row: they give the layers, once the head is taken off, which is what a step
    of one token that samples nothing does without (the head, and what else only sampled rows pass). Steps of r sequences of
    one token sample r rows: what they take beyond the former is the head's. More rows never take less time in either curve:
    what says so is noise.
    """
    seconds = {point.work.tokens: point.seconds for point in alone if point.work.rows == 1}
    bare = next(point.seconds for point in alone if point.work.rows == 0)
    head_s = max(seconds[1] - bare, seconds[1] / 100)
    sampled = {point.work.rows: point.seconds for point in alone if point.work.rows > 1}
    layers = {rows: max(took - head_s, took / 4) for rows, took in seconds.items()}
    heads = {1: head_s} | {rows: head_s + took - seconds[rows] for rows, took in sampled.items()}
    return _rates(layers, 2 * shape.body_parameters), _rates(heads, 2 * shape.head_parameters)


def _rates(seconds: dict[int, float], flop: int) -> Curve:
    """(rows, FLOP/s), rows ascending, seconds not falling; ``flop`` a row."""
    rows = sorted(seconds)
    slowest = itertools.accumulate((seconds[r] for r in rows), max)
    return [(float(r), flop * r / took) for r, took in zip(rows, slowest, strict=True)]


def fit(shape: Shape, machine: Machine, points: Sequence[Point]) -> Machine:
    """``machine`` (its linear layers' rates known, no overheads yet) with the overheads and attention rates that fit best."""
    bare = StepModel(shape, attrs.evolve(machine, step_overhead_s=0.0, sequence_overhead_s=0.0, token_overhead_s=0.0))
    phases = [bare.phases(point.work) for point in points]
    seconds = np.array([point.seconds for point in points])
    left = seconds - np.array([phase.linear + phase.head for phase in phases])
    features = np.array(
        [[1, p.work.sequences, p.work.tokens, p.work.decode_kv, p.work.prefill_squares] for p in points], float
    )
    # relative errors: a long step must not outweigh ten short ones; columns scaled alike, or lstsq loses the small ones
    weighted = features / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    fixed, sequence, token, kv, square = (nnls(weighted / scale, left / seconds) / scale).tolist()
    return attrs.evolve(
        machine,
        step_overhead_s=fixed,
        sequence_overhead_s=sequence,
        token_overhead_s=token,
        attention_bytes_per_s=shape.kv_bytes_per_token() / max(kv, NEVER_S),
        attention_flop_per_s=4 * shape.attention_width / max(square, NEVER_S),
    )


def errors(shape: Shape, machine: Machine, points: Sequence[Point]) -> dict[str, float]:
    """How far the machine's steps lie from the measured ones: median, p90 and worst of |predicted / measured - 1|."""
    steps = StepModel(shape, machine)
    off = np.abs([steps.seconds(point.work) / point.seconds - 1 for point in points])
    return {
        "points": len(points),
        "median": float(np.median(off)),
        "p90": float(np.quantile(off, 0.9)),
        "worst": float(off.max()),
    }
