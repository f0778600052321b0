"""Log probabilities as the API gives them. JSON has no infinity: what is not finite becomes ``FLOOR``, OpenAI's number for it.

A token is shown as its text; where it is only part of a character, completions show it as ``bytes:\\xf0\\x9f``, and chats
carry the bytes beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from core.types import TokenLogprobs

FLOOR = -9999.0


def finite(value: float) -> float:
    """A number that JSON has."""
    return value if math.isfinite(value) else FLOOR


def token_text(tokenizer: Any, token_id: int) -> str:
    """A token as text, special tokens by their name."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """The four lists of one completion choice, piece by piece. Offsets are into the text of the choice."""

    def __init__(self, tokenizer: Any, k: int, skip_special_tokens: bool):
        self._tokenizer, self._k, self._skip = tokenizer, k, skip_special_tokens
        self._stream = tokenizer.stream(skip_special_tokens)
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs], num_chars: int) -> dict[str, list[Any]]:
        """For ``echo``: the first token has no probability, since nothing comes before it."""
        lists = self.output([TokenLogprobs(token_ids[0], 0.0), *scores])
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        self._stream = self._tokenizer.stream(self._skip)  # the answer's text begins afresh
        self._offset = num_chars
        return lists

    def output(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The next tokens."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            shown = token_text(self._tokenizer, one.token_id)
            top: dict[str, float] = {}
            for token, value in one.top[: self._k]:
                top.setdefault(token_text(self._tokenizer, token), finite(value))  # of equal texts the likeliest
            top.setdefault(shown, finite(one.logprob))
            lists["tokens"].append(shown)
            lists["token_logprobs"].append(finite(one.logprob))
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(self._offset)
            self._offset += len(self._stream.push(one.token_id))
        return lists


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two pieces as one."""
    return {name: first[name] + second[name] for name in first}


def chat_content(tokenizer: Any, logprobs: Sequence[TokenLogprobs], k: int) -> list[dict[str, Any]]:
    """``choices[].logprobs.content`` of a chat."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": finite(logprob)}

    return [
        {**shown(one.token_id, one.logprob), "top_logprobs": [shown(token, value) for token, value in one.top[:k]]}
        for one in logprobs
    ]


def prompt_logprobs(tokenizer: Any, scores: Sequence[TokenLogprobs], k: int) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: null for the first token, then by token id the token's own and the ``k`` best."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}

    found: list[dict[str, Any] | None] = [None]
    for one in scores:
        at = {str(one.token_id): entry(one.token_id, one.logprob, one.rank)}
        for rank, (token, value) in enumerate(one.top[:k], 1):
            at.setdefault(str(token), entry(token, value, rank))
        found.append(at)
    return found
