"""``observers=[recorder]``: every decision of a run as JSON lines, for reports and for the question "why was this one
preempted?".

One line an event, in the order they happened, each with ``event`` and ``step``; sequences and blocks by id::

    header   format, quire, api_version, python; limits, model, seed (from setup). Always the first line.
    arrived  requests: [{id, arrival_s, num_prompt_tokens, max_tokens, n, client_id, label}, ...]
    plan     now, chunks: [[sequence, num_tokens, may_preempt], ...], wait_until
    reserve  sequences: [id, ...], with shortfall: {num_fitting, blocks_missing} or leases: [{blocks: [[table_index,
             block_id], ...], moves: [[kind, source, destination], ...], num_cached_tokens}, ...], one a sequence
    evict    victims: [[sequence, kind], ...], or null when the policy could not help
    release  releases: [[sequence, [block_id, ...], reason], ...]
    step     started_s, ended_s, outputs: [[sequence, [token_id, ...], finish_reason], ...],
             preempted: [[sequence, kind, num_computed_tokens], ...]

It wraps the deciding hooks and passes on what they decide untouched. Inside a wrapper it only keeps the (frozen)
value; lines are made and written between steps, so a full disk is an observer's error and never a policy's.
``read_decisions`` reads a file back.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import attrs

from core import __version__
from core.hookspecs import hookimpl
from core.types import API_VERSION, ConfigError, EngineInfo, Lease, QuireError, Release, Request, Shortfall, StepReport

FORMAT = 1
"""Version of the file format: raised when a line's meaning changes."""


