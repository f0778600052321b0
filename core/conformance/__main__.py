"""``python -m core.conformance --allocator NAME ...``: proves an option by the cases of its kind; ``--help`` says how.

Exit codes: 0 the option conforms, 1 it does not, 2 bad input (nothing named, an unknown name, a broken plugin, nothing ran).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from core.fetch import cache_dir

HERE = Path(__file__).resolve().parent
NEEDS = ("pytest", "hypothesis")
HELP = """\
Proves that an allocator, scheduler, preemption or kernel keeps its contract: the cases that every shipped one passes.

python -m core.conformance --allocator NAME [option ...] [field=value ...]

  --allocator NAME     what to prove; also --scheduler, --preemption, --kernel
  --config-dir FOLDER  your YAML files (FOLDER/allocator/NAME.yaml), for what is not packaged yet
  --trust MODULE       a module of your own whose classes may be built
  field=value          an option of it, as in core.serve: allocator.group=8 (also --override field=value)
  --examples N         random examples of each property (default 100); more find rarer faults
  --shrink             look for the smallest example that fails; may take minutes
  --known CASE=REASON  a case that is meant to fail, and why: --known no_request_starves="newest first"
  --device DEVICE      cpu or cuda, for kernels (default: cuda where there is one)
  -k WORDS             only the cases with these words in their name (any other option of pytest works too)

Example, for my/allocator/mine.yaml and mine.py in this folder:
  python -m core.conformance --allocator mine --config-dir my --trust mine

Exit codes: 0 it conforms, 1 it does not, 2 bad input or nothing ran."""
TAKE_A_VALUE = ("--known", "--override", "-k", "-m", "-o", "-p", "-W")
"""Options whose value may hold a ``=`` and is no override."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit for a command line; gives the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"--help", "-h"} & set(arguments):
        print(HELP)
        return 0
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: the conformance kit needs {' and '.join(missing)}: pip install 'quire[test]'", file=sys.stderr)
        return 2
    import pytest

    sys.path.insert(0, "")  # a module in the current folder, also when started by another name
    os.environ.setdefault(
        "HYPOTHESIS_STORAGE_DIRECTORY", str(cache_dir() / "hypothesis")
    )  # nothing is left in the current folder
    words: list[str] = []
    for word in arguments:
        is_override = "=" in word and not word.startswith("-") and not (words and words[-1] in TAKE_A_VALUE)
        words += ["--override", word] if is_override else [word]
    own = [
        "-c",
        str(HERE / "pytest.ini"),
        "--rootdir",
        str(HERE),
        "-p",
        "core.conformance.plugin",
        "-p",
        "no:cacheprovider",
    ]
    quiet = ["--quire-lines", "-q", "--tb=no", "-r", "N", "-p", "no:randomly"]
    code = pytest.main([*own, *quiet, str(HERE), *words])
    return {0: 0, 1: 1}.get(int(code), 2)


if __name__ == "__main__":
    sys.exit(main())
