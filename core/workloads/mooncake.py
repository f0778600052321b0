"""``workload=mooncake``: the Mooncake traces, JSON lines with timestamp (ms), input_length, output_length, hash_ids.

https://github.com/kvcache-ai/Mooncake. A hash id stands for a block of 512 prompt tokens together with all before it, so equal ids
mean an equal prefix. Its tokens are a fixed hash of (seed, id, index): requests that share blocks there share tokens here, in
every run. ``scale`` divides the lengths and the block alike, which keeps the sharing: 32 makes blocks of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from core.types import ConfigError
from core.workloads.draws import hashed_tokens, integer, is_whole
from core.workloads.reading import BadRow, LeftOut, Row, TraceFile, json_object, jsonl_records, required, seconds, whole


@attrs.define(eq=False, kw_only=True, slots=False)
class MooncakeTrace(TraceFile):
    """One line, one request. ``block_size`` is what a hash id of the file stands for, in tokens before scaling."""

    block_size: int = attrs.field(default=512, validator=integer(1))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.block_size % self.scale:
            raise ConfigError(
                f"workload.scale must divide workload.block_size={self.block_size}, so that blocks stay whole, got {self.scale}"
            )

    def _records(self) -> Iterator[tuple[int, str]]:
        return jsonl_records(self.path)

    def _row(self, record: str, vocab_size: int) -> Row:
        values = json_object(record)
        length = whole(required(values, "input_length"), "input_length", low=1)
        num_output = whole(required(values, "output_length"), "output_length")
        ids = required(values, "hash_ids")
        if not isinstance(ids, list):
            raise BadRow(f"hash_ids must be a list of whole numbers, got {type(ids).__name__}")
        needed = -(-length // self.block_size)
        if len(ids) != needed:
            raise BadRow(
                f"input_length {length} is {needed} blocks of {self.block_size} tokens, but hash_ids has {len(ids)}"
            )
        time_s = seconds(required(values, "timestamp"), "timestamp") / 1e3
        if not all(is_whole(each, 0) for each in ids):  # any size: hashes may fill 64 bits
            raise BadRow("each of hash_ids must be a whole number of at least 0")
        if not num_output:
            raise LeftOut("without output (output_length 0)")
        num_prompt = -(-length // self.scale)  # rounded up, so that every block keeps a token
        tokens = self._expand(ids, int(num_prompt), vocab_size)
        return Row(prompt=tokens, num_output=self.scaled(num_output), time_s=time_s)

    def _expand(self, ids: list[int], num_tokens: int, vocab_size: int) -> list[int]:
        size = int(self.block_size // self.scale)
        tokens: list[int] = []
        for each in ids:
            tokens += hashed_tokens(self.seed, each, min(size, num_tokens - len(tokens)), vocab_size)
        return tokens
