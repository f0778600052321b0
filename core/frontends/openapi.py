"""The OpenAPI 3.1 document of the API, from the classes that read the requests: what it says is what is accepted.

One thing a schema cannot say is left to the words: fields depend on each other (``min_tokens`` and ``max_tokens``), on
the prompt's length and on the model's vocabulary. Such a request gets 400 although the document allows it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from core.frontends.fields import NotYet
from core.frontends.protocol import (
    IGNORED,
    NOT_YET_CHAT,
    NOT_YET_COMPLETION,
    NOT_YET_MESSAGE,
    NOT_YET_STREAM_OPTIONS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Schema = dict[str, Any]
_WORDS = (
    "Integers are written without a point. null is the same as leaving a field out. Fields also depend on each other, on "
    "the prompt's length and on what the server was started with: such a request gets 400 with the field's name although "
    "this document allows it."
)
_REF = "#/components/schemas/"
_BODIES: dict[str, tuple[type[BaseModel], NotYet]] = {
    "CompletionRequest": (CompletionRequest, NOT_YET_COMPLETION),
    "ChatRequest": (ChatRequest, NOT_YET_CHAT),
    "TokenizeRequest": (TokenizeRequest, {}),
    "DetokenizeRequest": (DetokenizeRequest, {}),
}
_NOT_YET_OF_PARTS = {"Message": NOT_YET_MESSAGE, "StreamOptions": NOT_YET_STREAM_OPTIONS}


def document(version: str, vocab_size: int = 2**31) -> Schema:
    """The whole document, as JSON values. Token ids are below ``vocab_size``."""
    schemas = _with_vocabulary(_schemas(), vocab_size)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version, "license": {"name": "Apache-2.0"}, "description": _WORDS},
        "paths": _paths(),
        "components": {"schemas": schemas},
    }


# ------------------------------------------------------------------------------------------------ requests


def _schemas() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for name, (model, not_yet) in _BODIES.items():
        schema = model.model_json_schema(by_alias=True, ref_template=_REF + "{model}")
        found |= {part: _part(part, each) for part, each in schema.pop("$defs", {}).items()}
        found[name] = _nullable(schema, not_yet | dict.fromkeys(IGNORED, ()), ignored=IGNORED)
    return found | _ANSWERS


def _with_vocabulary(schema: Any, vocab_size: int) -> Any:
    if isinstance(schema, list):
        return [_with_vocabulary(each, vocab_size) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_vocabulary(each, vocab_size) for name, each in schema.items()}
    return found | {"exclusiveMaximum": vocab_size} if found.get("format") == "token-id" else found


def _part(name: str, schema: Schema) -> Schema:
    return _nullable(schema, _NOT_YET_OF_PARTS.get(name, {})) if schema.get("type") == "object" else schema


def _nullable(schema: Schema, not_yet: NotYet, ignored: frozenset[str] = frozenset()) -> Schema:
    """Null is the same as absent for every field that has a default; what is not served takes its default alone."""
    required = set(schema.get("required", ()))
    properties = {
        name: each if name in required else _or_null(each) for name, each in schema.get("properties", {}).items()
    }
    for name, defaults in not_yet.items():
        if name in ignored:
            properties[name] = {"description": "accepted and ignored"}
        else:
            properties[name] = {"enum": [*defaults, None], "description": "not served: its default alone"}
    return {**schema, "properties": properties}


def _or_null(schema: Schema) -> Schema:
    if any(each.get("type") == "null" for each in schema.get("anyOf", ())):
        return {name: value for name, value in schema.items() if name != "default"}
    kept = {name: schema[name] for name in ("description", "title") if name in schema}
    inner = {name: value for name, value in schema.items() if name not in (*kept, "default")}
    return {**kept, "anyOf": [inner, {"type": "null"}]}


# ------------------------------------------------------------------------------------------------ answers


def _object(properties: Schema, required: str = "", more: bool = True) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split() or list(properties),
        "additionalProperties": more,
    }


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_NULLABLE_STRING = {"type": ["string", "null"]}
_TOKENS = {"type": "array", "items": _INTEGER}
_FINISH = {"enum": ["stop", "length", None]}
_STOP_REASON = {"type": ["string", "integer", "null"]}
_TOP = {"type": "object", "additionalProperties": _NUMBER}
_USAGE = _object(
    {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": {"type": ["object", "null"]},
    },
    "prompt_tokens completion_tokens total_tokens",
)
_LISTS = _object(
    {
        "tokens": {"type": "array", "items": _STRING},
        "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
        "top_logprobs": {"type": "array", "items": {"anyOf": [_TOP, {"type": "null"}]}},
        "text_offset": _TOKENS,
    },
    more=False,
)
_PROMPT_LOGPROBS = {"type": ["array", "null"], "items": {"type": ["object", "null"]}}
_SHOWN = {"token": _STRING, "bytes": _TOKENS, "logprob": _NUMBER}
_SHOWN_TOKEN = _object(
    {**_SHOWN, "top_logprobs": {"type": "array", "items": _object(_SHOWN, more=False)}},
    more=False,
)
_CHAT_LOGPROBS = _object({"content": {"type": "array", "items": _SHOWN_TOKEN}, "refusal": {"type": "null"}}, more=False)
_CHOICE = {
    "index": _INTEGER,
    "finish_reason": _FINISH,
    "stop_reason": _STOP_REASON,
    "token_ids": _TOKENS,
}
_COMPLETION_CHOICE = _object(
    {
        **_CHOICE,
        "text": _STRING,
        "logprobs": {"anyOf": [_LISTS, {"type": "null"}]},
        "prompt_token_ids": _TOKENS,
        "prompt_logprobs": _PROMPT_LOGPROBS,
    },
    "index text logprobs finish_reason",
    more=False,
)
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _STRING, "refusal": {"type": "null"}},
    more=False,
)
_CHAT_CHOICE = _object(
    {**_CHOICE, "message": _MESSAGE, "logprobs": {"anyOf": [_CHAT_LOGPROBS, {"type": "null"}]}},
    "index message logprobs finish_reason",
    more=False,
)


def _answer(kind: str, choice: Schema, **more: Schema) -> Schema:
    return _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _INTEGER,
            "model": _STRING,
            "choices": {"type": "array", "items": choice, "minItems": 1},
            "usage": {"$ref": _REF + "Usage"},
            **more,
        },
        "id object created model choices usage",
        more=False,
    )


_EVENT = _object(
    {"data": {"type": "string", "description": "a chunk of the answer as JSON; the last is [DONE]"}}, "data"
)
_CARD = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _STRING,
        "max_model_len": _INTEGER,
    },
    more=False,
)
_ANSWERS: dict[str, Schema] = {
    "Usage": _USAGE,
    "Completion": _answer("text_completion", _COMPLETION_CHOICE),
    "ChatCompletion": _answer(
        "chat.completion", _CHAT_CHOICE, prompt_token_ids=_TOKENS, prompt_logprobs=_PROMPT_LOGPROBS
    ),
    "Tokens": _object(
        {
            "count": _INTEGER,
            "max_model_len": _INTEGER,
            "tokens": _TOKENS,
            "token_strs": {"type": ["array", "null"], "items": _STRING},
        },
        more=False,
    ),
    "Text": _object({"prompt": _STRING}, more=False),
    "Model": _CARD,
    "Models": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _CARD}}, more=False),
    "Status": _object({"status": {"const": "ok"}}, more=False),
    "Version": _object({"version": _STRING}, more=False),
    "Load": _object({"server_load": _INTEGER}, more=False),
    "Error": _object(
        {
            "error": _object(
                {"message": _STRING, "type": _STRING, "param": _NULLABLE_STRING, "code": _NULLABLE_STRING}, more=False
            )
        },
        more=False,
    ),
}


# ------------------------------------------------------------------------------------------------ routes

_ERRORS = {
    400: "the request cannot be served as asked; `param` names the field",
    404: "no such model",
    413: "the body is too large",
    415: "the body is not application/json",
    429: "too many requests wait",
    500: "the request failed; others are not touched",
    503: "nothing is served: starting to stop, or stopped",
}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF + name}}}


def _responses(answer: str, statuses: tuple[int, ...], stream: bool = False) -> Schema:
    content = _json(answer)
    if stream:
        content["text/event-stream"] = {"schema": _EVENT}
    good = {"200": {"description": "what was asked for", "content": content}}
    return good | {str(status): {"description": _ERRORS[status], "content": _json("Error")} for status in statuses}


def _post(name: str, summary: str, body: str, answer: str, stream: bool = False) -> Schema:
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": _responses(answer, (400, 404, 413, 415, *((429, 500, 503) if stream else ())), stream),
        }
    }


def _get(name: str, summary: str, answer: str, *statuses: int, **more: Any) -> Schema:
    return {"get": {"operationId": name, "summary": summary, "responses": _responses(answer, statuses), **more}}


def _paths() -> Schema:
    text = {"text/plain": {"schema": {"type": "string"}}}
    metrics = {"operationId": "metrics", "summary": "For Prometheus.",
               "responses": {"200": {"description": "metrics", "content": text}}}  # fmt: skip
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    reset = {
        "operationId": "resetPrefixCache",
        "summary": "Forget cached prompts.",
        "responses": _responses("Status", (400, 503)),
    }
    anything = {"responses": {"200": {"description": "this document", "content": {"application/json": {}}}}}
    return {
        "/v1/completions": _post("completions", "Continue prompts.", "CompletionRequest", "Completion", True),
        "/v1/chat/completions": _post("chat", "Answer a conversation.", "ChatRequest", "ChatCompletion", True),
        "/v1/models": _get("models", "The names of the served model.", "Models"),
        "/v1/models/{model}": _get("model", "One of them.", "Model", 404, parameters=[model]),
        "/tokenize": _post("tokenize", "Token ids of a text or a chat.", "TokenizeRequest", "Tokens"),
        "/detokenize": _post("detokenize", "The text of token ids.", "DetokenizeRequest", "Text"),
        "/reset_prefix_cache": {"post": reset},
        "/health": _get("health", "Whether requests are taken.", "Status", 503),
        "/health/ready": _get("ready", "Whether requests are taken.", "Status", 503),
        "/health/live": _get("live", "Whether the process can work.", "Status", 503),
        "/version": _get("version", "The version.", "Version"),
        "/load": _get("load", "Requests that are served or wait.", "Load"),
        "/metrics": {"get": metrics},
        "/openapi.json": {"get": {"operationId": "openapi", "summary": "This document.", **anything}},
    }
