"""Distributions made up for a test: a module and a dist-info folder in a folder that the test puts on sys.path."""

from __future__ import annotations

from pathlib import Path

HEADER = """
from core.hookspecs import hookimpl
from core.types import Policy
quire_api_version = 1
"""


def offers(kind: str, name: str, target: str, summary: str = "made up") -> str:
    """Source of a plugin module that offers one option."""
    return f"""{HEADER}
@hookimpl
def provide_policies():
    return [Policy({kind!r}, {name!r}, {target!r}, {summary!r})]
"""


def add_dist(
    folder: Path, name: str, source: str, *, version: str = "1.0", module: str | None = None, entry: str | None = None
) -> str:
    """Put a distribution whose entry point in group ``quire`` is a module with this source; gives the module's name."""
    module = module or name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[quire]\n{entry or f'{module} = {module}'}\n")
    (info / "top_level.txt").write_text(f"{module}\n")
    return module
