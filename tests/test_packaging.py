"""The wheel, and an outside package: installed into a folder of their own and run from somewhere else."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "quire-lifo"
TOY = ["executor=toy", "frontend=replay", "frontend.progress=false", "workload.num_requests=4"]
LIFO = ["scheduler=lifo", "allocator=lastfit", "observers=[steplog]", "observers.steplog.every=1"]


def run(words, cwd, *paths):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "QUIRE_CACHE": str(cwd / ".cache")}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=170)


def pip(*words, cwd):
    done = run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *map(str, words)], cwd)
    assert done.returncode == 0, done.stdout + done.stderr


def wheel(source, folder):
    """Build a wheel from a copy, so that the source tree stays as it is."""
    copy = folder / "source"
    ignored = shutil.ignore_patterns(
        ".*", "__pycache__", "build", "dist", "*.egg-info", "tests", "shared", "benchmarks", "docs"
    )
    shutil.copytree(source, copy, ignore=ignored)
    if not (copy / "README.md").exists():
        (copy / "README.md").write_text("Quire\n")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder / "wheels", copy, cwd=folder)
    return next((folder / "wheels").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Quire's wheel, installed into a folder."""
    folder = tmp_path_factory.mktemp("quire")
    built = wheel(ROOT, folder)
    pip("install", "--no-deps", "--no-index", "--target", folder / "site", built, cwd=folder)
    return folder / "site", built


@pytest.fixture
def elsewhere(tmp_path):
    """A current folder that has packages of its own under our config's name."""
    cwd = tmp_path / "elsewhere"
    (cwd / "conf").mkdir(parents=True)
    (cwd / "conf" / "__init__.py").write_text("raise SystemExit('the decoy was imported')\n")
    (cwd / "conf" / "config.yaml").write_text("decoy: true\n")
    (cwd / "tests").mkdir()
    return cwd


def test_the_wheel_has_code_config_and_licence_and_nothing_else(installed):
    _, built = installed
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))))
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"core", "plugins", "conf"}
    in_tree = {p.relative_to(ROOT).as_posix() for p in (ROOT / "conf").rglob("*.yaml")}
    in_tree |= {p.relative_to(ROOT).as_posix() for folder in ("core", "plugins") for p in (ROOT / folder).rglob("*.py")}
    assert in_tree <= set(names)
    assert any(n.endswith("LICENSE") for n in names)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == "<3.14,>=3.11"


def test_the_wheel_runs_elsewhere_and_is_not_led_astray(installed, elsewhere):
    site, _ = installed
    done = run([sys.executable, "-m", "core.serve", *TOY], elsewhere, site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "allocator=paged  [quire 0.1.0]" in done.stdout
    script = site / "bin" / "quire"
    done = run([sys.executable, script, "--help"], elsewhere, site)
    assert done.returncode == 0 and "allocator=paged" in done.stdout, done.stderr


def test_a_strangers_plugins_package_in_the_way_is_named(installed, elsewhere):
    (elsewhere / "plugins").mkdir()
    (elsewhere / "plugins" / "__init__.py").write_text("")
    done = run([sys.executable, "-m", "core.serve", *TOY], elsewhere, installed[0])
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the package name 'plugins' is taken by" in done.stderr


def check_lifo(cwd, *paths):
    done = run([sys.executable, "-m", "core.serve", *TOY, *LIFO], cwd, *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    for option in ("scheduler=lifo", "allocator=lastfit", "observers=steplog"):
        assert f"{option}  [quire-lifo 0.1.0]" in done.stdout
    assert "[quire_lifo.observers][INFO] - step 0:" in done.stdout
    done = run([sys.executable, "-m", "core.serve", *TOY], cwd, *paths)
    assert "quire-lifo" not in done.stdout, "installed is not active"
    done = run(
        [sys.executable, "-m", "core.serve", "-m", *TOY, "scheduler=glob(*)", "max_num_batched_tokens=4096"],
        cwd,
        *paths,
    )
    assert done.returncode == 0 and "0 failed" in done.stdout, done.stdout + done.stderr
    done = run([sys.executable, "-m", "core.serve", *TOY, "scheduler=lifo", "scheduler.max_runing=1"], cwd, *paths)
    assert done.returncode == 2 and "did you mean max_running?" in done.stderr


def test_an_outside_wheel_is_found_by_its_entry_point(tmp_path, elsewhere):
    pip("install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel(EXAMPLE, tmp_path), cwd=tmp_path)
    check_lifo(elsewhere, ROOT, tmp_path / "site")
    tests = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", EXAMPLE, EXAMPLE / "tests"],
        elsewhere,
        ROOT,
        tmp_path / "site",
    )
    assert tests.returncode == 0, tests.stdout + tests.stderr


def test_an_outside_package_works_when_installed_editable(tmp_path, elsewhere):
    """In a virtual environment of its own that also sees this one's packages."""
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    done = run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    assert done.returncode == 0, done.stderr
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join([*ours, str(ROOT)]) + "\n")
    words = ["install", "--no-deps", "--no-index", "--no-build-isolation", "-e", str(source)]
    done = run([python, "-m", "pip", "--disable-pip-version-check", *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run([python, "-m", "core.serve", *TOY, *LIFO], elsewhere)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scheduler=lifo  [quire-lifo 0.1.0]" in done.stdout
