"""How single fields of a request are read: strictly, with one clear line for what is wrong. ``protocol`` makes requests of them."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema, model_validator

from core.discovery import did_you_mean
from core.params import MAX_SALT_CHARS

MAX_PROMPTS = 128  # prompts in one completion request
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_BIASES = 1024
MAX_NAME_CHARS = 256  # of session_id and service_class
MAX_STALL_S = 86_400  # a day

NotYet = dict[str, tuple[Any, ...]]
"""Parameter -> the values that mean "not used"; null always does."""


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {"retry-after": "1"} if status == 503 else {}
        if retry_after_s is not None:  # whole seconds for everyone, milliseconds for OpenAI's client
            self.headers = {
                "retry-after": str(math.ceil(retry_after_s)),
                "retry-after-ms": str(math.ceil(retry_after_s * 1000)),
            }

    def body(self) -> bytes:
        """The JSON of the error."""
        kind = "requests" if self.status == 429 else "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def served_fields(data: Any, not_yet: NotYet, where: str = "") -> Any:
    """Take out what means "not used"; ``ApiError`` for what is asked for and not served."""
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        if name in not_yet:
            if value is not None and not any(_is(value, default) for default in not_yet[name]):
                allowed = " or ".join(orjson.dumps(default).decode() for default in (*not_yet[name], None))
                instead = "; structured_outputs takes its place" if name.startswith("guided_") else ""
                message = f"{where}{name}={short(value)} is not supported; allowed is {allowed}{instead}"
                raise ApiError(400, message, param=f"{where}{name}")
        else:
            kept[name] = value
    return kept


def _is(value: object, default: object) -> bool:
    """Equality in which ``true`` is not 1 and 0.0 is 0."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def short(value: object) -> str:
    """A value in a message, however long it is."""
    return reprlib.repr(value)


class Strict(BaseModel):
    """Types are not guessed, unknown names are refused, and null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}


# ------------------------------------------------------------------------------------------------ kinds of fields

TokenId = Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"format": "token-id"})]
_PROMPT = "must be a string, a list of strings, a list of token ids or a list of token id lists"
_PromptInput = (
    str
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[str | Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if type(value) is not list:
        raise ValueError(_PROMPT)
    if not value:
        raise ValueError("the prompt cannot be empty")
    if type(value[0]) is int:
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, got {len(value)}")
    return [item if isinstance(item, str) else _token_ids(item) for item in value]


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(_PROMPT)
    return value


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be null, a string or a list of up to 4 strings")
    if "" in stops:
        raise ValueError("a stop string cannot be empty")
    if len(stops) > 4:
        raise ValueError(f"at most 4 stop strings, got {len(stops)}")
    return tuple(stops)


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers from -100 to 100")
    if len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} entries, got {len(value)}")
    for key, bias in value.items():
        if not re.fullmatch(r"\d{1,10}", key, re.ASCII):
            raise ValueError(f"{short(key)} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise ValueError(f"a bias must be a number from -100 to 100, not {short(bias)}")
    found = {int(key): float(bias) for key, bias in value.items()}
    if len(found) < len(value):
        raise ValueError("a token id is named twice")
    return found


def _content(value: object) -> str:
    """The text of a message: a string, or text parts, which become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_part(part) for part in value)


def _part(part: object) -> str:
    fields: dict[str, Any] = part if isinstance(part, dict) else {}
    kind = fields.get("type")
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"parts of type {short(kind)} are not supported, only of type 'text'")
    if kind != "text" or fields.keys() != {"type", "text"} or not isinstance(fields["text"], str):
        raise ValueError('each part must be {"type": "text", "text": ...}')
    return fields["text"]


class TextPart(BaseModel):
    """A part of a message, for the schema."""

    model_config = ConfigDict(extra="forbid")
    type: Annotated[str, Field(pattern="^text$")]
    text: str


