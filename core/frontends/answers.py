"""OpenAI's answer shapes, whole and in chunks: engine outputs in, JSON bytes out.

Whole answers and chunks are made from the same ``Delta`` by the same methods, a whole one from everything at once: that is why a
stream says what its answer would have said. A chunk of text alone is written into a piece that was made ready; only the JSON string
is new. The shapes are checked in the tests by the models of OpenAI's own client.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from core.frontends.fields import ApiError
from core.frontends.logprobs import CompletionLogprobs, chat_content, joined, prompt_logprobs
from core.frontends.loop import RAN_TOO_LONG, public_reason
from core.frontends.prepare import Asked
from core.types import UNSAMPLABLE, Output, TokenLogprobs

DONE = b"data: [DONE]\n\n"
_HOLE = "<here>"


def refuse_bad(output: Output, engine_stopped: bool = False) -> None:
    """Raise the error that an output carries, if it does."""
    message = public_reason(output.error or f"the request ended with {output.finish_reason}")
    if output.finish_reason == "refused":
        raise ApiError(400, message)
    if output.finish_reason == "abort":
        raise ApiError(504 if message.startswith(RAN_TOO_LONG) else 503, message)
    if output.finish_reason == "error" and message.startswith(UNSAMPLABLE):
        raise ApiError(400, message)
    if output.finish_reason == "error":
        raise ApiError(503 if engine_stopped else 500, message)


class Delta:
    """What a choice got since the last look."""

    __slots__ = ("text", "token_ids", "logprobs", "scores", "end")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.scores: tuple[TokenLogprobs, ...] = ()  # of the prompt
        self.end: Output | None = None

    def take(self, output: Output) -> None:
        """One step's."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.scores = self.scores or output.prompt_logprobs
        if output.finish_reason is not None:
            self.end = output


