"""For all tests: the C++ of kernel=cpu is built once, in the user's cache folder, not anew in every test's own."""

from __future__ import annotations

import os

from core.fetch import cache_dir

os.environ.setdefault("QUIRE_KERNELS", str(cache_dir() / "kernels"))
