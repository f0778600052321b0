"""From a request to what the engine is asked: prompts as token ids, words as tokens, and the text that ``echo`` repeats.

Everything here may be slow (long prompts), so it runs in a thread for large bodies and touches nothing that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import orjson

from core.frontends.logprobs import token_text
from core.frontends.loop import public_reason
from core.frontends.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
)
from core.params import KINDS, MAX_SEQUENCES, bad_word_ids, check_request
from core.text import TextError
from core.types import Limits, ModelInfo, RequestError, SamplingParams


@attrs.frozen
class Asked:
    """One request, ready for the engine and for ``answers``."""

    request: CompletionRequest | ChatRequest
    prompts: list[list[int]]
    echoes: list[str]  # what each prompt's answers begin with
    params: SamplingParams
    labels: dict[str, Any]

    @property
    def num_choices(self) -> int:
        """Answers that the client gets."""
        return len(self.prompts) * self.request.n


def prepare(request: CompletionRequest | ChatRequest, tokenizer: Any, model: ModelInfo, limits: Limits) -> Asked:
    """Tokenise and check. ``RequestError`` names the parameter that is wrong."""
    params = request.params()
    if request.bad_words:
        words = [ids for word in request.bad_words for ids in bad_word_ids(word, tokenizer)]
        params = attrs.evolve(params, bad_words=tuple(dict.fromkeys(words)))
    try:
        if isinstance(request, ChatRequest):
            texts: Sequence[str | list[int]] = [chat_text(request, tokenizer)]
        else:
            texts = request.prompt
        prompts = [
            tokenizer.encode(text, add_special_tokens=request.add_special_tokens) if isinstance(text, str) else text
            for text in texts
        ]
        if request.truncate_prompt_tokens is not None:
            prompts = [_truncated(ids, request.truncate_prompt_tokens, params, limits) for ids in prompts]
        _check_count(len(prompts), params.beam_width or params.n)
        for prompt in prompts:  # ``Engine.submit`` checks again, by then a prompt is at most max_model_len
            check_request(prompt, params, model, limits)
        echoes = _echoes(request, texts, prompts, tokenizer)
    except TextError as error:
        raise RequestError(public_reason(str(error)), "prompt") from error
    labels = {
        "cache_salt": request.cache_salt or "",
        "priority": request.priority,
        "session_id": request.session_id or "",
        "stall_s": request.stall_s,
        "service_class": request.service_class or "",
    }
    return Asked(request, prompts, echoes, params, labels)


def as_sent(error: RequestError, request: CompletionRequest | ChatRequest) -> ApiError:
    """An engine's refusal, with the parameter as this request spells it."""
    param = error.param
    if param == "prompt" and isinstance(request, ChatRequest):
        param = "messages"
    elif param in KINDS and request.structured_outputs is not None:
        param = f"structured_outputs.{'json' if param == 'json_schema' else param}"
    elif param in KINDS:
        param = "response_format.json_schema" if param == "json_schema" else "response_format"
    return ApiError(400, str(error), param=param)


def chat_text(request: ChatRequest | TokenizeRequest, tokenizer: Any) -> str:
    """The prompt that a chat stands for."""
    messages: list[Message] = request.messages or []
    rendered = [message.rendered() for message in messages]
    if request.continue_final_message:
        return tokenizer.chat(rendered, add_generation_prompt=False, continue_final_message=True)
    wanted = request.add_generation_prompt
    return tokenizer.chat(rendered, add_generation_prompt=True if wanted is None else wanted)


def _truncated(ids: list[int], limit: int, params: SamplingParams, limits: Limits) -> list[int]:
    """The last ``limit`` tokens; -1: as many as leave room for the answer."""
    if limit == -1:
        limit = max(1, limits.max_model_len - (params.max_tokens or 1))
    return ids[-limit:]


def _check_count(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        message = (
            f"{num_prompts} prompts with {n} answers each are {num_prompts * n} sequences; at most {MAX_SEQUENCES}"
        )
        raise RequestError(message, "n")


def _echoes(
    request: CompletionRequest | ChatRequest, texts: Sequence[str | list[int]], prompts: list[list[int]], tokenizer: Any
) -> list[str]:
    """A prompt as it was written, or what its token ids say. Of a chat, the assistant's message that is continued."""
    if not request.echo:
        return [""] * len(prompts)
    if isinstance(request, ChatRequest):
        last = request.messages[-1]
        return [last.content if last.role == "assistant" else ""]
    as_written = request.truncate_prompt_tokens is None
    return [
        text if isinstance(text, str) and as_written else tokenizer.decode(ids, request.skip_special_tokens)
        for text, ids in zip(texts, prompts, strict=True)
    ]


def tokenized(request: TokenizeRequest, tokenizer: Any, max_model_len: int) -> bytes:
    """The answer of ``/tokenize``. Raises ``TextError``."""
    if request.messages is not None:
        text, special = chat_text(request, tokenizer), bool(request.add_special_tokens)
    else:
        text, special = request.prompt or "", request.add_special_tokens is not False
    ids = tokenizer.encode(text, add_special_tokens=special)
    names = [token_text(tokenizer, id) for id in ids] if request.return_token_strs else None
    return orjson.dumps({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names})


def detokenized(request: DetokenizeRequest, tokenizer: Any, vocab_size: int) -> bytes:
    """The answer of ``/detokenize``. ``ApiError`` for an id outside the vocabulary."""
    bad = next((token for token in request.tokens if token >= vocab_size), None)
    if bad is not None:
        raise ApiError(400, f"tokens must be token ids from 0 to {vocab_size - 1}, got {bad}", param="tokens")
    return orjson.dumps({"prompt": tokenizer.decode(request.tokens, request.skip_special_tokens)})
