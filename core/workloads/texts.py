"""Text to tokens for the workloads that have text: the engine's tokenizer, or without one so many characters a token."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from core.types import ConfigError
from core.workloads.draws import is_number
from core.workloads.reading import BadRow


class Encoder(Protocol):
    def __call__(self, text: str, vocab_size: int) -> list[int]: ...


def chars_per_token(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """An attrs validator: null, or a number of at least 1."""
    if value is not None and not (is_number(value) and value >= 1):
        raise ConfigError(f"workload.{attribute.name} must be null (use the tokenizer) or at least 1, got {value!r}")


@attrs.frozen(eq=False)
class TextCoder:
    """``chars`` null: ``tokenizer`` makes the tokens. Else every ``chars`` characters are one token, whose id is a fixed hash of
    them: equal beginnings stay equal, which is what a simulation needs.
    """

    tokenizer: Any  # core.text.Tokenizer | None
    chars: float | None

    def __attrs_post_init__(self) -> None:
        if self.tokenizer is None and self.chars is None:
            raise ConfigError(
                "this workload has text, and this executor has no tokenizer: set workload.chars_per_token, e.g. to 4"
            )

    def encode(self, text: str, vocab_size: int) -> list[int]:
        """Token ids of a text, or BadRow."""
        if self.chars is None:
            return self._tokens(text, add_special_tokens=True)
        size = max(1, round(self.chars))
        pieces = (text[i : i + size] for i in range(0, len(text), size))
        return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) % vocab_size for piece in pieces]

    def chat(self, messages: Sequence[Mapping[str, Any]], vocab_size: int) -> list[int]:
        """Token ids of a chat up to where the assistant answers, or BadRow."""
        if self.chars is not None:
            return self.encode("\n".join(f"{each['role']}: {each['content']}" for each in messages), vocab_size)
        if not self.tokenizer.has_chat_template:
            raise BadRow("it has messages, and this model has no chat template: give a prompt")
        try:
            text = self.tokenizer.chat(messages)
        except ValueError as error:
            raise BadRow(f"its messages do not fit the chat template: {error}") from error
        return self._tokens(text, add_special_tokens=False)

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise BadRow(f"its text cannot become tokens: {error}") from error