_StopText = Annotated[str, Field(min_length=1, max_length=1024)]
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASES,
}
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts, json_schema_input_type=_PromptInput)]
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_stop, json_schema_input_type=_StopText | Annotated[list[_StopText], Field(max_length=4)]),
]
Biases = Annotated[dict[int, float], PlainValidator(_bias), WithJsonSchema(_BIASES)]
Content = Annotated[
    str, PlainValidator(_content, json_schema_input_type=str | Annotated[list[TextPart], Field(min_length=1)])
]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
PRINTABLE = r"^[!-~]+$"
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS, pattern=PRINTABLE)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=PRINTABLE)]


# ------------------------------------------------------------------------------------------------ bodies and errors


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; ``ApiError`` (400) if it is none."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(
            400, f"the body is not valid JSON: {error}" if body else "the body is empty, not a JSON object"
        ) from error
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, got {short(data)}")
    return data


_ELSEWHERE = {
    "prompt": "a chat takes messages",
    "messages": "a completion takes a prompt; chats go to /v1/chat/completions",
}
_KINDS = {
    "string_type": "a string", "int_type": "an integer", "int_parsing_size": "an integer", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "list_type": "a list", "dict_type": "an object",
    "model_type": "an object", "model_attributes_type": "an object",
}  # fmt: skip
_PATTERNS = {PRINTABLE: "printable characters without space", r"^[a-zA-Z0-9_-]+$": "letters, digits, _ and -"}
_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def explain(error: ValidationError, shape: type[BaseModel]) -> ApiError:
    """The first thing that is wrong with a request of this shape, in one line: the field, what is allowed, the value."""
    first = error.errors(include_url=False)[0]
    where = [step for step in first["loc"] if step != "dict[str,any]"]  # a kind of value, not a place
    param, kind, about = _path(where), first["type"], first.get("ctx", {})
    if kind == "missing":
        return ApiError(400, f"missing required parameter: {param}", param=param)
    if kind == "extra_forbidden":
        known = [field.alias or name for name, field in shape.model_fields.items()] if len(where) == 1 else []
        hint = f" ({_ELSEWHERE[param]})" if param in _ELSEWHERE else did_you_mean(param, known)
        return ApiError(400, f"unrecognized request argument: {param}{hint}", param=param)
    value = first["input"]
    if kind in _KINDS:
        rule = f"must be {_KINDS[kind]}"
    elif kind == "string_pattern_mismatch":
        rule = f"must have only {_PATTERNS[about['pattern']]}"
    elif about.get("min_length") == 1:
        rule = "cannot be empty"
    elif "max_length" in about:
        rule = f"must have at most {about['max_length']} {'characters' if isinstance(value, str) else 'items'}, got {len(value)}"
    elif set(about) & set(_BOUNDS):
        rule = f"must be {_range(shape, where, about)}"
    else:
        rule = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ").replace("should be", "must be")
    said = rule if ", got " in rule else f"{rule}, got {short(value)}"
    return ApiError(400, f"{param}: {said}", param=param)


def _range(shape: type[BaseModel], where: Sequence[str | int], broken: Mapping[str, Any]) -> str:
    """Both bounds of a field where it has two, but none that only keeps numbers within what the engine counts with."""
    field = shape.model_fields.get(str(where[0])) if len(where) == 1 else None
    bounds = {
        name: getattr(each, name)
        for each in (field.metadata if field else ())
        for name in _BOUNDS
        if hasattr(each, name)
    }
    bounds = {name: bound for name, bound in bounds.items() if abs(bound) < 2**31 - 1} | {
        name: broken[name] for name in _BOUNDS if name in broken
    }
    return " and ".join(
        _BOUNDS[name].format(f"{bounds[name]}".removesuffix(".0")) for name in _BOUNDS if name in bounds
    )


def _path(location: Sequence[str | int]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{_clip(step)}" if path else _clip(step)
    return path


def _clip(name: str) -> str:
    return name if len(name) <= 64 else name[:61] + "..."
