"""The index of free runs against a look at every block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.allocators.runs import FreeRuns, as_runs

BLOCKS = 13


def brute(free: set[int], n: int, fit: str) -> int | None:
    holes = [(start, length) for start, length in as_runs(sorted(free)) if length >= n]
    if not holes:
        return None
    return min(holes, key=lambda hole: (hole[1], hole[0]) if fit == "best" else hole)[0]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_holes_are_found_as_a_search_of_all_blocks_finds_them(data: st.DataObject) -> None:
    free = set(data.draw(st.sets(st.integers(0, BLOCKS - 1))))
    runs = FreeRuns(BLOCKS, free)
    for _ in range(data.draw(st.integers(1, 12))):
        n, fit = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(["first", "best"]))
        start = runs.find(n, fit)
        assert start == brute(free, n, fit)
        held = sorted(set(range(BLOCKS)) - free)
        if start is not None and data.draw(st.booleans()):
            start += data.draw(st.integers(0, 1)) if start + n in free else 0  # also out of the middle of a hole
            runs.remove(start, n)
            free -= set(range(start, start + n))
        elif held:
            first, length = data.draw(st.sampled_from(as_runs(held)))
            runs.add(first, length)
            free |= set(range(first, first + length))
        assert runs.holes() == as_runs(sorted(free))
        assert runs.shorter_than(3) == sum(length for _, length in runs.holes() if length < 3)


def test_best_fit_leaves_the_large_hole_where_first_fit_cuts_it() -> None:
    for fit, start in (("first", 0), ("best", 5)):
        assert FreeRuns(8, {0, 1, 2, 3, 5, 6}).find(2, fit) == start


def test_holes_that_fit_one_after_the_other_are_named_and_nothing_is_taken() -> None:
    runs = FreeRuns(8, {0, 1, 2, 4, 5, 6, 7})
    assert runs.find_all([3, 2, 2, 2]) == [0, 4, 6]
    assert runs.holes() == [(0, 3), (4, 4)]
