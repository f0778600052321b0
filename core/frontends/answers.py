"""OpenAI's answer shapes, whole and in chunks: engine outputs in, JSON bytes out.

The constant part of a chunk is written once a request; a step then costs one JSON string per choice. The shapes are checked in the
tests by the models of OpenAI's own client.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from core.frontends.loop import public_reason
from core.frontends.protocol import ApiError
from core.types import Output

DONE = b"data: [DONE]\n\n"
_HOLE = "<here>"


def refuse_bad(output: Output, engine_stopped: bool = False) -> None:
    """Raise the error that an output carries, if it does."""
    message = public_reason(output.error or f"the request ended with {output.finish_reason}")
    if output.finish_reason == "refused":
        raise ApiError(400, message)
    if output.finish_reason == "abort":
        raise ApiError(503, message)
    if output.finish_reason == "error":
        raise ApiError(503 if engine_stopped else 500, message)


class Answer:
    """One answer in the making. ``add`` takes what a step gave; ``whole`` or the chunk methods give what the client gets."""

    prefix = ""
    object = ""
    chunk_object = ""

    def __init__(self, model: str, num_prompt_tokens: int, num_choices: int, include_usage: bool = False):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._base = {"id": self.id, "created": int(time.time()), "model": model}
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._cached: dict[int, int] = {}  # request id -> prompt tokens found in the cache
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._ends: list[Output | None] = [None] * num_choices
        self._include_usage = include_usage
        self._pieces = [self._cut(index) for index in range(num_choices)]

    def add(self, choice: int, output: Output) -> None:
        """Keep an output for ``whole``."""
        self._count(output)
        self._texts[choice].append(output.text)
        if output.finish_reason is not None:
            self._ends[choice] = output

    def whole(self) -> bytes:
        """The answer as one JSON body."""
        choices = []
        for index, (texts, end) in enumerate(zip(self._texts, self._ends, strict=True)):
            reason, stop = (end.finish_reason, end.stop_reason) if end is not None else (None, None)
            choices.append(
                {
                    "index": index,
                    **self._text_field("".join(texts)),
                    "logprobs": None,
                    "finish_reason": reason,
                    "stop_reason": stop,
                }
            )
        return orjson.dumps({**self._base, "object": self.object, "choices": choices, "usage": self._usage()})

    def opening(self) -> bytes:
        """The events before the first text."""
        return b""

    def events(self, outputs: Iterable[tuple[int, Output]]) -> bytes:
        """The events for what came since the last call: at most one with text per choice, and one that ends it."""
        texts: dict[int, str] = {}
        ends: dict[int, Output] = {}
        for choice, output in outputs:
            self._count(output)
            texts[choice] = texts.get(choice, "") + output.text
            if output.finish_reason is not None:
                ends[choice] = output
        return b"".join(self._choice_events(choice, text, ends.get(choice)) for choice, text in texts.items())

    def closing(self) -> bytes:
        """The events after the last text."""
        if not self._include_usage:
            return DONE
        return _event({**self._base, "object": self.chunk_object, "choices": [], "usage": self._usage()}) + DONE

    def _count(self, output: Output) -> None:
        self._num_completion_tokens += len(output.token_ids)
        if output.num_cached_tokens and output.request_id not in self._cached:
            self._cached[output.request_id] = output.num_cached_tokens

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._num_prompt_tokens, self._num_completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    def _chunk(self, choice: dict[str, Any], index: int) -> dict[str, Any]:
        usage = {"usage": None} if self._include_usage else {}
        return {
            **self._base,
            "object": self.chunk_object,
            "choices": [{"index": index, "logprobs": None, **choice}],
            **usage,
        }

    def _cut(self, index: int) -> tuple[bytes, bytes]:
        """A text chunk in two halves, to put a JSON string between."""
        whole = _event(self._chunk({"finish_reason": None, **self._delta_field(_HOLE)}, index))
        before, after = whole.rsplit(orjson.dumps(_HOLE), 1)
        return before, after

    def _text_event(self, choice: int, text: str) -> bytes:
        before, after = self._pieces[choice]
        return before + orjson.dumps(text) + after

    def _text_field(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta_field(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _choice_events(self, choice: int, text: str, end: Output | None) -> bytes:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """``/v1/completions``: the chunk that ends a choice carries its last text."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def _text_field(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta_field = _text_field

    def _choice_events(self, choice: int, text: str, end: Output | None) -> bytes:
        if end is None:
            return self._text_event(choice, text) if text else b""
        fields = {"text": text, "finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
        return _event(self._chunk(fields, choice))


class ChatAnswer(Answer):
    """``/v1/chat/completions``: a role first, then text, then a chunk without text that ends the choice."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        """The role of every choice."""
        delta = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return b"".join(_event(self._chunk(delta, index)) for index in range(len(self._texts)))

    def _text_field(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta_field(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _choice_events(self, choice: int, text: str, end: Output | None) -> bytes:
        events = self._text_event(choice, text) if text else b""
        if end is None:
            return events
        fields = {"delta": {}, "finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
        return events + _event(self._chunk(fields, choice))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error_events(error: ApiError) -> bytes:
    """How a stream that has begun ends when something goes wrong."""
    return b"data: " + error.body() + b"\n\n" + DONE


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "quire", "max_model_len": max_model_len}


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``/v1/models``."""
    return {"object": "list", "data": list(cards)}
