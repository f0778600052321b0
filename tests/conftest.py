"""For all tests: the C++ of kernel=cpu is built once, in the user's cache folder, not anew in every test's own; properties
draw the same examples whatever other tests have imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from core.conformance.draws import same_draws
from core.fetch import cache_dir

os.environ.setdefault("QUIRE_KERNELS", str(cache_dir() / "kernels"))


@pytest.fixture(scope="session", autouse=True)
def examples_that_do_not_depend_on_imports() -> Iterator[None]:
    with same_draws():
        yield
