"""What the schedulers share: who continues, and who may start beside them. Order is each scheduler's own.

``Room`` is the budget of one step. A running sequence asks with ``take_running``, a newcomer with ``take_new``; the answer is
the number of tokens to plan, 0 when there is no room. Blocks are counted for a newcomer's whole sequence, so that a prefill
that starts can end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop

from core.types import Chunk, ConfigError, EngineInfo, SequenceView, View, one_token


class Room:
    """Tokens, rows and blocks that are left in this step."""

    __slots__ = ("tokens", "rows", "free", "limit", "_size", "_hold", "_cached", "_empty", "_headroom")

    def __init__(self, view: View, watermark: float, limit: int | None = None):
        running = len(view.running)
        self.tokens = view.max_num_batched_tokens
        self.rows = view.max_num_seqs - running
        self.free = view.num_free_blocks - int(
            watermark * view.num_blocks
        )  # watermark: blocks that newcomers leave free
        self.limit = limit or view.max_num_batched_tokens  # most tokens of one prompt
        self._size = view.block_size
        self._hold = -(-running // view.block_size)  # blocks that those that run take in this step, about
        self._cached = view.cached_tokens
        self._empty = not running
        self._headroom = 0.0

    def expect_growth(self, running: Sequence[SequenceView], share: float) -> None:
        """Keep free, too, this share of the blocks that ``running`` and newcomers are still expected to fill."""
        self._headroom = share
        tokens = 0
        for sequence in running:
            tokens += max(0, sequence.predicted_output_tokens - sequence.num_output_tokens)
        self.free -= int(share * tokens / self._size)

    def decodes(self, running: Sequence[SequenceView]) -> int:
        """Set the budget of decodes apart, one token each; gives how many of ``running`` get theirs."""
        count = 0
        for sequence in running:
            if sequence.num_tokens - sequence.num_computed_tokens == 1:
                count += 1
        count = min(count, self.tokens)
        self.tokens -= count
        return count

    def missing_blocks(self, sequence: SequenceView) -> int:
        """Blocks for the whole sequence, less those it has. A preempted one waits until those that run can take their next step
        beside it, too: otherwise it would be pushed out again at once."""
        blocks = -(-sequence.num_tokens // self._size)
        if sequence.where == "device":
            blocks -= len(sequence.block_table)
        if self._headroom:
            growth = max(0, sequence.predicted_output_tokens - sequence.num_output_tokens)
            blocks += -(-int(self._headroom * growth) // self._size)
        return blocks + (self._hold if sequence.num_preemptions else 0)

    def fits(self, sequence: SequenceView) -> bool:
        """Whether a newcomer may start: a row, a token and its blocks are there. What comes first in an empty engine always may."""
        if self.tokens < 1 or self.rows < 1:
            return False
        return self._empty or self.missing_blocks(sequence) <= self.free

    def left(self, sequence: SequenceView) -> int:
        """Tokens that a newcomer has to compute before it is sampled, as far as the cache was looked at."""
        return sequence.num_tokens - (sequence.num_computed_tokens or self._cached.get(sequence.id, 0))

    def take_running(self, sequence: SequenceView) -> int:
        """Tokens of a prefill under way."""
        n = min(sequence.num_tokens - sequence.num_computed_tokens, self.tokens, self.limit)
        self.tokens -= n
        return n

    def take_new(self, sequence: SequenceView) -> int:
        """Tokens of a newcomer that ``fits``; takes its row and its blocks."""
        n = min(self.left(sequence), self.tokens, self.limit)
        self.tokens -= n
        self.rows -= 1
        self.free -= self.missing_blocks(sequence)
        self._empty = False
        return n


def continue_running(room: Room, running: Sequence[SequenceView]) -> list[Chunk]:
    """Decodes one token each before anything else, then prefills under way; the plan lists them in the order given, so that the
    last of them gives way first when blocks run short."""
    missing = [sequence.num_tokens - sequence.num_computed_tokens for sequence in running]
    decodes = min(missing.count(1), room.tokens)
    room.tokens -= decodes
    if decodes == len(missing):
        return [one_token(sequence.id) for sequence in running]
    chunks = []
    for sequence, n in zip(running, missing, strict=True):
        if n == 1:
            if decodes:
                decodes -= 1
                chunks.append(one_token(sequence.id))
        elif room.tokens:
            chunks.append(Chunk(sequence.id, room.take_running(sequence), True))
    return chunks


def in_order(sequences: Sequence[SequenceView], key: Callable[[SequenceView], float]) -> Iterator[SequenceView]:
    """Smallest key first, then as they are given. A heap: a step starts few of the many that wait."""
    heap = list(zip(map(key, sequences), range(len(sequences)), strict=True))
    heapify(heap)
    while heap:
        yield sequences[heappop(heap)[1]]


def start_waiting(room: Room, waiting: Iterable[SequenceView]) -> list[Chunk]:
    """Newcomers in the order given, in chunks of what the step leaves. Nobody is skipped: the first without room ends it."""
    chunks = []
    for sequence in waiting:
        if not room.fits(sequence):
            break
        chunks.append(Chunk(sequence.id, room.take_new(sequence)))
    return chunks


def require_whole_prefills(name: str, engine_info: EngineInfo) -> None:
    """Refuse at start what could never be planned: a scheduler that does not cut prompts needs a step as long as the longest."""
    limits = engine_info.limits
    if limits.max_num_batched_tokens < limits.max_model_len:
        raise ConfigError(
            f"scheduler={name} computes a prompt in one step, so max_num_batched_tokens={limits.max_num_batched_tokens} must be at "
            f"least max_model_len={limits.max_model_len}"
        )
