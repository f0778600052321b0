"""Quire: an LLM serving engine whose policies are plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.api import build as build

__all__ = ["__version__", "build"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # lazy: `import core` stays light, and plugins can import core.types without Hydra
    if name == "build":
        from core.api import build

        return build
    raise AttributeError(f"module 'core' has no attribute {name!r}")
