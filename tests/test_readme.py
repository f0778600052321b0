"""The README tells the truth: its policy, its YAML, its Python and its commands run as written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# commands that need nothing but the package; `make serve` is tested by hand and in CI's fresh clone
COMMANDS = [
    line.strip() for line in README.splitlines() if line.startswith("    python -m core") and "executor=toy" in line
]


def block(after: str) -> str:
    return re.search(r"```\w+\n(.*?)```", README[README.index(after) :], re.S).group(1)


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    """The folder of someone who followed the README."""
    (tmp_path / "my" / "scheduler").mkdir(parents=True)
    (tmp_path / "mine.py").write_text(block("`mine.py`"))
    (tmp_path / "my" / "scheduler" / "newest.yaml").write_text(block("`my/scheduler/newest.yaml`"))
    return tmp_path


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_runs(command: str, trial: Path) -> None:
    done = run(shlex.split(command)[1:], trial)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(trial.glob("**/result.json"))


def test_the_ledger_of_the_readme_prints_its_tables(trial: Path) -> None:
    assert "    python -m core.ledger\n" in README
    done = run(["-m", "core.ledger"], trial)
    assert done.returncode == 0 and "KV per token" in done.stdout, done.stderr[-2000:]


def test_the_reports_of_the_readme_follow_its_sweep(trial: Path) -> None:
    sweep = next(command for command in COMMANDS if " -m " in command[len("python -m ") :])
    commands = [line.strip() for line in README.splitlines() if line.startswith("    python -m core.report")]
    assert len(commands) >= 3
    for command in (sweep, *commands):
        done = run(shlex.split(command, comments=True)[1:], trial)
        assert done.returncode == 0, done.stderr[-2000:]
    assert list(trial.glob("multirun/*/*/*.svg"))


def test_there_are_commands_to_test() -> None:
    assert len(COMMANDS) >= 3


def test_the_python_of_the_readme_runs(trial: Path) -> None:
    (trial / "notebook.py").write_text(block("From Python"))
    done = run(["notebook.py"], trial)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["length", "8", "length", "8"]


def test_the_first_policy_fits_in_30_lines() -> None:
    assert len(block("`mine.py`").splitlines()) <= 30


def test_the_options_table_lists_what_is_shipped() -> None:
    import plugins

    assert "| `experiment` |" in README
    for policy in plugins.provide_policies():
        assert re.search(rf"\| `{policy.kind}` \|.*`\[?{policy.name}\]?`", README), (
            f"README lacks {policy.kind}={policy.name}"
        )


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_generated_pages_are_up_to_date() -> None:
    done = run([str(ROOT / "docs" / "build.py"), "--check"], ROOT)
    assert done.returncode == 0, done.stdout
