"""``frontend=batch``: answers a file of requests, in OpenAI's batch format, one result a line in the order in which they end.

A line of ``input`` is ``{"custom_id", "method": "POST", "url": "/v1/completions" | "/v1/chat/completions", "body"}``; a line of
``output`` is ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``. What is wrong with one line is that
line's result: a ``response`` with the error body that a server would have sent, or ``error`` with ``code``, ``message`` and ``line`` when
the line is no request at all.

A result is appended by one write, so a run that is killed leaves whole lines and at most a part of one. Started again with the same
files it cuts that part off, keeps every result there is, also those of failures, and computes the rest.
"""

from __future__ import annotations

import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import orjson

from core.frontends.answers import Answer, ChatAnswer, CompletionAnswer, refuse_bad
from core.frontends.fields import ApiError, read_object
from core.frontends.prepare import as_sent, prepare
from core.frontends.protocol import read_chat, read_completion
from core.frontends.replay import Shown
from core.frontends.result_lines import ResultLines
from core.types import ConfigError, Output, PolicyError, QueueFull, RequestError, StepReport

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 16_000_000
MAX_EMPTY_STEPS = 100
"""Steps in a row that compute nothing and name no time to wait for, before the run is given up."""
ANY_MODEL = "default"
_ROUTES: dict[str, tuple[Callable[[bytes], Any], type[Answer]]] = {
    "/v1/completions": (read_completion, CompletionAnswer),
    "/v1/chat/completions": (read_chat, ChatAnswer),
}


def _positive(_: Any, field: Any, value: Any) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{field.name} must be null or a whole number of at least 1, got {value!r}")


_text = attrs.validators.instance_of(str)


@attrs.define(eq=False)
class BatchFrontend:
    """Answer every line of ``input`` that has no result in ``output`` yet, ``concurrency`` at a time."""

    input: str = attrs.field(validator=_text)
    output: str = attrs.field(validator=_text)
    concurrency: int | None = attrs.field(default=None, validator=_positive)
    served_model_name: str | None = attrs.field(default=None, validator=attrs.validators.optional(_text))
    accept_any_model: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    progress: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    _lines: ResultLines | None = attrs.field(default=None, init=False)

    def check(self) -> None:
        """Open both files, before anything expensive; ``ConfigError`` if that cannot be."""
        if self._lines is not None:
            return
        if not Path(self.input).is_file():
            raise ConfigError(f"frontend.input={self.input} is not a file")
        if Path(self.output).exists() and Path(self.output).samefile(self.input):
            raise ConfigError(f"frontend.output={self.output} is the input itself")
        self._lines = ResultLines(self.output)

    def run(self, started: Any) -> dict[str, Any]:
        """Serve the file, say what became of it, give the record. ``status`` is ``ok`` also when lines failed, which are counted.

        ``aborted`` after Ctrl-C; ``failed``, with ``error``, when the engine stopped or the output could not be written. In each
        case what is finished stays in the output and another run goes on from there.
        """
        self.check()
        assert self._lines is not None
        with self._lines as lines, open(self.input, "rb") as file:
            total = sum(1 for line in file if line.strip())
            shown = Shown(self.progress, total, 0)
            batch = _Batch(started.engine, lines, shown, self)
            status, error = "ok", None
            with shown, batch.interruptible():
                try:
                    file.seek(0)
                    batch.serve(file)
                except KeyboardInterrupt:
                    status = "aborted"
                    batch.cut_off()
                except OSError as failure:
                    status, error = "failed", f"frontend.output={self.output}: {failure.strerror or failure}"
                    batch.cut_off()
                except PolicyError as failure:
                    log.exception("the engine stopped")
                    status, error = "failed", str(failure)
        counts = {"lines": total, **batch.counts}
        print(f"{self.output}: {batch.says()}", flush=True)
        return {
            "status": status,
            **({"error": error} if error else {}),
            "batch": counts,
            "output": self.output,
            "manifest": started.manifest,
        }


