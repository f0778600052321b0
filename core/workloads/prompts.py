"""``workload=prompts``: JSON lines of prompts of your own.

    {"prompt": "Write a haiku.", "max_tokens": 40}
    {"messages": [{"role": "user", "content": "Hello"}], "arrival_s": 1.5, "session_id": "a"}
    {"prompt": [1, 2, 3], "output_tokens": 20}

One of ``prompt`` (text or token ids) and ``messages`` (through the model's chat template) is needed. Optional: ``max_tokens``
(else ``workload.max_tokens``), ``output_tokens`` (the recorded length; else max_tokens), ``arrival_s``, ``priority``,
``client_id``, ``session_id``, ``cache_salt``, ``deadline_s``, ``label``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from core.types import ConfigError
from core.workloads.draws import closed, flag, integer, plain, trace_arrivals
from core.workloads.reading import BadRow, Row, TraceFile, json_object, jsonl_records, seconds, whole
from core.workloads.texts import TextCoder, chars_per_token

TEXT_FIELDS = ("client_id", "session_id", "cache_salt", "label")
FIELDS = ("prompt", "messages", "max_tokens", "output_tokens", "arrival_s", "priority", "deadline_s", *TEXT_FIELDS)


@attrs.define(eq=False, kw_only=True, slots=False)
class Prompts(TraceFile):
    """One line, one request. Answers may end by themselves unless ``ignore_eos``."""

    arrivals: dict = attrs.field(factory=closed, converter=plain, validator=trace_arrivals)
    ignore_eos: bool = attrs.field(default=False, validator=flag)
    max_tokens: int = attrs.field(default=128, validator=integer(1))  # of lines that do not say
    chars_per_token: float | None = attrs.field(default=None, validator=chars_per_token)
    _tokenizer: Any = attrs.field(default=None, init=False)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Take the engine's tokenizer, before ``requests``; without one, lines must have token ids."""
        self._tokenizer = tokenizer

    def _records(self) -> Iterator[tuple[int, str]]:
        return jsonl_records(self.path)

    def _row(self, record: str, vocab_size: int) -> Row:
        values = json_object(record)
        unknown = sorted(set(values) - set(FIELDS))
        if unknown:
            raise BadRow(f"it has no field {unknown[0]}; allowed: {', '.join(FIELDS)}")
        tokens = self._prompt(values, vocab_size)
        max_tokens = whole(values.get("max_tokens", self.max_tokens), "max_tokens", low=1)
        num_output = whole(values.get("output_tokens", max_tokens), "output_tokens", low=1)
        texts = {name: values[name] for name in TEXT_FIELDS if name in values}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise BadRow(f"{name} must be text, got {value!r}")
        fields: dict[str, Any] = {name: texts[name] for name in ("client_id", "cache_salt") if name in texts}
        if "priority" in values:
            if not isinstance(values["priority"], int) or isinstance(values["priority"], bool):
                raise BadRow(f"priority must be a whole number, got {values['priority']!r}")
            fields["priority"] = values["priority"]
        if values.get("deadline_s") is not None:
            fields["deadline_s"] = seconds(values["deadline_s"], "deadline_s")
        return Row(
            prompt=tokens[: self.scaled(len(tokens))],
            max_tokens=self.scaled(max(max_tokens, num_output)),
            num_output=self.scaled(num_output),
            time_s=seconds(values["arrival_s"], "arrival_s") if "arrival_s" in values else None,
            session_id=texts.get("session_id", ""),
            label=texts.get("label", ""),
            fields=fields,
        )

    def _prompt(self, values: dict[str, Any], vocab_size: int) -> list[int]:
        if ("prompt" in values) == ("messages" in values):
            raise BadRow("it needs one of prompt and messages")
        prompt = values.get("prompt")
        if isinstance(prompt, list):
            tokens = [whole(each, "each token of prompt") for each in prompt]
            if any(token >= vocab_size for token in tokens):
                raise BadRow(f"prompt has token {max(tokens)}: the model's vocabulary ends at {vocab_size - 1}")
        elif isinstance(prompt, str):
            tokens = self._coder().encode(prompt, vocab_size)
        elif "prompt" in values:
            raise BadRow(f"prompt must be text or a list of token ids, got {prompt!r}")
        else:
            tokens = self._coder().chat(_messages(values["messages"]), vocab_size)
        if not tokens:
            raise BadRow("its prompt is empty")
        return tokens

    def _coder(self) -> TextCoder:
        try:
            return TextCoder(self._tokenizer, self.chars_per_token)
        except ConfigError as error:
            raise BadRow(str(error)) from error


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadRow("messages must be a list with at least one message")
    for each in messages:
        if (
            not isinstance(each, dict)
            or not isinstance(each.get("role"), str)
            or not isinstance(each.get("content"), str)
        ):
            raise BadRow("each of messages must have role and content, both text")
    return messages
