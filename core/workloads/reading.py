"""Reading traces and prompt files: one row at a time, so memory does not grow with a file; a bad row named with its line.

``TraceFile`` has the options that every file has and turns rows into requests. A format is a subclass with two methods:
``_records`` gives (line, record) and ``_row`` makes a ``Row`` of a record, raising ``BadRow`` for one that is wrong and
``LeftOut`` for one that is right but no request (a failed one).
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import attrs
import numpy as np

from core.types import ConfigError, SamplingParams
from core.workloads import WorkloadRequest
from core.workloads.draws import (
    arrival_times,
    concurrency,
    flag,
    hashed_tokens,
    integer,
    number,
    one_of,
    plain,
    require_room,
    trace_arrivals,
)

log = logging.getLogger(__name__)

MAX_CHARS = 32 * 2**20
"""Longest line or JSON element that is read: a file that is not what it should be must not fill the memory."""
CHUNK_CHARS = 2**16
MAX_IN_FLIGHT = 1024
"""A closed loop's concurrency where none is given: more would only wait in the engine's queue, in memory."""


class BadRow(ValueError):
    """A row that is not what the format says. The message is the reason alone."""


class LeftOut(Exception):
    """A good row that is no request; counted by this reason."""


@attrs.frozen(slots=True, kw_only=True)
class Row:
    """One request of a file."""

    num_output: int  # tokens, as recorded
    num_prompt: int | None = None  # tokens to make up, or
    prompt: Sequence[int] | None = None  # the tokens
    time_s: float | None = None  # as the file counts
    max_tokens: int | None = None  # None: num_output
    session_id: str = ""
    label: str = ""
    fields: dict[str, Any] = attrs.field(factory=dict)  # others of WorkloadRequest


def trace() -> dict[str, Any]:
    return {"kind": "trace"}


def _is_path(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"workload.path must be the path of a file, got {value!r}")
    if not os.path.isfile(os.path.expanduser(value)):
        raise ConfigError(
            f"workload.path={value}: there is no such file ({os.path.abspath(os.path.expanduser(value))})"
        )


def _bounded(instance: TraceFile, attribute: attrs.Attribute, value: int | None) -> None:
    concurrency(instance, attribute, value)
    if instance.limit is None and instance.arrivals["kind"] == "burst":
        raise ConfigError("workload.arrivals.kind=burst would send the whole file at once: set workload.limit")


@attrs.define(eq=False, kw_only=True, slots=False)
class TraceFile:
    """The options of every file. Lengths are divided by ``scale``, gaps between arrivals by ``speed``."""

    path: str = attrs.field(validator=_is_path)
    limit: int | None = attrs.field(default=None, validator=integer(1, optional=True))  # requests; None: all
    scale: float = attrs.field(default=1, validator=number(0, above=True))
    speed: float = attrs.field(default=1, validator=number(0, above=True))
    arrivals: dict = attrs.field(factory=trace, converter=plain, validator=trace_arrivals)
    concurrency: int | None = attrs.field(default=None, validator=_bounded)
    on_bad_row: str = attrs.field(default="error", validator=one_of("error", "skip"))
    ignore_eos: bool = attrs.field(default=True, validator=flag)  # outputs get exactly the recorded lengths
    seed: int = attrs.field(default=0, validator=integer(0))  # of made-up tokens and arrivals
    skipped: Counter = attrs.field(factory=Counter, init=False)  # rows left out in the newest reading, by reason

    def __attrs_post_init__(self) -> None:
        if self.concurrency is None and self.arrivals["kind"] == "closed":
            self.concurrency = MAX_IN_FLIGHT

    @property
    def num_requests(self) -> int | None:
        """At most so many; None: as many as the file has."""
        return self.limit

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The requests in the file's order. What does not fit ``max_model_len`` is cut; warnings count it and what was left out."""
        require_room(max_model_len)
        return self._requests(vocab_size, max_model_len)

    def _requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        self.skipped.clear()
        kind = self.arrivals["kind"]
        times = None if kind == "trace" else arrival_times(self.arrivals, np.random.default_rng(self.seed))
        clock = _Clock(self.speed)
        num_sent = num_cut = 0
        first_bad = ""
        try:
            for line, record in self._records():
                if num_sent == self.limit:
                    break
                try:
                    row = self._row(record, vocab_size)
                    arrival_s = clock.arrival(row) if times is None else next(times)
                except LeftOut as reason:
                    self.skipped[str(reason)] += 1
                    continue
                except BadRow as reason:
                    what = f"{self._named()} line {line}: {reason}"
                    if self.on_bad_row == "error":
                        raise ConfigError(f"{what}; workload.on_bad_row=skip leaves such rows out") from reason
                    first_bad = first_bad or what
                    self.skipped["bad row"] += 1
                    continue
                num_sent += 1
                num_cut += self._num_tokens(row) > max_model_len or self._num_prompt(row) >= max_model_len
                yield self._request(row, line, arrival_s, vocab_size, max_model_len)
        finally:  # also when the reader is left early
            self._warn(num_cut, max_model_len, first_bad)

    def _warn(self, num_cut: int, max_model_len: int, first_bad: str) -> None:
        if num_cut:
            log.warning("%s: %d requests were cut to max_model_len=%d tokens", self._named(), num_cut, max_model_len)
        if self.skipped:
            counts = ", ".join(f"{num} {reason}" for reason, num in self.skipped.items())
            first = f"; the first bad one: {first_bad}" if first_bad else ""
            log.warning("%s: rows left out: %s%s", self._named(), counts, first)

    def _named(self) -> str:
        return Path(self.path).name

    @staticmethod
    def _num_prompt(row: Row) -> int:
        return len(row.prompt) if row.prompt is not None else row.num_prompt or 0

    def _num_tokens(self, row: Row) -> int:
        return self._num_prompt(row) + (row.max_tokens or row.num_output)

    def _request(
        self, row: Row, line: int, arrival_s: float | None, vocab_size: int, max_model_len: int
    ) -> WorkloadRequest:
        num_prompt = min(self._num_prompt(row), max_model_len - 1)
        room = max_model_len - num_prompt
        prompt = row.prompt
        if prompt is None:
            prompt = hashed_tokens(self.seed, line, num_prompt, vocab_size)
        params = SamplingParams(
            max_tokens=min(row.max_tokens or row.num_output, room),
            temperature=0.0,
            ignore_eos=self.ignore_eos,
            detokenize=False,
        )
        return WorkloadRequest(
            prompt_token_ids=tuple(prompt[:num_prompt]),
            params=params,
            arrival_s=arrival_s,
            recorded_output_tokens=min(row.num_output, room),
            session_id=row.session_id,
            label=row.label,
            **row.fields,
        )

    def scaled(self, tokens: int) -> int:
        """A length divided by ``scale``, at least 1."""
        return max(1, round(tokens / self.scale))

    def _records(self) -> Iterator[tuple[int, Any]]:
        raise NotImplementedError

    def _row(self, record: Any, vocab_size: int) -> Row:
        raise NotImplementedError


