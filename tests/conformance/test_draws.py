"""A case sees the same examples in every run: alone, in a suite, on any worker."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from core.conformance.machine import run_machine
from core.conformance.subject import Subject
from core.conformance.toy import Work

SUBJECT = Subject("allocator", "paged", examples=40)
NUMBERS = st.lists(st.integers(0, 10_000))


def imported(constants: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if modules with these numbers in them had been loaded."""
    found = providers.Constants(integers=providers.SortedSet(constants))
    monkeypatch.setattr(providers, "_get_local_constants", lambda: found)
    providers.CONSTANTS_CACHE.cache.clear()


def drawn(how: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is drawn after imports of one kind and after another."""
    seen: list[Any] = []

    def check(numbers: list[int]) -> None:
        seen.append(numbers)

    submit = Work.submit

    def noted(work: Work, engine: Any) -> int:
        seen.append(work)
        return submit(work, engine)

    monkeypatch.setattr(Work, "submit", noted)
    runs = []
    for constants in (range(0), range(7, 300, 3)):
        imported(constants, monkeypatch)
        if how == "hypothesis alone":
            SUBJECT.settings()(given(numbers=NUMBERS)(check))()
        elif how == "property":
            SUBJECT.holds(check, numbers=NUMBERS)
        else:
            run_machine(SUBJECT, lambda work, sizes: False, share=0.2)
        runs.append(seen.copy())
        seen.clear()
    return runs


@pytest.mark.parametrize("how", ["property", "machine"])
def test_examples_do_not_depend_on_what_is_imported(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = drawn(how, monkeypatch)
    assert one == other and len(one) > 20


def test_hypothesis_alone_draws_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for core.conformance.draws: when this fails it can go."""
    one, other = drawn("hypothesis alone", monkeypatch)
    assert one != other
