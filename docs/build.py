"""Writes the pages that come from the code: docs/hooks.md (core/hookspecs.py) and docs/options.md (the YAML files),
docs/ledger.md (the ledger).

``python docs/build.py`` writes them, ``python docs/build.py --check`` says which are out of date and exits 1.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from ledger_page import ledger_page  # noqa: E402

from core import hookspecs, types  # noqa: E402
from core.blocks import BlockPool  # noqa: E402
from core.cost import CostModel  # noqa: E402
from core.discovery import discover  # noqa: E402
from core.help import experiments  # noqa: E402

MARK = "<!-- written by docs/build.py from the code: do not edit -->\n\n"
TITLES = {
    "DiscoverySpec": "Discovery: once a process",
    "StartSpec": "Start: once an engine",
    "StepSpec": "Decisions of a step",
    "ObserverSpec": "Observers",
    "EndSpec": "The end",
}

LIVE = (types.View, types.SequenceView)
GIVEN = (BlockPool, CostModel)
DECISIONS = (
    (types.EngineInfo, types.Plan, types.Chunk, types.Lease, types.Move, types.Shortfall, types.Eviction)
    + (types.Release, types.Refusal, types.Triage, types.IdleChoice)
)  # fmt: skip
REPORTS = (types.StepReport, types.Preempted, types.Finished, types.MemoryReport)


def hooks_page() -> str:
    """The contract, hook by hook, from the docstrings."""
    parts = [MARK, "# Hooks: the contract between core and plugins\n\n", inspect.getdoc(hookspecs) or "", "\n"]
    for spec in hookspecs.SPECS:
        parts.append(f"\n## {TITLES[spec.__name__]}\n")
        if spec.__doc__:
            parts.append(f"\n{inspect.cleandoc(spec.__doc__)}\n")
        for name, function in vars(spec).items():
            if name.startswith("_"):
                continue
            signature = inspect.signature(function)
            arguments = [f"{p.name}: {p.annotation}" for p in signature.parameters.values() if p.name != "self"]
            plain = ", ".join(p for p in signature.parameters if p != "self")
            first = getattr(function, "quire_spec", {}).get("firstresult")
            kind = "one answer" if first else "every provider is asked"
            parts.append(f"\n### `{name}({plain})`\n\n")
            parts.append(f"`{name}({', '.join(arguments)}) -> {signature.return_annotation}` ({kind})\n\n")
            parts.append(f"{inspect.getdoc(function)}\n")
    return "".join([*parts, *values()])


def values() -> list[str]:
    """What hooks are given and give: fields with their comments, methods with their docstrings."""
    parts = [
        "\n## Values\n\nAll of them are imported from `core.types`, but `BlockPool` (`core.blocks`) and `CostModel` (`core.cost`).\n"
    ]
    for cls in LIVE:
        parts.append(f"\n### `{cls.__name__}`\n\n{inspect.getdoc(cls)}\n\n")
        for name, kind, comment in re.findall(
            r"^    ([a-z]\w*): ([^\n=#]+?)(?:  # (.*))?$", inspect.getsource(cls), re.MULTILINE
        ):
            parts.append(f"* `{name}: {kind}`{': ' if comment else ''}{comment}\n")
        parts += methods(cls)
    for cls in GIVEN:
        parts.append(f"\n### `{cls.__name__}`\n\n{inspect.getdoc(cls)}\n\n{''.join(methods(cls))}")
    for title, classes in (
        ("What `setup` is told, and what hooks give", DECISIONS),
        ("What observers are told", REPORTS),
    ):
        sources = "\n\n".join(re.sub(r"^@.*\n", "", inspect.getsource(cls)) for cls in classes)
        parts.append(f"\n### {title}\n\n```python\n{sources}```\n")
    return parts


def methods(cls: type) -> list[str]:
    """Properties and methods that say what they do, in the order of the source."""
    parts = []
    for name, each in vars(cls).items():
        function = each.fget if isinstance(each, property) else each
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        signature = inspect.signature(function)
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        call = f"{name}: {signature.return_annotation}" if isinstance(each, property) else f"{name}{signature}"
        call = call.replace("'", "") if "= '" not in call else re.sub(r"(?<!= )'(\w[^']*)'", r"\1", call)
        parts.append(f"* `{call}`: {' '.join(inspect.getdoc(function).split())}\n")
    return parts


def options_page() -> str:
    """Every option of every group with its fields and defaults, from conf/."""
    parts = [MARK, "# Options\n\n`group=option` chooses, `group.field=value` sets a field: "]
    parts.append(
        "`python -m core.serve allocator=paged scheduler.watermark=0.02`. `--help` lists what is installed.\n\n"
    )
    parts.append("## Root\n\n```yaml\n")
    parts.append((ROOT / "conf" / "config.yaml").read_text().strip() + "\n```\n")
    kinds: dict[str, list] = {}
    for option in discover().options:
        if option.dist == "quire":
            kinds.setdefault(option.kind, []).append(option)
    for kind, options in kinds.items():
        parts.append(f"\n## {kind}\n\n")
        for option in options:
            parts.append(f"### `{kind}={option.name}`\n\n{option.summary[0].upper()}{option.summary[1:]}.\n\n")
            path = ROOT / "conf" / kind / f"{option.name}.yaml"
            if path.exists():
                parts.append(f"```yaml\n{path.read_text().strip()}\n```\n\n")
    parts.append(
        "## experiment\n\nA whole set-up by name; its page in [experiments](experiments) has the commands and what came out.\n\n"
    )
    parts += [f"* [`experiment={name}`](experiments/{name}.md): {summary}\n" for name, summary in experiments()]
    return "".join(parts).rstrip() + "\n"


PAGES = {"hooks.md": hooks_page, "options.md": options_page, "ledger.md": lambda: MARK + ledger_page()}


def main() -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / "docs" / name, make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.write_text(text)
    if "--check" in sys.argv and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`")
        return 1
    print(f"{len(stale)} of {len(PAGES)} pages written" if stale else "pages are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