class _Clock:
    """Times of a file as seconds after its first row; they must not go back."""

    def __init__(self, speed: float):
        self._speed = speed
        self._first_s: float | None = None
        self._last_s = -math.inf

    def arrival(self, row: Row) -> float:
        if row.time_s is None:
            raise BadRow("it has no time; workload.arrivals.kind=closed | burst | poisson | gamma needs none")
        if row.time_s < self._last_s:
            raise BadRow(f"its time is {self._last_s - row.time_s:g} s before the row above it: sort the file by time")
        self._first_s = row.time_s if self._first_s is None else self._first_s
        self._last_s = row.time_s
        return (row.time_s - self._first_s) / self._speed


# ------------------------------------------------------------------------------------------------ files


@contextmanager
def opened(path: str) -> Iterator[IO[str]]:
    """A text file or a gzipped one (``.gz``), its byte order mark left out. ConfigError when it cannot be read."""
    try:
        if path.endswith(".gz"):
            with gzip.open(os.path.expanduser(path), "rt", encoding="utf-8-sig", newline="") as zipped:
                yield zipped
        else:
            with open(os.path.expanduser(path), encoding="utf-8-sig", newline="") as file:
                yield file
    except (OSError, EOFError) as error:
        raise ConfigError(f"workload.path={path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload.path={path}: is not UTF-8 text: {error.reason}") from error


def numbered_lines(file: IO[str], name: str) -> Iterator[tuple[int, str]]:
    """(line, text) from 1, without line ends; blank lines are passed over. ConfigError for one longer than ``MAX_CHARS``."""
    for at in itertools.count(1):
        line = file.readline(MAX_CHARS)
        if not line:
            return
        if len(line) >= MAX_CHARS:
            raise ConfigError(f"{name} line {at}: longer than {MAX_CHARS:,} characters: it is no file of rows")
        if line.strip():
            yield at, line.rstrip("\r\n")


