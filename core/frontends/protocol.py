"""OpenAI's request shapes, read strictly: what arrives is served as asked, or refused with the parameter's name.

* Types are not guessed: ``"0.7"`` and ``true`` are no temperatures, ``NaN`` is no JSON. ``null`` is the same as absent.
* What OpenAI's API (or vLLM's) knows and this server does not serve yet is refused, unless its value is that API's default.
* Fields that cannot change an answer (``user``, ``metadata`` ...) are accepted and ignored; unknown ones are refused by name.
* Beyond OpenAI's fields: ``top_k``, ``stop_token_ids`` and ``ignore_eos``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from core.types import SamplingParams

MAX_PROMPTS = 128  # prompts in one completion request
MAX_STOP_TOKEN_IDS = 128

IGNORED = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)

_NOT_YET: dict[str, tuple[Any, ...]] = {  # parameter -> the values that mean "not used"; null always does
    "n": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "priority": (0,),
    "cache_salt": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_token_ids": (False,),
    "store": (False,),
    "echo": (False,),
}
_NOT_YET_COMPLETION = _NOT_YET | {"logprobs": (), "suffix": ("",), "response_format": ({"type": "text"},)}
_NOT_YET_CHAT = _NOT_YET | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
_NOT_YET_MESSAGE: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "audio": (),
    "refusal": (),
    "annotations": ([],),
    "reasoning_content": (),
    "reasoning": (),
}
_NOT_YET_STREAM_OPTIONS: dict[str, tuple[Any, ...]] = {
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {"retry-after": "1"} if status == 503 else {}

    def body(self) -> bytes:
        """The JSON of the error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def _is(value: object, default: object) -> bool:
    """Equality in which ``true`` is not 1 and 0.0 is 0."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _served_fields(data: Any, not_yet: dict[str, tuple[Any, ...]], where: str = "") -> Any:
    """Take out what means "not used"; ``ApiError`` for what is asked for and not served."""
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        if name in not_yet:
            if value is not None and not any(_is(value, default) for default in not_yet[name]):
                raise ApiError(400, f"{where}{name}={_short(value)} is not supported yet", param=f"{where}{name}")
        else:
            kept[name] = value
    return kept


# ------------------------------------------------------------------------------------------------ fields

_PROMPT = "must be a string, a list of strings, a list of token ids or a list of token id lists"


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


def _content(value: object) -> str:
    """The text of a message: a string, or text parts, which become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_part(part) for part in value)


def _part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"parts of type {_short(kind)} are not supported yet")
    if kind != "text" or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError('each part must be {"type": "text", "text": ...}')
    return part["text"]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}


class StreamOptions(_Model):
    """What a stream carries beside the text."""

    include_usage: bool = False


class Message(_Model):
    """One turn of a chat. ``developer`` is what ``system`` is called now; templates know the old name."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]
    name: str | None = None

    def rendered(self) -> dict[str, str]:
        """As chat templates want it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class _Request(_Model):
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is allowed only with stream=true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self) -> SamplingParams:
        """For the engine."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=min(self.top_k, 2**31 - 1),  # more than any vocabulary: off
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


Shape = TypeVar("Shape", bound=_Request)


class CompletionRequest(_Request):
    """``POST /v1/completions``. ``max_tokens`` is 16 unless given, as in OpenAI's API."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    max_tokens: int | None = Field(16, ge=1)


class ChatRequest(_Request):
    """``POST /v1/chat/completions``. Without ``max_tokens`` an answer may fill what ``max_model_len`` leaves."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                400,
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} are the same limit: "
                "give one",
                param="max_completion_tokens",
            )
        return self

    def params(self) -> SamplingParams:
        """For the engine."""
        if self.max_completion_tokens is not None:
            return self.model_copy(
                update={"max_tokens": self.max_completion_tokens, "max_completion_tokens": None}
            ).params()
        return super().params()


# ------------------------------------------------------------------------------------------------ reading


def read_completion(body: bytes) -> CompletionRequest:
    """The request in a body; ``ApiError`` (400) names what is wrong with it."""
    data = _served_fields(_read_object(body), _NOT_YET_COMPLETION)
    return _validate(CompletionRequest, data)


def read_chat(body: bytes) -> ChatRequest:
    """The request in a body; ``ApiError`` (400) names what is wrong with it."""
    data = _served_fields(_read_object(body), _NOT_YET_CHAT)
    if isinstance(data.get("messages"), list):
        data["messages"] = [
            _served_fields(message, _NOT_YET_MESSAGE, f"messages[{index}].")
            for index, message in enumerate(data["messages"])
        ]
    return _validate(ChatRequest, data)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    return data


def _validate(shape: type[Shape], data: dict[str, Any]) -> Shape:
    options = data.get("stream_options")
    if options is not None:
        data["stream_options"] = _served_fields(options, _NOT_YET_STREAM_OPTIONS, "stream_options.")
    try:
        return shape.model_validate({name: value for name, value in data.items() if name not in IGNORED})
    except ValidationError as error:
        raise _explain(error) from error


def _explain(error: ValidationError) -> ApiError:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        return ApiError(400, f"missing required parameter: {param}", param=param)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unrecognized request argument: {param}", param=param)
    message = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return ApiError(400, f"{param}: {message}, got {_short(first['input'])}", param=param)


def _path(location: Sequence[str | int]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{_clip(step)}" if path else _clip(step)
    return path


def _clip(name: str) -> str:
    return name if len(name) <= 64 else name[:61] + "..."


def _short(value: object) -> str:
    return reprlib.repr(value)
