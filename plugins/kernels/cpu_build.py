"""Builds and loads the operators ``torch.ops.quire_cpu``: once a machine and torch version, kept in the cache folder.

``cpu_attention.cpp`` and ``cpu_layers.cpp`` are compiled once for each instruction set, ``cpu_ops.cpp`` against torch's
headers; together they are one shared library, and which instructions run is chosen when it is loaded. The library's name
holds a digest of the sources, the torch version, the flags and the compiler (``QUIRE_KERNELS`` names another folder). It
is put in place with one rename, so that processes that build at the same time do no harm to each other, and a process
that finds it needs no compiler.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

from core.fetch import cache_dir

LOG = logging.getLogger(__name__)
HERE = Path(__file__).resolve().parent
HEADERS = ("cpu_attend.h", "cpu_ops.h", "cpu_steps.h", "cpu_threads.h", "cpu_vector.h", "cpu_weights.h")
ARITHMETIC = ("cpu_attention", "cpu_layers")
COMPILERS = ("c++", "g++", "clang++")
INSTRUCTIONS = ("auto", "avx512", "avx2", "generic")
FLAGS = ["-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-w"]
COMPUTE_FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math"]
VARIANTS = {
    "generic": ["-DQUIRE_LANES=4"],
    "avx2": ["-DQUIRE_LANES=8", "-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-DQUIRE_LANES=16",
        *"-mavx512f -mavx512vl -mavx512bw -mavx512dq -mfma -mprefer-vector-width=512".split(),
    ],
}
BUILD_TIMEOUT_S = 300.0


class Unavailable(Exception):
    """Why the operators cannot be had here, in one line."""


@lru_cache(maxsize=1)
def load() -> str:
    """Make ``torch.ops.quire_cpu`` available and choose instructions (``QUIRE_CPU_INSTRUCTIONS``, default ``auto``).

    Gives a line that says which, and how long a build took. Raises ``Unavailable``.
    """
    wanted = os.environ.get("QUIRE_CPU_INSTRUCTIONS", "auto")
    if wanted not in INSTRUCTIONS:
        raise Unavailable(f"QUIRE_CPU_INSTRUCTIONS={wanted}: allowed are {', '.join(INSTRUCTIONS)}")
    if platform.system() != "Linux":
        raise Unavailable(f"its C++ is built on Linux only, this is {platform.system()}")
    library, built_s = find_or_build(kernels_dir())
    try:
        torch.ops.load_library(str(library))
        chosen = torch.ops.quire_cpu.use_instructions(wanted)
    except (OSError, RuntimeError, AttributeError) as error:
        raise Unavailable(f"{library.name} cannot be used: {_first_line(error)}") from error
    return f"{chosen} instructions" + (f", built in {built_s:.0f} s" if built_s else "")


def kernels_dir() -> Path:
    """``$QUIRE_KERNELS``, else ``kernels`` in the cache folder."""
    own = os.environ.get("QUIRE_KERNELS")
    return Path(own).expanduser().absolute() if own else cache_dir() / "kernels"


def variants() -> dict[str, list[str]]:
    """Flags by instruction set, for this architecture."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return VARIANTS
    return {"generic": VARIANTS["generic"]}


def find_or_build(folder: Path) -> tuple[Path, float]:
    """The library in ``folder``, and the seconds it took to build it (0.0: it was there). Raises ``Unavailable``."""
    digest = hashlib.sha256()
    for name in (*HEADERS, "cpu_ops.cpp", *(f"{name}.cpp" for name in ARITHMETIC)):
        digest.update((HERE / name).read_bytes())
    digest.update(repr([torch.__version__, platform.machine(), FLAGS, COMPUTE_FLAGS, variants()]).encode())
    stem = f"quire_cpu-{digest.hexdigest()[:16]}"
    compiler = _compiler()
    if compiler is None:
        kept = sorted(folder.glob(f"{stem}-*.so"))
        if kept:
            return kept[0], 0.0
        raise Unavailable(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)}; CXX names another)")
    version = _run([compiler, "--version"]).splitlines()[0]
    target = folder / f"{stem}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"
    if target.is_file():
        return target, 0.0
    started = time.perf_counter()
    LOG.info("kernel=cpu: building its operators with %s; this is done once and takes about 10 s", version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    except OSError as error:
        raise Unavailable(f"cannot write to the cache folder {folder} ({error.strerror})") from error
    try:
        os.replace(_build(compiler, work), target)
    except OSError as error:
        raise Unavailable(f"cannot build in the cache folder {folder} ({error.strerror})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target, time.perf_counter() - started


def _compiler() -> str | None:
    own = os.environ.get("CXX", "").split()
    for name in (*own[:1], *COMPILERS):
        if found := shutil.which(name):
            return found
    return None


def _build(compiler: str, work: Path) -> Path:
    """Every object, two at a time, and the library of them, in ``work``."""
    root = Path(torch.__file__).resolve().parent
    includes = [f"-isystem{root / 'include'}", f"-isystem{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    openmp = "-fopenmp"  # for at::parallel_for; torch has loaded the library of this name already, and that one is used
    jobs = [["-std=c++20", "-O2", openmp, abi, *includes, "-c", str(HERE / "cpu_ops.cpp"), "-o", str(work / "ops.o")]]
    for name, flags in variants().items():
        for source in ARITHMETIC:
            output = ["-c", str(HERE / f"{source}.cpp"), "-o", str(work / f"{source}-{name}.o")]
            jobs.append([*COMPUTE_FLAGS, *flags, f"-DQUIRE_ISA={name}", *output])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: _run([compiler, *FLAGS, *job]), jobs))
    made = work / "library.so"
    objects = [job[-1] for job in jobs]
    _run([compiler, "-shared", openmp, *objects, "-o", str(made), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"])
    return made


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the compiler {command[0]} cannot be run: {_first_line(error)}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise Unavailable(f"{command[0]} failed ({errors[0].strip()})")
    return done.stdout


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":  # python -m plugins.kernels.cpu_build: build ahead of time, for an image without a compiler
    try:
        print(load())
    except Unavailable as error:
        sys.exit(f"kernel=cpu: {error}")
