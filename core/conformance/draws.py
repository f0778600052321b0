"""The same examples in every run, whatever else the process has imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis.internal.conjecture import providers


@contextmanager
def same_draws() -> Iterator[None]:
    """Hypothesis does not mix constants from the modules loaded so far into what it draws.

    It collects them from ``sys.modules`` even when derandomized: a case would then see other examples alone than in a
    suite, and others again on another worker of pytest-xdist.
    """
    collect = getattr(providers, "_get_local_constants", None)
    if collect is None:  # before Hypothesis 6.131 there were none
        yield
        return
    nothing = providers.Constants()
    providers._get_local_constants = lambda: nothing
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        providers._get_local_constants = collect
        providers.CONSTANTS_CACHE.cache.clear()
