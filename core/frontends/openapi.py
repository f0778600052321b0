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
    "this document allows it. On any route, in the same shape: 400 for bytes that are no HTTP, 404 for a path and 405 for a method that "
    "is not here, 431 for a head that is too large."
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
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],  # with frontend.api_keys, and without
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
    kept: Schema = {name: schema[name] for name in ("description", "title") if name in schema}
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
    401: "no API key, or not one of this server's",
    404: "no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not application/json",
    429: "too many requests wait: come back later",
    500: "the request failed; others are not touched",
    503: "nothing is served: the model is being loaded, the server stops, its engine stopped or hangs; or the request waited "
    "too long, or too many large ones are being received",
    504: "the request took too long",
}
_OPEN = (503,)  # of any route: while the model is being loaded the port answers already
_GUARDED = (401, *_OPEN)
_BODY = (400, 404, 408, 413, 415, *_GUARDED)
_GENERATION = (*_BODY, 429, 500, 504)
_SECONDS = {"description": "seconds to wait before trying again", "schema": {"type": "integer", "minimum": 1}}
_HEADERS: dict[int, Schema] = {
    401: {"WWW-Authenticate": {"schema": {"const": "Bearer"}}},
    429: {
        "Retry-After": _SECONDS,
        "retry-after-ms": {"description": "the same in milliseconds", "schema": {"type": "integer", "minimum": 1}},
    },
    503: {"Retry-After": _SECONDS},
}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REF + name}}}


def _errors(statuses: tuple[int, ...]) -> Schema:
    found: Schema = {}
    for status in sorted(statuses):
        headers = {"headers": _HEADERS[status]} if status in _HEADERS else {}
        found[str(status)] = {"description": _ERRORS[status], "content": _json("Error"), **headers}
    return found


def _responses(answer: str, statuses: tuple[int, ...], stream: bool = False) -> Schema:
    content = _json(answer)
    if stream:
        content["text/event-stream"] = {"schema": _EVENT}
    return {"200": {"description": "what was asked for", "content": content}, **_errors(statuses)}


def _post(name: str, summary: str, body: str, answer: str, statuses: tuple[int, ...] = _BODY) -> Schema:
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": _responses(answer, statuses, stream=statuses == _GENERATION),
        }
    }


def _get(name: str, summary: str, answer: str, statuses: tuple[int, ...] = _GUARDED, **more: Any) -> Schema:
    return {"get": {"operationId": name, "summary": summary, "responses": _responses(answer, statuses), **more}}


def _health(name: str, summary: str) -> Schema:
    return _get(name, summary, "Status", _OPEN, security=[])


def _plain(name: str, summary: str, content: Schema) -> Schema:
    good = {"200": {"description": "what was asked for", "content": content}}
    return {"get": {"operationId": name, "summary": summary, "responses": {**good, **_errors(_GUARDED)}}}


def _paths() -> Schema:
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    reset = {
        "operationId": "resetPrefixCache",
        "summary": "Forget cached prompts.",
        "responses": _responses("Status", (400, *_GUARDED)),
    }
    chat = _post("chat", "Answer a conversation.", "ChatRequest", "ChatCompletion", _GENERATION)
    return {
        "/v1/completions": _post("completions", "Continue prompts.", "CompletionRequest", "Completion", _GENERATION),
        "/v1/chat/completions": chat,
        "/v1/models": _get("models", "The names of the served model.", "Models"),
        "/v1/models/{model}": _get("model", "One of them.", "Model", (404, *_GUARDED), parameters=[model]),
        "/tokenize": _post("tokenize", "Token ids of a text or a chat.", "TokenizeRequest", "Tokens"),
        "/detokenize": _post("detokenize", "The text of token ids.", "DetokenizeRequest", "Text"),
        "/reset_prefix_cache": {"post": reset},
        "/health": _health("health", "Whether requests are taken."),
        "/health/ready": _health("ready", "Whether requests are taken."),
        "/health/live": _health("live", "Whether the process can work."),
        "/version": _get("version", "The version.", "Version"),
        "/load": _get("load", "Requests that are served or wait.", "Load"),
        "/metrics": _plain("metrics", "For Prometheus.", {"text/plain": {"schema": {"type": "string"}}}),
        "/openapi.json": _plain("openapi", "This document.", {"application/json": {}}),
    }
