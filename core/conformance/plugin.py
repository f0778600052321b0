"""The kit's pytest plugin: what is to be proved comes from the command line, and the report says what each case protects.

Loaded by ``python -m core.conformance`` and with ``pytest -p core.conformance.plugin``; never by itself, so that it cannot disturb
the test runs of whoever has Quire installed.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from core.conformance import KINDS
from core.conformance.subject import Subject, subject_of
from core.types import QuireError

HERE = Path(__file__).resolve().parent
OWN_LINES = "--quire-lines"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("quire", "what the conformance kit proves")
    for kind in KINDS:
        group.addoption(f"--{kind}", metavar="NAME", help=f"prove {kind}=NAME")
    group.addoption(
        "--config-dir", metavar="DIR", help="a folder of YAML files (allocator/mine.yaml), for what is not packaged yet"
    )
    group.addoption(
        "--trust", metavar="MODULE", action="append", default=[], help="a module of your own whose classes may be built"
    )
    group.addoption(
        "--override", metavar="FIELD=VALUE", action="append", default=[], help="an override, e.g. allocator.fit=best"
    )
    group.addoption("--examples", type=int, default=100, metavar="N", help="examples of each property (default 100)")
    group.addoption("--shrink", action="store_true", help="look for the smallest failing example; may take minutes")
    group.addoption(
        "--known", metavar="CASE=REASON", action="append", default=[], help="a case that is expected to fail, and why"
    )
    group.addoption(
        "--device", metavar="DEVICE", default=None, help="cpu or cuda, for kernels (default: cuda where there is one)"
    )
    group.addoption(OWN_LINES, action="store_true", help="report one line a case instead of pytest's dots")


def pytest_configure(config: pytest.Config) -> None:
    chosen = {kind: config.getoption(f"--{kind}") for kind in KINDS if config.getoption(f"--{kind}") is not None}
    if not chosen:
        raise pytest.UsageError(f"nothing to prove: give {' or '.join(f'--{kind} NAME' for kind in KINDS)}")
    if config.getoption("--examples") < 1:
        raise pytest.UsageError(f"--examples {config.getoption('--examples')}: allowed is a number from 1")
    try:
        subjects = {kind: _subject(config, kind, name) for kind, name in chosen.items()}
    except QuireError as error:
        raise pytest.UsageError(str(error)) from None
    config.quire_subjects = subjects  # type: ignore[attr-defined]
    config.pluginmanager.register(Report(config, subjects), "quire-report")


def _subject(config: pytest.Config, kind: str, name: str) -> Subject:
    trust = tuple(word for given in config.getoption("--trust") for word in given.split(",") if word)
    if trust and not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))  # a module in the current folder, as with python -m
    return subject_of(
        f"{kind}={name}",
        config.getoption("--override"),
        config_dir=config.getoption("--config-dir"),
        trust=trust,
        examples=config.getoption("--examples"),
        shrink=config.getoption("--shrink"),
        facts={"device": config.getoption("--device")},
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the kit's own modules only those of the named kinds."""
    if collection_path.parent == HERE and collection_path.name.startswith("test_"):
        return collection_path.stem.removeprefix("test_") not in config.quire_subjects  # type: ignore[attr-defined]
    return None


class Report:
    """One line a case, and for each that failed: what it protects and what was seen."""

    def __init__(self, config: pytest.Config, subjects: dict[str, Subject]):
        self.config, self.subjects = config, subjects
        self.own_lines = config.getoption(OWN_LINES)
        self.cases: dict[str, tuple[str, str, str]] = {}  # node id -> name, parameters, what it protects
        self.ended: dict[str, Any] = {}  # node id -> the report that counts
        self.known = dict(each.partition("=")[::2] for each in config.getoption("--known"))

    def pytest_report_header(self) -> list[str]:
        return [f"proving {subject.origin()}" for subject in self.subjects.values()]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        used = set()
        for item in items:
            if item.path.parent != HERE:
                continue
            name = getattr(item, "originalname", item.name)
            brackets = item.name.removeprefix(name)
            protects = " ".join((inspect.getdoc(item.obj) or "").split())  # type: ignore[attr-defined]
            self.cases[item.nodeid] = name.removeprefix("test_").replace("_", " "), brackets, protects
            for case in {name, name.removeprefix("test_")} & set(self.known):
                used.add(case)
                item.add_marker(pytest.mark.xfail(reason=self.known[case] or "declared with --known", strict=True))
        unknown = sorted(set(self.known) - used)
        if unknown and self.cases:
            raise pytest.UsageError(f"--known {unknown[0]}: there is no such case")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> Any:
        if self.own_lines and report.nodeid in self.cases and report.when == "call":
            if hasattr(report, "wasxfail"):
                return ("xfailed" if report.skipped else "failed"), "", ""
            return report.outcome, "", ""
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid not in self.cases or (report.when != "call" and report.outcome == "passed"):
            return
        self.ended[report.nodeid] = report
        if self.own_lines:
            self._write_line(report)

    def _alike(self, nodes: list[str]) -> dict[tuple[str, str], list[str]]:
        """Failed cases that differ only in their parameters, together."""
        found: dict[tuple[str, str], list[str]] = {}
        for node in nodes:
            name, _, protects = self.cases[node]
            found.setdefault((name, protects), []).append(node)
        return found

    def _write_line(self, report: Any) -> None:
        name, parameters, _ = self.cases[report.nodeid]
        title = f"{name} {parameters}".rstrip()
        word = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}[report.outcome]
        notes = [value for name, value in report.user_properties if name == "note"]
        if hasattr(report, "wasxfail"):
            word, notes = "known", [report.wasxfail.removeprefix("reason: ")]
        elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            notes.append(report.longrepr[2].removeprefix("Skipped: "))
        line = f"{word:8}{title}" + (f": {'; '.join(notes)}" if notes else "") + f"  ({report.duration:.1f} s)"
        color = {"ok": {"green": True}, "FAILED": {"red": True, "bold": True}}.get(word, {"yellow": True})
        self._writer().line(line, **color)

    def _writer(self) -> Any:
        return self.config.get_terminal_writer()

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        failed = [node for node, report in self.ended.items() if report.outcome == "failed"]
        for (name, protects), nodes in self._alike(failed).items():
            write("")
            write(f"FAILED: {name} {' '.join(self.cases[node][1] for node in nodes)}".rstrip(), red=True, bold=True)
            write(f"  protects: {protects}")
            for line in what_was_seen(self.ended[nodes[0]]):
                write(f"  {line}")
        passed = sum(1 for report in self.ended.values() if report.outcome == "passed")
        options = ", ".join(subject.option for subject in self.subjects.values())
        write("")
        skipped = len(self.ended) - passed - len(failed)
        verdict = "does NOT conform" if failed else "conforms" if passed else "is NOT proved, nothing ran"
        write(f"{options} {verdict}: {passed} cases passed, {len(failed)} failed, {skipped} skipped or known")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Never a green run of nothing."""
        if exitstatus == 0 and self.cases and not any(report.outcome == "passed" for report in self.ended.values()):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def what_was_seen(report: Any) -> list[str]:
    """The error of a failed case in a few lines: its message, and the example that Hypothesis found."""
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    shown = [f"seen: {lines[0]}"] if lines else []
    shown += [f"      {line}" for line in lines[1:12]]
    if len(lines) > 12:
        shown.append(f"      ... {len(lines) - 12} more lines with --tb=long")
    return shown
