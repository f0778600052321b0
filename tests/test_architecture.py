"""Guards: what may import what, how long things may be, that every hook is documented and every YAML lists its class's fields."""

from __future__ import annotations

import ast
import importlib
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import attrs
import pytest
import yaml
from omegaconf import OmegaConf

from core import hookspecs
from core.config import compose
from core.discovery import discover

ROOT = Path(__file__).resolve().parents[1]
SPINE = ("core.engine", "core.plugins", "core.hookspecs")  # read with all of core that they import
START_ONLY = {"core.discovery": "finds what is installed, once a process, before there is an engine"}
SPINE_LINES = 2883  # lines of code: no blank lines, comments and docstrings. It only falls: set it to what was reached
FILE_LINES = 400
FUNCTION_LINES = 60
LONG_FILES = {
    "core/types.py": "every value between the stages, mostly declarations",
    "core/engine.py": "the step loop with all it wires together, which a reader wants in one place",
    "plugins/kernels/triton_attention.py": "device functions that call each other, compiled together",
}
LONG_FUNCTIONS: dict[str, str] = {
    "plugins/__init__.py:provide_policies": "a table, one line an option",
    "plugins/kernels/triton_attention.py:attend_one": "one device function: what it shares with others is in functions already",
}
PRODUCT = sorted(path for folder in ("core", "plugins", "conf") for path in (ROOT / folder).rglob("*.py"))
OPTIONS = sorted(path for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name != "experiment")
CHAINS = [path for path in OPTIONS if "candidates" in path.read_text()]  # kernel=auto, linears=auto
YAMLS = [path for path in OPTIONS if path not in CHAINS]


def name(path):
    return path.relative_to(ROOT).as_posix()


def tree(path):
    return ast.parse(path.read_text(), filename=str(path))


def imports(node):
    """Every module that is imported anywhere in a file."""
    found = []
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            found += [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom) and not each.level:
            found.append(each.module or "")
    return found


@pytest.mark.parametrize("path", [p for p in PRODUCT if name(p).startswith("core/")], ids=name)
def test_core_imports_no_plugin(path):
    assert not [module for module in imports(tree(path)) if module.split(".")[0] in ("plugins", "quire_lifo")]


@pytest.mark.parametrize("path", [p for p in PRODUCT if name(p).startswith("plugins/")], ids=name)
def test_plugins_know_only_cores_contract(path):
    # core.fetch: where a kernel keeps what it built (cache_dir)
    allowed = {"core.types", "core.hookspecs", "core.blocks", "core.kernel", "core.cost", "core.fetch", "core.uniform"}
    if path.parent.name == "kernels":
        allowed |= {"core.model", "core.hugepages"}  # they sit on the device side: the model's layers, large pages
    used = {module for module in imports(tree(path)) if module.split(".")[0] == "core"}
    assert used <= allowed, f"plugins may import {sorted(allowed)}"


def test_the_spine_imports_no_torch():
    """With the import blocked, so that also an indirect one is seen; the plugins module and the toy executor alike."""
    modules = [*SPINE, "core", "core.kernel", "core.metrics", "core.executors.toy", "plugins"]
    code = f"""
import sys
for blocked in ("torch", "transformers", "hydra", "omegaconf"):
    sys.modules[blocked] = None
import importlib
for module in {modules!r}:
    importlib.import_module(module)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_toy_run_imports_no_torch(tmp_path):
    code = """
import sys
sys.modules["torch"] = None
from core.serve import main
sys.exit(main(["executor=toy", "frontend=replay", "frontend.progress=false", "workload.num_requests=2"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------ length


def code_lines(path):
    """Lines that hold code: no blank ones, comments or docstrings."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def spine():
    """Every module of core that the step loop imports, found by importing it: no list that a new module could be left off."""
    code = f"import sys, {', '.join(SPINE)}; print(*(m for m in sys.modules if m.split('.')[0] == 'core'))"
    return set(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.split())


def test_the_spine_can_be_read_in_one_sitting():
    modules = spine()
    assert modules >= {*SPINE, *START_ONLY}
    files = {each: ROOT / each.replace(".", "/") for each in modules - set(START_ONLY)}
    counted = {m: code_lines(f / "__init__.py" if f.is_dir() else f.with_suffix(".py")) for m, f in files.items()}
    assert sum(counted.values()) <= SPINE_LINES, sorted(counted.items(), key=lambda one: -one[1])


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_files_and_functions_stay_short(path):
    if name(path) not in LONG_FILES:
        assert len(path.read_text().splitlines()) <= FILE_LINES, "split it, or justify it in LONG_FILES"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{name(path)}:{node.name}"
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES or where in LONG_FUNCTIONS, f"{where} has {length} lines"


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_every_file_says_what_it_is_for(path):
    if path.read_text().strip():
        assert ast.get_docstring(tree(path)), "a module docstring"


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_no_exception_is_swallowed(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler) and len(node.body) == 1:
            assert not isinstance(node.body[0], ast.Pass), f"{name(path)}:{node.lineno}"


# ------------------------------------------------------------------------------------------------ contract


def hooks():
    return [(spec, hook) for spec in hookspecs.SPECS for hook in vars(spec) if not hook.startswith("_")]


@pytest.mark.parametrize(("spec", "hook"), hooks(), ids=lambda value: getattr(value, "__name__", value))
def test_every_hook_is_documented(spec, hook):
    text = getattr(spec, hook).__doc__
    assert text and len(text.split()) >= 10, "what it gives, when it is called, what None means"


@pytest.mark.parametrize("path", YAMLS, ids=name)
def test_every_yaml_lists_the_fields_of_its_class(path):
    """The same names; equal defaults, where both have one that is written out and the class is one option's."""
    given = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    target = given.pop("_target_")
    fields = {field.alias: field.default for field in attrs.fields(locate(target)) if field.init}
    assert sorted(given) == sorted(fields)
    if sum(1 for other in YAMLS if f"_target_: {target}\n" in other.read_text()) > 1:
        return  # several options of one class: each is a set of values
    for key, default in fields.items():
        written = isinstance(given[key], str) and ("${" in given[key] or given[key] == "???")
        if default is not attrs.NOTHING and not isinstance(default, attrs.Factory) and not written:
            assert given[key] == default, key


@pytest.mark.parametrize("path", YAMLS, ids=name)
def test_every_yaml_builds_what_its_option_says(path):
    option = discover().find(path.parent.name, path.stem)
    assert option is not None, "a line in plugins/__init__.py"
    assert yaml.safe_load(path.read_text())["_target_"] == option.target


@pytest.mark.parametrize("path", CHAINS, ids=name)
def test_a_chain_orders_candidates_that_it_has(path):
    node = compose([f"{path.parent.name}={path.stem}"])[path.parent.name]
    assert node.order and set(node.order) <= set(node.candidates)
    for candidate in node.candidates:
        assert discover().find(path.parent.name, candidate).target == node.candidates[candidate]._target_


def test_every_option_has_its_yaml():
    offered = {(option.kind, option.name) for option in discover().options if option.dist == "quire"}
    assert offered == {(path.parent.name, path.stem) for path in OPTIONS}


def locate(target):
    module, _, cls = target.rpartition(".")
    return getattr(importlib.import_module(module), cls)