@attrs.define(eq=False)
class Recorder:
    """Write plans, leases, evictions, releases and outputs to a file of JSON lines; an existing file is replaced."""

    path: str | None = None  # null: decisions.jsonl in the run folder (without one, in the current folder)
    flush_every: int = attrs.field(
        default=64, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)]
    )  # steps

    _file: TextIO | None = attrs.field(init=False, default=None)
    _pending: list[tuple[str, int, Any]] = attrs.field(init=False, factory=list)  # (event, step, values), no line yet
    _step: int = attrs.field(init=False, default=0)
    _steps_kept: int = attrs.field(init=False, default=0)

    # ---------------------------------------------------------------------------------------- start and end

    @hookimpl
    def setup(self, engine_info) -> None:
        """Open the file, so that a path that cannot be written stops the start and not the run."""
        target = Path(self.path) if self.path is not None else run_folder() / "decisions.jsonl"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = target.open("w", encoding="utf-8")
            self._file.write(json.dumps(self._header(engine_info)) + "\n")
            self._file.flush()
        except OSError as error:
            self._give_up()
            raise ConfigError(f"recorder.path: cannot write {target}: {error.strerror}") from error

    def _header(self, engine_info: EngineInfo) -> dict[str, Any]:
        return {
            "event": "header",
            "format": FORMAT,
            "quire": __version__,
            "api_version": API_VERSION,
            "python": platform.python_version(),
            "limits": attrs.asdict(engine_info.limits),
            "model": engine_info.model.name,
            "seed": engine_info.seed,
        }

    @hookimpl
    def teardown(self) -> None:
        """Write what is left and close; what a crashed step decided is in the file."""
        if self._file is None:
            return
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---------------------------------------------------------------------------------------- decisions

    @hookimpl(wrapper=True)
    def plan_step(self, view):
        plan = yield
        self._step = view.step
        self._keep("plan", (view.now, plan))
        return plan

    @hookimpl(wrapper=True)
    def reserve(self, plan):
        answer = yield
        if isinstance(answer, Shortfall):
            self._keep("reserve", (plan, answer))
        elif isinstance(answer, (list, tuple)):  # core says what is wrong with anything else
            self._keep("reserve", (plan, tuple(answer)))  # a copy: an allocator may go on using its list
        return answer

    @hookimpl(wrapper=True)
    def choose_victims(self):
        victims = yield
        if victims is None or isinstance(victims, (list, tuple)):
            self._keep("evict", None if victims is None else tuple(victims))
        return victims

    @hookimpl(wrapper=True)
    def release(self, releases):
        answer = yield
        self._keep("release", tuple(releases))
        return answer

    # ---------------------------------------------------------------------------------------- what happened

    @hookimpl
    def requests_arrived(self, requests) -> None:
        self._keep("arrived", tuple(requests))

    @hookimpl
    def step_finished(self, report) -> None:
        if not report.idle or report.outputs:
            self._keep("step", report)
        self._step = report.step + 1  # what intake does next belongs to the next step
        self._steps_kept += 1
        if self._steps_kept >= self.flush_every:
            self._flush()

    def _keep(self, event: str, values: Any) -> None:
        if self._file is not None:
            self._pending.append((event, self._step, values))

    def _flush(self) -> None:
        self._steps_kept = 0
        if self._file is None:
            return
        try:
            self._write(self._file)
        except OSError:
            self._give_up()
            raise  # to whoever called: hooks are isolated and errors reported there
        finally:
            self._pending = []

    def _give_up(self) -> None:
        """Keep nothing more. Closing tries to write once more what could not be written, which fails again."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _write(self, file: TextIO) -> None:
        for event, step, values in self._pending:
            line = {"event": event, "step": step, **_FIELDS[event](values)}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.flush()


def _plan(values: tuple[float, Any]) -> dict[str, Any]:
    now, plan = values
    return {"now": now, "chunks": plan.chunks, "wait_until": plan.wait_until}


def _reserve(values: tuple[Any, Shortfall | tuple[Lease, ...]]) -> dict[str, Any]:
    plan, answer = values
    sequences = [chunk.sequence for chunk in plan.chunks]
    if isinstance(answer, Shortfall):
        return {"sequences": sequences, "shortfall": attrs.asdict(answer)}
    leases = [{"blocks": x.blocks, "moves": x.moves, "num_cached_tokens": x.num_cached_tokens} for x in answer]
    return {"sequences": sequences, "leases": leases}


def _evict(victims: tuple | None) -> dict[str, Any]:
    return {"victims": None if victims is None else [[v.sequence, v.kind] for v in victims]}


def _release(releases: tuple[Release, ...]) -> dict[str, Any]:
    return {"releases": [[r.sequence, r.block_ids, r.reason] for r in releases]}


def _arrived(requests: tuple[Request, ...]) -> dict[str, Any]:
    return {
        "requests": [
            {
                "id": r.id,
                "arrival_s": r.arrival_s,
                "num_prompt_tokens": len(r.prompt_token_ids),
                "max_tokens": r.params.max_tokens,
                "n": r.params.n,
                "client_id": r.client_id,
                "label": r.label,
            }
            for r in requests
        ]
    }


def _report(report: StepReport) -> dict[str, Any]:
    return {
        "started_s": report.started_s,
        "ended_s": report.ended_s,
        "outputs": [[o.sequence_id, o.token_ids, o.finish_reason] for o in report.outputs],
        "preempted": [[p.sequence, p.kind, p.num_computed_tokens] for p in report.preempted],
    }


_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plan": _plan,
    "reserve": _reserve,
    "evict": _evict,
    "release": _release,
    "arrived": _arrived,
    "step": _report,
}


def run_folder() -> Path:
    """Hydra's output folder of this job, or the current folder when there is none (the Python API)."""
    if "hydra" in sys.modules:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            return Path(HydraConfig.get().runtime.output_dir)
    return Path.cwd()


def read_decisions(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a recorder's file, header first. A last line that was cut off (a killed run) is left out.

    Raises QuireError if the file is no recording, has another format version, or is damaged before its end.
    """
    with Path(path).open(encoding="utf-8") as lines:
        number, cut = 0, None
        for number, text in enumerate(lines, start=1):
            if cut is not None:
                raise QuireError(f"{path}: line {cut} is not JSON")
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                cut = number
                continue
            if number == 1:
                _check_header(path, line)
            yield line
    if cut == 1 or number == 0:
        raise QuireError(f"{path}: not a recording of decisions (no header line)")


def _check_header(path: str | Path, line: Any) -> None:
    if not isinstance(line, dict) or line.get("event") != "header":
        raise QuireError(f"{path}: not a recording of decisions (no header line)")
    if line.get("format") != FORMAT:
        raise QuireError(f"{path}: format {line.get('format')!r}, this version reads {FORMAT}")