def csv_records(path: str, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, column -> text) of a CSV file with a header. ConfigError for a header without these columns."""
    name = Path(path).name
    with opened(path) as file:
        lines = numbered_lines(file, name)
        at, header = next(lines, (0, ""))
        names = [each.strip() for each in next(csv.reader([header]), [])]
        missing = [each for each in columns if each not in names]
        if missing:
            shown = ", ".join(names)[:200] or "nothing"
            raise ConfigError(
                f"{name} line {max(at, 1)}: the header has no column {', '.join(missing)}; it must have "
                f"{', '.join(columns)}, it has {shown}"
            )
        for line, text in lines:
            try:
                values = next(csv.reader([text], strict=True))
            except csv.Error as error:
                yield line, {"": str(error)}
                continue
            yield (
                line,
                dict(zip(names, values))
                if len(values) == len(names)
                else {"": f"{len(values)} of {len(names)} columns"},
            )


def column(record: dict[str, str], name: str) -> str:
    """A value of a CSV row, or BadRow when the row was not whole."""
    if "" in record:
        raise BadRow(f"it cannot be read as CSV: {record['']}")
    return record[name].strip()


def whole(value: Any, name: str, low: int = 0) -> int:
    """A whole number of at least ``low`` from text or JSON (``12``, ``12.0``), or BadRow."""
    try:
        as_float = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        as_float = math.nan
    if not math.isfinite(as_float) or as_float != int(as_float) or as_float < low or as_float > 2**53:
        raise BadRow(f"{name} must be a whole number of at least {low}, got {_short(value)}")
    return int(value) if isinstance(value, int) else int(as_float)


def seconds(value: Any, name: str) -> float:
    """A finite number of seconds, or BadRow."""
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise BadRow(f"{name} must be a number, got {_short(value)}")
    return found


def date_seconds(text: str, name: str) -> float:
    """Seconds of a date such as ``2023-11-16 18:17:03.9799600`` (UTC unless it says otherwise), or BadRow."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise BadRow(f"{name} must be a date and time (2023-11-16 18:17:03.97), got {_short(text)}") from None
    return (when.replace(tzinfo=None) - (when.utcoffset() or _ZERO) - _EPOCH).total_seconds()


_EPOCH = datetime(1970, 1, 1)
_ZERO = _EPOCH - _EPOCH


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, or BadRow."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRow(f"it must be a JSON object, got {_short(found)}")
    return found


def required(record: dict[str, Any], name: str) -> Any:
    """A field of a JSON object, or BadRow."""
    if name not in record:
        raise BadRow(f"it has no {name}; it has {', '.join(map(str, record))[:200] or 'nothing'}")
    return record[name]


def jsonl_records(path: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a file with one JSON value a line."""
    with opened(path) as file:
        yield from numbered_lines(file, Path(path).name)


def json_array(path: str) -> Iterator[tuple[int, Any]]:
    """(line, element) of a file that is one JSON array, read piece by piece: memory holds one element and a chunk."""
    name = Path(path).name
    decoder = json.JSONDecoder()
    with opened(path) as file:
        buffer, line, num = "", 1, 0
        wanted = "["  # then "value]" once, and after each element ",]" and after each comma "value"
        while True:
            rest = buffer.lstrip(" \t\r\n")
            line += buffer.count("\n", 0, len(buffer) - len(rest))
            buffer = rest or file.read(CHUNK_CHARS)
            if not rest and not buffer:
                raise ConfigError(f"{name} line {line}: the file ends inside its JSON array, after {num} elements")
            if not rest:
                continue
            first = buffer[0]
            if first == "]" and "]" in wanted:
                return
            if not wanted.startswith("value"):
                if first not in wanted:
                    what = "'[': the file must be one JSON array" if wanted == "[" else "',' or ']' behind an element"
                    raise ConfigError(f"{name} line {line}: expected {what}, got {_short(buffer[:20])}")
                wanted, buffer = "value]" if first == "[" else "value", buffer[1:]
                continue
            element, end, buffer = _element(decoder, buffer, file, f"{name} line {line}")
            yield line, element
            num += 1
            line += buffer.count("\n", 0, end)
            buffer, wanted = buffer[end:], ",]"


def _element(decoder: json.JSONDecoder, buffer: str, file: IO[str], where: str) -> tuple[Any, int, str]:
    """One JSON value at the start of the buffer, its end, and the buffer, which grew until the value was whole."""
    while True:
        try:
            element, end = decoder.raw_decode(buffer)
        except (ValueError, RecursionError) as error:
            grown = "" if len(buffer) > MAX_CHARS else file.read(max(CHUNK_CHARS, len(buffer)))
            if not grown:
                raise ConfigError(f"{where}: this element is no JSON: {error}") from error
            buffer += grown
            continue
        if not isinstance(element, dict | list | str) and len(buffer) - end < 32:
            grown = file.read(CHUNK_CHARS)  # a number may go on: -0 | .5 | e3
            if grown:
                buffer += grown
                continue
        return element, end, buffer


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
