"""The engine's random numbers: one uniform number for each (seed, branch, position), by an integer hash.

A sampled token therefore depends on nothing but its request's seed, which branch of the request it is in, and its
place in the sequence: not on the batch, the place in the batch, the step, a preemption, or any generator's state.

The hash is three rounds of the splitmix64 finaliser, one for each integer, over 64-bit words. It is fixed: changing it
changes every seeded output, so tests pin some values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def _mix(word: int) -> int:
    """The splitmix64 finaliser: a bijection of 64-bit words in which every input bit moves about half of the output
    bits.
    """
    word = ((word ^ (word >> 30)) * _MUL_1) & _MASK
    word = ((word ^ (word >> 27)) * _MUL_2) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, branch: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same three integers. Integers are taken modulo 2**64."""
    word = 0
    for value in (seed, branch, position):
        word = _mix(((word ^ (value & _MASK)) + _STEP) & _MASK)
    return (word >> 11) * 2.0**-53


def _mix_array(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MUL_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MUL_2)
    return words ^ (words >> np.uint64(31))


def _words(values: Sequence[int] | np.ndarray) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values.astype(np.uint64)
    return np.fromiter((int(value) & _MASK for value in values), dtype=np.uint64, count=len(values))


def uniforms(
    seeds: Sequence[int] | np.ndarray, branches: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray
) -> np.ndarray:
    """``uniform`` for each of S triples: float64 [S] in [0, 1), equal to the scalar function bit by bit."""
    word = np.zeros(len(seeds), dtype=np.uint64)
    for values in (seeds, branches, positions):
        word = _mix_array((word ^ _words(values)) + np.uint64(_STEP))  # arrays of uint64 wrap around without a warning
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
