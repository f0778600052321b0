"""The kit as an author meets it: its command line, its errors, its report, and the three ways to run it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.conformance import KINDS, plugin
from core.conformance.__main__ import main
from core.discovery import discover
from tests.dists import HEADER, add_dist

ROOT = Path(__file__).resolve().parents[2]
MINE = """
import attrs
from core.hookspecs import hookimpl
from core.types import Lease, Shortfall
from plugins.allocators.paged import PagedAllocator

@attrs.define(eq=False)
class Mine(PagedAllocator):
    \"\"\"Paged by another name.\"\"\"
    depth: int = 3

@attrs.define(eq=False)
class Leaky(PagedAllocator):
    \"\"\"Keeps a block.\"\"\"
    @hookimpl
    def release(self, releases):
        for release in releases:
            self._pool.give(release.block_ids[1:])
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a module of one's own and YAML files for it; not installed."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "conf" / "allocator").mkdir(parents=True)
    (tmp_path / "conf" / "allocator" / "mine.yaml").write_text("_target_: mine.Mine\ndepth: 3\n")
    (tmp_path / "conf" / "allocator" / "leaky.yaml").write_text("_target_: mine.Leaky\n")
    return tmp_path


def kit(*words: str, cwd: Path, path: str = "", module: str = "core.conformance") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path])), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, cwd=cwd, env=environment, timeout=300
    )


OWN = ("--config-dir", "conf", "--trust", "mine")