class _Line:
    """One request in flight."""

    def __init__(self, custom_id: str, answer: Answer, ids: list[int], n: int):
        self.custom_id, self.answer = custom_id, answer
        self.ids, self.n = ids, n
        self.left = len(ids) * n
        self.error: ApiError | None = None

    def take(self, output: Output) -> bool:
        """True when it was the last."""
        if self.error is None:
            try:
                refuse_bad(output)
                self.answer.add(self.ids.index(output.request_id) * self.n + output.branch, output)
            except ApiError as error:
                self.error = error
        if output.finish_reason is not None:
            self.left -= 1
        return self.left <= 0


class _Batch:
    """One file on one engine: what is in flight, what became of the others."""

    def __init__(self, engine: Any, lines: ResultLines, shown: Shown, options: BatchFrontend):
        self.engine, self.lines, self.shown = engine, lines, shown
        self.counts = {"already_done": 0, "completed": 0, "failed": 0}
        name = options.served_model_name or engine.model.name
        self._name, self._any_model = name, options.accept_any_model
        self._concurrency = options.concurrency or 2 * engine.limits.max_num_seqs
        self._open: dict[int, _Line] = {}  # request id -> its line
        self._num_open = 0
        self._seen: set[str] = set()
        self._empty_steps = 0
        self._stopping = self._waiting = False

    def says(self) -> str:
        """One line for people."""
        before = f", {self.counts['already_done']} were there already" if self.counts["already_done"] else ""
        return f"{self.counts['completed']} answers, {self.counts['failed']} errors{before}"

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C ends the run between two steps; a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, *_: object) -> None:
        if self._waiting or self._stopping:
            raise KeyboardInterrupt
        self._stopping = True

    def serve(self, file: Any) -> None:
        """Everything, in the order of the file as far as there is room."""
        for number, raw in enumerate(_lines(file), 1):
            if raw.strip():
                self._begin(number, raw)
            while self._num_open >= self._concurrency:
                self._step()
        while self._num_open:
            self._step()
        self._end_sessions()
        self.lines.sync()

    def _end_sessions(self) -> None:
        """No session of the file comes back: what is kept for them is given back."""
        if self.engine.stats()["idle_sessions"]:
            self.engine.end_sessions()
            self.engine.step()

    # -------------------------------------------------------------------------------------------- a line

    def _begin(self, number: int, raw: bytes) -> None:
        """Send one line to the engine, or write what is wrong with it."""
        try:
            custom_id, url, body = _read_line(raw)
            if custom_id in self._seen:
                raise _BadLine("duplicate_custom_id", f"custom_id {custom_id[:80]!r} was used before")
        except _BadLine as error:
            if self.lines.has_line(number):
                self._count("already_done")
                return
            about = {"code": error.code, "message": str(error), "param": None, "line": number}
            self._write({"custom_id": error.custom_id, "response": None, "error": about}, "failed")
            return
        self._seen.add(custom_id)
        if self.lines.has_id(custom_id):
            self._count("already_done")
            return
        try:
            self._submit(custom_id, url, body)
        except ApiError as error:
            self._write_error(custom_id, error)

    def _submit(self, custom_id: str, url: str, body: dict[str, Any]) -> None:
        read, shape = _ROUTES[url]
        request = read(orjson.dumps(body))
        if request.stream:
            raise ApiError(400, "stream is not allowed in a batch", param="stream")
        if request.model not in (self._name, ANY_MODEL) and not self._any_model:
            raise ApiError(
                404, f"the model {request.model[:80]!r} is not served here", param="model", code="model_not_found"
            )
        engine, ids = self.engine, []
        try:
            asked = prepare(request, engine.tokenizer, engine.model, engine.limits)
            for prompt in asked.prompts:
                ids.append(self._patiently(prompt, asked))
        except RequestError as error:
            for id in ids:
                engine.abort(id)
            raise as_sent(error, request) from error
        line = _Line(custom_id, shape(self._name, asked, engine.tokenizer), ids, asked.params.n)
        self._open.update(dict.fromkeys(ids, line))
        self._num_open += 1

    def _patiently(self, prompt: list[int], asked: Any) -> int:
        """Submit when there is room: a batch is in no hurry (``max_queue``)."""
        while True:
            try:
                return self.engine.submit(prompt, asked.params, **asked.labels)
            except QueueFull:
                self._step()

    # -------------------------------------------------------------------------------------------- a step

    def _step(self) -> None:
        if self._stopping:
            raise KeyboardInterrupt
        report: StepReport = self.engine.step()
        for output in report.outputs:
            line = self._open.get(output.request_id)
            if line is not None and line.take(output):
                self._finish(line)
        self.shown.tokens(report.num_sampled)
        if not report.idle or report.outputs:
            self._empty_steps = 0
        elif report.wait_until is not None and report.wait_until > self.engine.executor.now():
            self._wait(report.wait_until)
        else:
            self._empty_steps += 1
            if self._empty_steps >= MAX_EMPTY_STEPS:
                raise PolicyError(f"{MAX_EMPTY_STEPS} steps in a row computed nothing; engine: {self.engine.stats()}")

    def _wait(self, until_s: float) -> None:
        self._waiting = True
        try:
            self.engine.executor.wait_until(until_s)
        finally:
            self._waiting = False

    def _finish(self, line: _Line) -> None:
        for id in line.ids:
            self._open.pop(id, None)
        self._num_open -= 1
        if line.error is not None:
            self._write_error(line.custom_id, line.error)
            return
        response = {"status_code": 200, "request_id": line.answer.id, "body": orjson.Fragment(line.answer.whole())}
        self._write({"custom_id": line.custom_id, "response": response, "error": None}, "completed")

    def _write_error(self, custom_id: str, error: ApiError) -> None:
        response = {
            "status_code": error.status,
            "request_id": f"req-{uuid.uuid4().hex}",
            "body": orjson.Fragment(error.body()),
        }
        self._write({"custom_id": custom_id, "response": response, "error": None}, "failed")

    def _write(self, result: dict[str, Any], outcome: str) -> None:
        self.lines.append(orjson.dumps({"id": f"batch_req_{uuid.uuid4().hex}", **result}))
        self._count(outcome)

    def _count(self, outcome: str) -> None:
        self.counts[outcome] += 1
        self.shown.ended()

    def cut_off(self) -> None:
        """Leave the engine empty."""
        for id in self._open:
            self.engine.abort(id)
        if self.engine.failure is None and self.engine.has_work():
            self.engine.step()
        if self.engine.failure is None:
            self._end_sessions()
        self._open.clear()
        self._num_open = 0


