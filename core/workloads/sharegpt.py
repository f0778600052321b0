"""``workload=sharegpt``: conversations as ShareGPT files have them, ``[{id, conversations: [{from, value}]}]``.

A request is a conversation's first turn: what the human (or user) wrote is the prompt, the length of the answer the recorded
output. Conversations without such a pair are left out and counted. The file is one JSON array and is read piece by piece. It has no
times: choose ``arrivals``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from core.types import ConfigError
from core.workloads.draws import arrivals, closed, plain
from core.workloads.reading import BadRow, LeftOut, Row, TraceFile, json_array
from core.workloads.texts import TextCoder, chars_per_token

HUMAN = ("human", "user")
MODEL = ("gpt", "assistant", "chatgpt", "bing", "bard")


@attrs.define(eq=False, kw_only=True, slots=False)
class ShareGpt(TraceFile):
    """The first turn of every conversation."""

    arrivals: dict = attrs.field(factory=closed, converter=plain, validator=arrivals)
    chars_per_token: float | None = attrs.field(default=None, validator=chars_per_token)
    _coder: TextCoder | None = attrs.field(default=None, init=False)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Take the engine's tokenizer, before ``requests``."""
        self._coder = TextCoder(tokenizer, self.chars_per_token)

    def _records(self) -> Iterator[tuple[int, Any]]:
        if self._coder is None:
            raise ConfigError("workload=sharegpt needs a tokenizer: call use_tokenizer first")
        return json_array(self.path)

    def _row(self, record: Any, vocab_size: int) -> Row:
        if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
            raise BadRow("it must be an object with a list named conversations")
        prompt, answer = _first_turn(record["conversations"])
        assert self._coder is not None
        tokens = self._coder.encode(prompt, vocab_size)
        num_output = len(self._coder.encode(answer, vocab_size))
        return Row(
            prompt=tokens[: self.scaled(len(tokens))],
            num_output=self.scaled(num_output),
            label=str(record.get("id", "")),
        )


def _first_turn(turns: list[Any]) -> tuple[str, str]:
    for each in turns:
        if (
            not isinstance(each, dict)
            or not isinstance(each.get("value"), str)
            or not isinstance(each.get("from"), str)
        ):
            raise BadRow("each of conversations must have from and value, both text")
    turns = [each for each in turns if each["from"] != "system"]
    if len(turns) < 2 or turns[0]["from"] not in HUMAN or turns[1]["from"] not in MODEL:
        raise LeftOut("without a human turn and its answer")
    if not turns[0]["value"].strip() or not turns[1]["value"].strip():
        raise LeftOut("with an empty first turn")
    return turns[0]["value"], turns[1]["value"]