def test_an_unpackaged_allocator_conforms(here: Path) -> None:
    """Whatever the author's own pytest settings are: they neither hide cases nor clash with the kit's options."""
    (here / "pytest.ini").write_text("[pytest]\npython_files = check_*.py\naddopts = -k nothing\n")
    (here / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--allocator')\n")
    ended = kit(
        "--allocator",
        "mine",
        *OWN,
        "--examples",
        "5",
        "allocator.depth=4",
        "-k",
        "not hash_seed and not torch",
        cwd=here,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ok      any plan any company" in ended.stdout
    assert "allocator=mine conforms: " in ended.stdout and " 0 failed" in ended.stdout
    assert not any(path.name in (".hypothesis", ".pytest_cache") for path in here.iterdir()), (
        "the kit leaves files behind"
    )


def test_a_fault_is_told_with_what_it_endangers(here: Path) -> None:
    ended = kit("--allocator", "leaky", *OWN, "--examples", "5", "-k", "any_plan", cwd=here)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "FAILED: any plan any company" in ended.stdout
    assert "protects: Whatever is planned, forked, aborted" in ended.stdout
    assert "seen: AssertionError: release counts owners wrongly" in ended.stdout
    assert "allocator=leaky does NOT conform" in ended.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to prove: give --allocator NAME"),
        (("--allocator", "pagd"), "--allocator pagd: no such option; installed: "),
        (("--kernel", "auto"), "it is a list of others; name one of"),
        (("--allocator", "mine", *OWN, "allocator.deep=1"), "allocator.deep: allocator has no field deep"),
        (("--allocator", "mine", "--config-dir", "conf"), "a module of your own needs trust=[its_name]"),
        (("--allocator", "mine", "--config-dir", "nowhere"), "--config-dir nowhere: there is no such folder"),
        (("--allocator", "mine", *OWN, "--examples", "0"), "--examples 0: allowed is a number from 1"),
        (("--allocator", "mine", *OWN, "--known", "no_such_case=x"), "--known no_such_case: there is no such case"),
        (("--allocator", "mine", *OWN, "-k", "nothing_at_all"), "is NOT proved, nothing ran"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_never_green(words: tuple[str, ...], message: str, here: Path) -> None:
    ended = kit(*words, cwd=here)
    assert ended.returncode == 2
    assert message in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def test_help_names_every_option_of_the_kit(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    source = inspect.getsource(plugin.pytest_addoption)
    options = {*re.findall(r'"(--[a-z-]+)"', source), *(f"--{kind}" for kind in KINDS)}
    assert len(options) > 10 and not [option for option in options if option not in shown]


def test_a_broken_plugin_is_named(here: Path) -> None:
    site = here / "site"
    add_dist(site, "quire-broken", f"{HEADER}\nimport no_such_module\n")
    ended = kit("--allocator", "mine", cwd=here, path=str(site))
    assert ended.returncode == 2
    assert (
        "no such option; installed: " in ended.stderr
        and "quire-broken 1.0" in ended.stderr
        and "no_such_module" in ended.stderr
    )


def test_a_known_failure_is_declared_and_must_still_fail(here: Path) -> None:
    words = ("--allocator", "leaky", *OWN, "--examples", "5", "-k", "any_plan or says")
    ended = kit(*words, "--known", "any_plan_any_company=it leaks, we know", cwd=here)
    assert ended.returncode == 0 and "known   any plan any company: it leaks, we know" in ended.stdout, ended.stdout
    ended = kit(*words, "--known", "it_says_what_it_is=not any more", "-k", "says", cwd=here)
    assert ended.returncode == 1, "a case that passes although it is declared known must be cleared"


def test_by_pytest(here: Path) -> None:
    words = (
        "-p",
        "core.conformance.plugin",
        "--pyargs",
        "core.conformance",
        "--allocator",
        "mine",
        *OWN,
        "-k",
        "yaml or says",
        "-q",
    )
    ended = kit(*words, cwd=here, module="pytest")
    assert ended.returncode == 0 and "2 passed" in ended.stdout, ended.stdout + ended.stderr
    nothing = kit("-p", "core.conformance.plugin", "--pyargs", "core.conformance", cwd=here, module="pytest")
    assert nothing.returncode == 4 and "nothing to prove" in nothing.stderr


def test_by_subclass(here: Path) -> None:
    (here / "test_mine.py").write_text(
        "from core.conformance import AllocatorCases\n"
        "class TestMine(AllocatorCases):\n"
        "    option, config_dir, trust, examples = 'allocator=mine', 'conf', ('mine',), 5\n"
        "class TestLeaky(AllocatorCases):\n"
        "    option, config_dir, trust, examples = 'allocator=leaky', 'conf', ('mine',), 5\n"
    )
    (here / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--allocator')\n")
    ended = kit("test_mine.py", "-q", "-k", "yaml or any_plan", "-p", "no:cacheprovider", cwd=here, module="pytest")
    assert "1 failed, 3 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "release counts owners wrongly" in ended.stdout


def test_a_missing_package_is_one_line(here: Path) -> None:
    (here / "sitecustomize.py").write_text("import sys\nsys.modules['hypothesis'] = None\n")
    (here / "run.py").write_text(
        "import importlib.util, sys\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'hypothesis' else find(name, *rest)\n"
        "from core.conformance.__main__ import main\nsys.exit(main(['--allocator', 'mine']))\n"
    )
    ended = kit(cwd=here, module="run")
    assert ended.returncode == 2
    assert ended.stderr.strip() == "error: the conformance kit needs hypothesis: pip install 'quire[test]'"


# ------------------------------------------------------------------------------------------------ our own plugins

KNOWN: dict[str, str] = {}
"""Shipped options with a case that fails on purpose: option -> "case=reason"."""
OURS = sorted(
    f"{option.kind}={option.name}"
    for option in discover().options
    if option.dist == "quire"
    and option.kind in ("allocator", "scheduler", "preemption", "kernel")
    and option.name != "auto"
)


def _prove(option: str, *words: str) -> None:
    kind, _, name = option.partition("=")
    known = ("--known", KNOWN[option]) if option in KNOWN else ()
    ended = kit(f"--{kind}", name, *words, *known, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("option", OURS)
def test_our_own_conform(option: str) -> None:
    """Every option we ship, few examples; the slow set runs the whole kit."""
    few = {"kernel": ("-k", "reference or slots or strange or after")}.get(
        option.partition("=")[0], ("-k", "not hash_seed")
    )
    _prove(option, "--examples", "15", *few)


@pytest.mark.slow
@pytest.mark.parametrize("option", OURS)
def test_our_own_conform_in_full(option: str) -> None:
    if option == "kernel=triton" and not torch.cuda.is_available():
        pytest.skip("kernel=triton needs a GPU: here tests/plugins/test_kernel_triton.py runs its kernels interpreted")
    _prove(option, "--examples", "300")


@pytest.mark.slow
def test_the_wheel_carries_the_kit(tmp_path: Path) -> None:
    """Installed from a wheel, away from the checkout, the kit finds its cases and its settings."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    sources = tmp_path / "sources"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, listed):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_bytes((ROOT / name).read_bytes())
    flags = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "install", *flags, "--target", str(tmp_path / "site"), str(sources)], check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    words = [sys.executable, "-m", "core.conformance", "--allocator", "paged", "-k", "yaml or says or alone_in"]
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "3 cases passed" in ended.stdout, ended.stdout + ended.stderr
