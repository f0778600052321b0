"""``python -m core.serve [group=option ...] [field=value ...]``, also installed as ``quire``.

``--help`` lists every option. Exit codes: 0 ok, 1 engine or plugin fault, 2 bad input, 3 a job of a sweep failed, 130 and 143
SIGINT and SIGTERM before a server serves (afterwards they end it with 0) or during another frontend's run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from core.types import ConfigError, QuireError

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Hydra's variable: with it, its errors come to us as exceptions; a person who sets it wants to see tracebacks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code."""
    try:
        with _terminable():
            return _main(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like SIGINT, so that temporary files go and the engine is closed. A server that serves handles both itself."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _main(arguments: Sequence[str] | None) -> int:
    from hydra.core.hydra_config import HydraConfig

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    full = os.environ.get(FULL_ERROR) == "1"
    before = sys.argv, os.environ.get(FULL_ERROR), HydraConfig.instance().cfg
    sys.argv = ["quire", *sorted(arguments, key=_is_override)]  # flags may stand anywhere, also between overrides
    os.environ[FULL_ERROR] = "1"
    try:
        return _run(arguments, full)
    finally:
        sys.argv, HydraConfig.instance().cfg = before[0], before[2]
        if before[1] is None:
            del os.environ[FULL_ERROR]


def _run(arguments: list[str], full: bool) -> int:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from core import app, config
    from core.discovery import discover

    try:
        if not {"--help", "-h"} & set(arguments):
            discover().require_no_clash()
            _name_broken_plugins()
        app.run()
    except app.Ended as end:
        return _fail(end.error, full)
    except SystemExit as end:
        if end.code == 2:  # Hydra's parser has said which word it does not know
            print("options are name=value, without dashes: frontend.port=8080; --help lists them", file=sys.stderr)
        raise
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        overrides = [word for word in arguments if _is_override(word)]
        return _fail(config.explain(error, overrides), full)
    except Exception as error:
        return _fail(error, full)
    return 0


def _is_override(word: str) -> bool:
    return word.startswith(("~", "+")) or ("=" in word and not word.startswith("-"))


def _name_broken_plugins() -> None:
    from core.discovery import discover

    for broken in discover().broken:
        print(f"warning: plugin not loaded: {broken}", file=sys.stderr)


def _fail(error: Exception, full: bool) -> int:
    """Say what went wrong: one line for what a person can mend, a traceback for a fault of ours."""
    known = isinstance(error, QuireError)
    if full or not known:
        traceback.print_exception(error)
    print(f"error: {error}" if known else f"error: {type(error).__name__}: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
