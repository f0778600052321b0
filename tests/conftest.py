"""For all tests: the C++ of kernel=cpu is built once, in the user's cache folder, not anew in every test's own; properties
draw the same examples whatever other tests have imported; servers that tests start can be interrupted, also where the tests
run in the background of a shell, which then ignores interrupts and hands that down."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from core.conformance.draws import same_draws
from core.fetch import cache_dir

os.environ.setdefault("QUIRE_KERNELS", str(cache_dir() / "kernels"))
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def examples_that_do_not_depend_on_imports() -> Iterator[None]:
    with same_draws():
        yield
