"""docs/api.md tells the truth: its tables and the request classes are held together here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from core.frontends.fields import NotYet
from core.frontends.openapi import document
from core.frontends.protocol import (
    IGNORED,
    NOT_YET_CHAT,
    NOT_YET_COMPLETION,
    NOT_YET_STREAM_OPTIONS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
MODELS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, StreamOptions)


def table(heading: str) -> dict[str, list[str]]:
    """First cell, without its marks -> the other cells."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    names = [row[0].strip("`") for row in cells]
    assert len(set(names)) == len(names), "a row twice"
    return {row[0].strip("`"): row[1:] for row in cells}


FIELDS = table("Fields of a request")
SERVED = {name for model in MODELS for name in model.model_fields}
REFUSED: NotYet = NOT_YET_COMPLETION | NOT_YET_CHAT | NOT_YET_STREAM_OPTIONS


def test_every_field_has_its_row_and_every_row_a_field() -> None:
    """Served, refused and ignored ones."""
    assert set(FIELDS) == SERVED | (set(REFUSED) - SERVED) | IGNORED
    assert all(len(cells) == 5 and all(cells) for cells in FIELDS.values())


def bounds(name: str) -> set[str]:
    """The numbers that the classes put on a field."""
    found: set[str] = set()

    def look(schema: Any) -> None:
        if isinstance(schema, dict):
            for key in ("minimum", "exclusiveMinimum", "maximum", "maxItems", "maxLength", "maxProperties"):
                if key in schema and abs(schema[key]) < 2**31 - 1:
                    found.add(f"{schema[key]:g}")
            for key in ("anyOf", "items", "additionalProperties"):
                inner = schema.get(key)
                for each in inner if isinstance(inner, list) else [inner]:
                    look(each)

    for model in MODELS:
        look(model.model_json_schema().get("properties", {}).get(name))
    return found - {"1"}  # at least one: said in words


@pytest.mark.parametrize("name", sorted(SERVED - {"tokens", "stop_token_ids", "allowed_token_ids", "prompt"}))
def test_limits_are_on_the_page(name: str) -> None:
    """What a class limits, its row names. (Of token ids the limit is the vocabulary.)"""
    missing = [
        number for number in bounds(name) if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", FIELDS[name][-1])
    ]
    assert not missing, f"{name}: {missing} in {FIELDS[name][-1]!r}"


def test_what_is_refused_says_which_value_is_not() -> None:
    """The row of a field that is not served names its defaults."""
    for name in set(REFUSED) - SERVED:
        cell = FIELDS[name][-1]
        assert cell.startswith(("n", "ignored")), name
        for default in REFUSED[name]:
            shown = str(default).lower() if isinstance(default, (bool, int, str)) else ""
            assert cell.startswith("ignored") or not shown or shown in cell, name


def test_every_route_has_its_row() -> None:
    """Both ways."""
    assert set(table("Routes")) == set(document("x")["paths"])
