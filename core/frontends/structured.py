"""``response_format`` (OpenAI's) and ``structured_outputs`` (vLLM's): two ways to ask for text of a given form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from core.frontends.fields import ApiError, Strict
from core.types import Structure

MAX_CHARS = 65_536


class JsonSchema(Strict):
    """A named JSON Schema. ``strict`` changes nothing here: what is asked for is always kept to."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")
    description: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool = False


class ResponseFormat(Strict):
    """OpenAI's: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structure(self) -> Structure | None:
        """For the engine."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Structure("json_object", "")
        if self.json_schema is None:
            raise ApiError(
                400, "response_format of type json_schema needs json_schema", param="response_format.json_schema"
            )
        return Structure("json_schema", _dumped(self.json_schema.schema_))


class StructuredOutputs(Strict):
    """vLLM's: exactly one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(None, min_length=1, max_length=MAX_CHARS)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = Field(None, min_length=1, max_length=MAX_CHARS)

    def structure(self) -> Structure | None:
        """For the engine."""
        found = []
        if self.json_ is not None:
            found.append(Structure("json_schema", self.json_ if isinstance(self.json_, str) else _dumped(self.json_)))
        if self.json_object:
            found.append(Structure("json_object", ""))
        if self.regex is not None:
            found.append(Structure("regex", self.regex))
        if self.choice is not None:
            found.append(Structure("choice", orjson.dumps(self.choice).decode()))
        if self.grammar is not None:
            found.append(Structure("grammar", self.grammar))
        if len(found) != 1:
            message = f"structured_outputs takes exactly one of json, json_object, regex, choice and grammar, got {len(found)}"
            raise ApiError(400, message, param="structured_outputs")
        return found[0]


def structure_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Structure | None:
    """What a request asks for; ``ApiError`` when it asks twice."""
    asked = [each.structure() for each in (response_format, structured) if each is not None]
    wanted = [each for each in asked if each is not None]
    if len(wanted) > 1:
        raise ApiError(400, "give response_format or structured_outputs, not both", param="structured_outputs")
    return wanted[0] if wanted else None


def _dumped(schema: dict[str, Any]) -> str:
    """As it came, for the order of properties is the order in which they are written."""
    return orjson.dumps(schema).decode()
