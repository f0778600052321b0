"""A file of JSON lines that only grows: what a killed run finished is kept, and no line is there twice.

A line is one ``write`` to a descriptor in append mode, so a process that dies leaves whole lines; a machine that dies may leave less
than was written in the last ``SYNC_S`` seconds, and a torn end. The end is mended when the file is opened again. A disk that
fills up leaves whole lines too: what was written of the last one is taken back.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import orjson

from core.types import ConfigError

SYNC_S = 1.0
"""Longest time that a finished line is not yet on the disk, while lines are written."""


class ResultLines:
    """Results by ``custom_id``, and by line number where a line of the input was no request."""

    def __init__(self, path: str):
        """Open or create a file, alone; ``ConfigError`` when it cannot be had or holds something else."""
        self._path = path
        self._ids: set[str] = set()
        self._numbers: set[int] = set()
        self._fd = _open(path)
        try:
            self._size = self._read()
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced_s = time.monotonic()

    def __enter__(self) -> ResultLines:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def has_id(self, custom_id: str) -> bool:
        """Whether there is an answer, or a failure, for a request."""
        return custom_id in self._ids

    def has_line(self, number: int) -> bool:
        """Whether a line of the input was found to be no request before."""
        return number in self._numbers

    def append(self, line: bytes) -> None:
        """Write one line. ``OSError`` when it cannot be written whole, and then nothing of it is left."""
        data = line + b"\n"
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        if time.monotonic() - self._synced_s > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Everything written is on the disk."""
        os.fsync(self._fd)
        self._synced_s = time.monotonic()

    def _read(self) -> int:
        """Learn what is there; gives the bytes of whole lines."""
        size = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # the part that a kill left
                    break
                self._learn(number, line)
                size += len(line)
        return size

    def _learn(self, number: int, line: bytes) -> None:
        try:
            result: Any = orjson.loads(line)
            error = result["error"]
            if error is None:
                self._ids.add(_string(result["custom_id"]))
            else:
                self._numbers.add(int(error["line"]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as problem:
            raise ConfigError(
                f"frontend.output={self._path}: line {number} is no result of a batch; name another file or remove the line"
            ) from problem


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


def _open(path: str) -> int:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"frontend.output={path} cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"frontend.output={path} is being written by another run") from error
    return descriptor
