"""What the product may not contain: ways to run what somebody sent, and connections that nobody asked for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "plugins", "conf", "benchmarks", "docs", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts)

UNPICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
CONNECTS = {
    "urllib",
    "requests",
    "httpx",
    "aiohttp",
    "urllib3",
    "http",
    "ftplib",
    "smtplib",
    "telnetlib",
    "xmlrpc",
    "pycurl",
}
CONNECTS |= {"websockets", "grpc", "zmq", "socketserver", "huggingface_hub"}
RUNS = {"subprocess", "pty", "code", "codeop", "runpy"}
ALLOWED_IMPORTS = {
    (
        "core/sources.py",
        "huggingface_hub",
    ): "fetches the model that the operator names, safetensors and text files only",
    ("core/start.py", "subprocess"): "asks git for the revision, for the manifest",
    ("core/fetch.py", "subprocess"): "pip, for the default model's package",
    ("plugins/kernels/cpu_build.py", "subprocess"): "the compiler, on the source beside it",
    ("core/conformance/common.py", "subprocess"): "pytest on a plugin, called by a developer",
}
ALLOWED_ELSEWHERE = {"benchmarks", "docs", "examples"}  # may start processes and speak to the server that they measure
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
METHODS = {
    ("torch", "load"): "unpickles; weights are safetensors or GGUF",
    ("yaml", "load"): "may build objects; safe_load",
    ("yaml", "unsafe_load"): "builds objects",
    ("yaml", "full_load"): "builds objects",
    ("os", "system"): "a shell",
    ("os", "popen"): "a shell",
    ("jinja2", "Environment"): "templates run in an immutable sandbox",
    ("jinja2", "Template"): "templates run in an immutable sandbox",
    ("tempfile", "mktemp"): "a race",
    ("hashlib", "md5"): "no names of a cache by a broken hash",
    ("hashlib", "sha1"): "no names of a cache by a broken hash",
    ("torch", "hub"): "fetches code",
}
KEYWORDS = {"trust_remote_code": True, "shell": True, "allow_pickle": True, "weights_only": False, "verify": False}


def found_in(source: str, name: str = "core/x.py") -> list[str]:
    """What a file has that it may not, as ``line: what``."""
    tree = ast.parse(source)
    names = _names(tree)
    found = []
    for node in ast.walk(tree):
        for module in _modules(node):
            found += [f"{node.lineno}: import {module}" for _ in range(_forbidden(module, name))]
        if isinstance(node, ast.ImportFrom):
            pairs = {(node.module, alias.name) for alias in node.names} & set(METHODS)
            found += [f"{node.lineno}: from {module} import {member}" for module, member in sorted(pairs)]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = (names.get(node.value.id, node.value.id), node.attr)
            found += [f"{node.lineno}: {'.'.join(pair)}" for _ in range(pair in METHODS)]
        if isinstance(node, ast.Name) and node.id in CALLS:
            found.append(f"{node.lineno}: {node.id}")
        if isinstance(node, ast.Call):
            found += [
                f"{node.lineno}: {word.arg}"
                for word in node.keywords
                if word.arg in KEYWORDS
                and not (isinstance(word.value, ast.Constant) and word.value.value != KEYWORDS[word.arg])
            ]
    return found


def _names(tree: ast.AST) -> dict[str, str]:
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {alias.asname: alias.name for alias in aliases if alias.asname}


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.split(".")[0]]
    return []


def _forbidden(module: str, name: str) -> bool:
    if module in UNPICKLES:
        return True
    if (name, module) in ALLOWED_IMPORTS or name.split("/")[0] in ALLOWED_ELSEWHERE:
        return False
    return module in CONNECTS | RUNS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_runs_or_fetches_what_somebody_sent(path: Path) -> None:
    """No pickle, eval, shell, remote code, unsafe YAML, plain Jinja; connections only where the list above says why."""
    assert found_in(path.read_text(), path.relative_to(ROOT).as_posix()) == []


def test_every_exception_is_still_needed() -> None:
    for name, module in ALLOWED_IMPORTS:
        assert any(module in _modules(node) for node in ast.walk(ast.parse((ROOT / name).read_text()))), (name, module)


@pytest.mark.parametrize(
    "source",
    ["import pickle",
     "from pickle import loads", "def f():\n import urllib.request", "eval('1')", "f = exec",
     "import torch\ntorch.load(x)",
     "import torch as t\nt.load(x)", "from torch import load",
     "import yaml\nyaml.load(x, Loader=yaml.SafeLoader)", "f(x, trust_remote_code=True)",
     "f(x, trust_remote_code=flag)", "run(c, shell=True)", "numpy.load(f, allow_pickle=True)", "from jinja2 import Environment",
     "import subprocess", "import http.client", "import os\nos.system(c)", "import requests as r"],
)  # fmt: skip
def test_what_is_forbidden_is_found(source: str) -> None:
    assert found_in(source)


@pytest.mark.parametrize(
    "source",
    ["import json\njson.load(f)", "'import pickle'",
     "import yaml\nyaml.safe_load(x)", "model.eval()", "f(trust_remote_code=False)",
     "from jinja2.sandbox import ImmutableSandboxedEnvironment",
     "re.compile(x)"],
)  # fmt: skip
def test_what_is_allowed_is_not(source: str) -> None:
    assert found_in(source) == []
