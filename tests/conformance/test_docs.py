"""docs/write-an-allocator.md is followed to the letter: its files are written and its commands are run, in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "write-an-allocator.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# a test may not install into the environment it runs in: the package goes into a folder that PYTHONPATH names
INSTALL = "python -m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check --target site ."


def follow(folder: Path, last_step: int | None = None) -> list[str]:
    """Write files and run commands up to a numbered section; gives the commands that ran."""
    text = PAGE.read_text()
    if last_step is not None:
        text = text.split(f"\n## {last_step + 1}. ")[0]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'site'}",
    }
    ran = []
    for language, title, body in BLOCK.findall(text):
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(body)
        elif language == "sh":
            for command in body.strip().splitlines():
                wanted = 1 if "# exits with 1" in command else 0
                command = command.replace("pip install -e .", INSTALL)
                ended = subprocess.run(
                    ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
                )
                assert ended.returncode == wanted, f"{command}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
                ran.append(f"{command}\n{ended.stdout}")
    return ran


def test_the_class_of_the_page_conforms(tmp_path: Path) -> None:
    ran = follow(tmp_path, last_step=3)
    assert len(ran) == 1 and "allocator=grouped conforms" in ran[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_page_can_be_followed(tmp_path: Path) -> None:
    ran = follow(tmp_path)
    assert sum("core.conformance" in each.splitlines()[0] for each in ran) == 3
    tables = [each.splitlines()[1:] for each in ran if each.startswith("python -m core.report --figures")]
    paged, one = tables[0][1].split(), tables[1][1].split()
    assert paged[0] == "paged" and one[0] == "1"
    assert [one[1], *one[2:]] == [paged[1], *paged[4:]], "a group of one block is paged"
    printed = PAGE.read_text()
    for line in [*tables[0], *tables[1][:-1]]:
        assert line.rstrip() in printed, "the page shows what is printed"
    assert list(tmp_path.glob("multirun/*/*/concurrency.mean.svg"))