class Answer:
    """One answer in the making. ``add`` takes what a step gave; ``whole`` or the chunk methods give what the client gets."""

    prefix = ""
    object = ""
    chunk_object = ""
    shows_cached = True  # False: usage says nothing of what a prompt found in the cache

    def __init__(self, model: str, asked: Asked, tokenizer: Any):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._base = {"id": self.id, "created": int(time.time()), "model": model}
        self._asked, self._tokenizer = asked, tokenizer
        self._request = asked.request
        self._num_prompt_tokens = sum(map(len, asked.prompts))
        self._num_completion_tokens = 0
        self._cached: dict[int, int] = {}  # request id -> prompt tokens found in the cache
        self._num_branches = asked.params.n
        num = len(asked.prompts) * self._num_branches
        self._kept = [Delta() for _ in range(num)]  # for ``whole``
        self._begun = [False] * num
        self._include_usage = self._request.include_usage
        self._continuous = self._request.continuous_usage
        self._plain = self._request.num_logprobs is None and not self._request.return_token_ids and not self._continuous
        self._pieces = [self._cut(index) for index in range(num)] if self._request.stream else []

    def add(self, choice: int, output: Output) -> None:
        """Keep an output for ``whole``."""
        self._count(output)
        self._kept[choice].take(output)

    @property
    def num_shown(self) -> int:
        """Tokens and log probabilities that ``whole`` writes, about: what it costs."""
        scored = self._num_prompt_tokens if self._asked.params.prompt_logprobs is not None else 0
        return self._num_completion_tokens * (1 + (self._request.num_logprobs or 0)) + scored * self._num_branches

    def whole(self) -> bytes:
        """The answer as one JSON body. Touches nothing but itself, so a thread may do it."""
        choices = []
        extras: dict[str, Any] = {}
        for index, branch in enumerate(self._chosen()):
            delta = self._kept[branch]
            self._settle(branch, delta)
            first, more = self._extras(branch, delta)
            extras |= more
            end = delta.end
            choices.append(
                {
                    "index": index,
                    **self._text_field(delta.text),
                    "logprobs": self._logprobs(branch, delta),
                    "finish_reason": end.finish_reason if end is not None else None,
                    "stop_reason": end.stop_reason if end is not None else None,
                    **first,
                }
            )
        return orjson.dumps({**self._base, "object": self.object, "choices": choices, "usage": self._usage(), **extras})

    def opening(self) -> bytes:
        """The events before the first text."""
        return b""

    def events(self, outputs: Iterable[tuple[int, Output]]) -> bytes:
        """The events for what came since the last call: at most one with text per choice, and one that ends it."""
        deltas: dict[int, Delta] = {}
        for choice, output in outputs:
            self._count(output)
            deltas.setdefault(choice, Delta()).take(output)
        return b"".join(self._choice_events(choice, delta) for choice, delta in deltas.items())

    def closing(self) -> bytes:
        """The events after the last text."""
        if not self._include_usage:
            return DONE
        return _event({**self._base, "object": self.chunk_object, "choices": [], "usage": self._usage()}) + DONE

    # -------------------------------------------------------------------------------------------- from outputs

    def _count(self, output: Output) -> None:
        if not self._only_prompt:
            self._num_completion_tokens += len(output.token_ids)
        if output.num_cached_tokens and output.request_id not in self._cached:
            self._cached[output.request_id] = output.num_cached_tokens

    @property
    def _only_prompt(self) -> bool:
        """``max_tokens=0``: the engine's one token is not shown."""
        return self._request.max_tokens == 0

    def _settle(self, choice: int, delta: Delta) -> bool:
        """Put ``echo`` in front, once; True if this is the choice's first delta."""
        if self._only_prompt:
            delta.text, delta.token_ids, delta.logprobs = "", [], []
            if delta.end is not None:
                delta.end = delta.end._replace(finish_reason="length", stop_reason=None)
        if self._begun[choice]:
            return False
        self._begun[choice] = True
        delta.text = self._asked.echoes[choice // self._num_branches] + delta.text
        return True

    def _chosen(self) -> Sequence[int]:
        """The branches that are answered: all, or with ``best_of`` the ``n`` likeliest a token, best first."""
        n, made = self._request.n, self._num_branches
        groups = [range(at, at + made) for at in range(0, len(self._kept), made)]
        if n == made:
            return [branch for group in groups for branch in group]
        return [branch for group in groups for branch in sorted(group, key=self._unlikeliness)[:n]]

    def _unlikeliness(self, branch: int) -> float:
        logprobs = self._kept[branch].logprobs
        return -sum(one.logprob for one in logprobs) / max(1, len(logprobs))

    def _extras(self, choice: int, delta: Delta, first: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields beyond OpenAI's: (of the choice, of the whole answer)."""
        fields: dict[str, Any] = {}
        about_prompt: dict[str, Any] = {}
        prompt = self._asked.prompts[choice // self._num_branches]
        if self._request.return_token_ids:
            fields["token_ids"] = delta.token_ids
            if first:
                about_prompt["prompt_token_ids"] = prompt
        if self._request.prompt_logprobs is not None and first:
            shown = prompt_logprobs(self._tokenizer, delta.scores, self._request.prompt_logprobs)
            about_prompt["prompt_logprobs"] = shown
        return self._place(fields, about_prompt)

    def _place(self, fields: dict[str, Any], about_prompt: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        raise NotImplementedError

    def _logprobs(self, choice: int, delta: Delta) -> Any:
        """The choice's ``logprobs``; None unless asked for."""
        raise NotImplementedError

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._num_prompt_tokens, self._num_completion_tokens
        cached = {"cached_tokens": sum(self._cached.values())} if self.shows_cached else None
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": cached,
        }

    # -------------------------------------------------------------------------------------------- to chunks

    def _chunk(self, choice: dict[str, Any], index: int, **more: Any) -> dict[str, Any]:
        usage = {"usage": self._usage() if self._continuous else None} if self._include_usage else {}
        return {
            **self._base,
            "object": self.chunk_object,
            "choices": [{"index": index, "logprobs": None, **choice}],
            **usage,
            **more,
        }

    def _cut(self, index: int) -> tuple[bytes, bytes]:
        """A text chunk in two halves, to put a JSON string between."""
        whole = _event(self._chunk({"finish_reason": None, **self._delta_field(_HOLE)}, index))
        before, after = whole.rsplit(orjson.dumps(_HOLE), 1)
        return before, after

    def _text_event(self, choice: int, delta: Delta, first: bool) -> bytes:
        """A chunk with text and whatever belongs to its tokens; b"" where there is nothing to say."""
        if self._plain and not (first and self._request.prompt_logprobs is not None):
            if not delta.text:
                return b""
            before, after = self._pieces[choice]
            return before + _one_line(orjson.dumps(delta.text)) + after
        fields, more = self._extras(choice, delta, first)
        shown = {
            **self._delta_field(delta.text),
            "logprobs": self._logprobs(choice, delta),
            "finish_reason": None,
            **fields,
        }
        return _event(self._chunk(shown, choice, **more))

    def _text_field(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta_field(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _choice_events(self, choice: int, delta: Delta) -> bytes:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """``/v1/completions``: the chunk that ends a choice carries its last text."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(self, model: str, asked: Asked, tokenizer: Any):
        super().__init__(model, asked, tokenizer)
        request: Any = asked.request
        self._lists: list[CompletionLogprobs] = []
        if request.logprobs is not None:
            skip = request.skip_special_tokens
            self._lists = [CompletionLogprobs(tokenizer, request.logprobs, skip) for _ in self._kept]
        self._listed = [False] * len(self._lists)

    def _text_field(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta_field = _text_field

    def _place(self, fields: dict[str, Any], about_prompt: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return fields | about_prompt, {}

    def _logprobs(self, choice: int, delta: Delta) -> Any:
        if not self._lists:
            return None
        lists, prompt = self._lists[choice], choice // self._num_branches
        before = None
        if self._request.echo and not self._listed[choice]:
            before = lists.prompt(self._asked.prompts[prompt], delta.scores, len(self._asked.echoes[prompt]))
        self._listed[choice] = True
        found = lists.output(delta.logprobs)
        return found if before is None else joined(before, found)

    def _choice_events(self, choice: int, delta: Delta) -> bytes:
        first = self._settle(choice, delta)
        if delta.end is None:
            return self._text_event(choice, delta, first)
        fields, more = self._extras(choice, delta, first)
        end = delta.end
        shown = {
            "text": delta.text,
            "logprobs": self._logprobs(choice, delta),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
            **fields,
        }
        return _event(self._chunk(shown, choice, **more))


class ChatAnswer(Answer):
    """``/v1/chat/completions``: a role first, then text, then a chunk without text that ends the choice."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        """The role of every choice."""
        delta = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return b"".join(_event(self._chunk(delta, index)) for index in range(len(self._kept)))

    def _text_field(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta_field(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _place(self, fields: dict[str, Any], about_prompt: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return fields, about_prompt

    def _logprobs(self, choice: int, delta: Delta) -> Any:
        k = self._request.num_logprobs
        if k is None:
            return None
        return {"content": chat_content(self._tokenizer, delta.logprobs, k), "refusal": None}

    def _choice_events(self, choice: int, delta: Delta) -> bytes:
        first = self._settle(choice, delta)
        events = self._text_event(choice, delta, first)
        if delta.end is None:
            return events
        fields: dict[str, Any] = {
            "delta": {},
            "finish_reason": delta.end.finish_reason,
            "stop_reason": delta.end.stop_reason,
        }
        return events + _event(self._chunk(fields, choice))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + _one_line(orjson.dumps(data)) + b"\n\n"


def _one_line(json: bytes) -> bytes:
    """The same JSON without characters that some clients take for the end of a line, as Python's ``splitlines`` does."""
    if not json.isascii():
        for raw, escaped in ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085")):
            json = json.replace(raw, escaped)
    return json


def error_events(error: ApiError) -> bytes:
    """How a stream that has begun ends when something goes wrong."""
    return b"data: " + _one_line(error.body()) + b"\n\n" + DONE


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One entry of ``/v1/models``."""
    return {"id": name, "object": "model", "created": created, "owned_by": "quire", "max_model_len": max_model_len}


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``/v1/models``."""
    return {"object": "list", "data": list(cards)}
