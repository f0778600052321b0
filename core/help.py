"""The page that ``--help`` prints: every option with its summary, who offers it, and what is broken. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import core
from core.discovery import KINDS, Discovery, discover


def version() -> str:
    return core.__version__


def options_for_template() -> str:
    """The table, escaped for Hydra's help template."""
    return options_page(discover()).replace("$", "$$")


def options_page(found: Discovery) -> str:
    """One line an option, in the order of the groups, then what could not be loaded."""
    width = max((len(f"{option.kind}={option.name}") for option in found.options), default=0)
    lines = []
    for kind in KINDS:
        for option in sorted((each for each in found.options if each.kind == kind), key=lambda each: each.name):
            name = f"{kind}=[{option.name}]" if kind == "observers" else f"{kind}={option.name}"
            lines.append(f"  {name:<{width + 2}}  {option.summary}  [{option.dist} {option.version}]")
    lines += [f"  {f'experiment={name}':<{width + 2}}  {summary}" for name, summary in experiments()]
    lines += [f"  ! clash: {clash}" for clash in found.clashes]
    lines += [f"  ! broken: {broken}" for broken in found.broken]
    lines += [f"  - switched off: {name}" for name in found.off]
    return "\n".join(lines)


def experiments() -> list[tuple[str, str]]:
    """Name and summary of each shipped set-up: the comment in the second line of its YAML, without the page it names."""
    paths = sorted((Path(__file__).resolve().parent.parent / "conf" / "experiment").glob("*.yaml"))
    return [
        (path.stem, path.read_text().splitlines()[1].lstrip("# ").partition(" (docs/")[0].rstrip(".")) for path in paths
    ]