def _lines(file: Any) -> Iterator[bytes]:
    """Every line, of a long one its beginning: enough to see that it is too long."""
    while raw := file.readline(MAX_LINE_BYTES + 1):
        yield raw
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES + 1)


class _BadLine(Exception):
    def __init__(self, code: str, message: str, custom_id: str | None = None):
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


def _read_line(raw: bytes) -> tuple[str, str, dict[str, Any]]:
    """``custom_id``, ``url`` and ``body`` of a line."""
    if len(raw) > MAX_LINE_BYTES:
        raise _BadLine("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        line = read_object(raw)
    except ApiError as error:
        raise _BadLine("invalid_json_line", error.message.replace("the body", "the line")) from error
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        raise _BadLine("invalid_custom_id", "custom_id must be a string of 1 to 512 characters")
    wrong = None
    if line.get("method", "POST") != "POST":
        wrong = ("invalid_method", "method must be POST")
    elif not isinstance(line.get("url"), str) or line["url"] not in _ROUTES:
        wrong = ("invalid_url", f"url must be one of {', '.join(_ROUTES)}")
    elif not isinstance(line.get("body"), dict):
        wrong = ("invalid_body", "body must be an object")
    elif set(line) - {"custom_id", "method", "url", "body"}:
        wrong = (
            "unknown_field",
            f"unknown field {sorted(set(line) - {'custom_id', 'method', 'url', 'body'})[0][:80]!r}",
        )
    if wrong is not None:
        raise _BadLine(*wrong, custom_id=custom_id)
    return custom_id, line["url"], line["body"]
