"""The engine's random numbers are a fixed function of (seed, branch, position)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.uniform import uniform, uniforms

words = st.integers(-(2**63), 2**64 - 1)


@pytest.mark.parametrize(
    ("triple", "value"),
    [((0, 0, 0), 0.13870941014555427), ((42, 0, 7), 0.6424233675512125), ((2**63, 3, 100), 0.6526648550291351)],
)
def test_values_are_pinned(triple, value):
    """Changing the hash changes every seeded output."""
    assert uniform(*triple) == value


@given(triples=st.lists(st.tuples(words, words, words), min_size=1, max_size=20))
def test_vectorised_equals_scalar(triples):
    expected = [uniform(*triple) for triple in triples]
    assert uniforms(*zip(*triples, strict=True)).tolist() == expected


def test_arrays_are_accepted_as_they_are():
    positions = np.arange(5, dtype=np.int32)
    zeros = np.zeros(5, dtype=np.int64)
    assert uniforms(zeros, zeros, positions).tolist() == [uniform(0, 0, i) for i in range(5)]


@given(seed=words, branch=words, position=words)
def test_range(seed, branch, position):
    assert 0.0 <= uniform(seed, branch, position) < 1.0


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_integer_alone_gives_even_numbers(axis):
    """20,000 neighbours along one axis: mean, spread, and neighbours that have nothing to do with each other."""
    count = 20_000
    columns = [np.full(count, 3), np.full(count, 5), np.full(count, 7)]
    columns[axis] = np.arange(count)
    drawn = uniforms(*columns)
    assert abs(drawn.mean() - 0.5) < 0.01
    assert abs(drawn.var() - 1 / 12) < 0.003
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03
    assert np.abs(np.histogram(drawn, bins=20, range=(0, 1))[0] - count / 20).max() < 170


def test_the_three_integers_are_not_interchangeable():
    assert len({uniform(1, 2, 3), uniform(1, 3, 2), uniform(2, 1, 3), uniform(3, 2, 1)}) == 4
