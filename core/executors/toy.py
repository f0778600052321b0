"""``executor=toy``: a model whose KV entry is the token itself, so that a wrong block changes the output. No torch, no weights.

The next token is a hash of every token the sequence can see, read through its block table from the KV pool. A slot that was never
written, was freed and reused, or belongs to someone else holds another value, and the answer differs from the one a request gets alone:
that is what the engine's property tests rest on. Positions are hashed too, so an entry in the wrong place is seen as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from core.executors import StartHooks
from core.logits import NOTHING_LEFT, apply, edits_for
from core.text import ByteTokenizer
from core.types import (
    Batch,
    CacheConfig,
    Limits,
    ModelInfo,
    Move,
    SamplingBatch,
    StepOutput,
    TokenLogprobs,
    Unsamplable,
    failure,
)
from core.uniform import uniform

EMPTY = -(2**40)
"""What a slot holds before it is written; adding a position to it never gives a valid entry."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_LAYERS, _HEADS, _HEAD_DIM = 2, 2, 8


def _choose(logits: np.ndarray, temperature: float, number: float) -> int:
    """The best, or a draw by inverse CDF; ``Unsamplable`` when nothing is allowed."""
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise Unsamplable(NOTHING_LEFT)
    if temperature == 0:
        return best
    with np.errstate(over="ignore"):  # a tiny temperature: minus infinity is meant, of probability 0
        sums = np.exp((logits - logits[best]) / temperature).cumsum()
    return int(np.searchsorted(sums, number * sums[-1], side="right"))


def _logprobs(logits: np.ndarray, token_id: int, k: int) -> TokenLogprobs:
    values = logits - logits.max()
    values = values - np.log(np.exp(values).sum())
    order = np.argsort(-values, kind="stable")[:k]
    rank = int((values > values[token_id]).sum()) + 1
    return TokenLogprobs(token_id, float(values[token_id]), tuple((int(t), float(values[t])) for t in order), rank)


@attrs.define(eq=False)
class ToyExecutor:
    """Deterministic tokens at once, on the real clock or (``step_seconds`` > 0) on a virtual one that moves by it each step."""

    vocab_size: int = attrs.field(default=320, validator=attrs.validators.ge(258))
    max_position: int = attrs.field(default=4096, validator=attrs.validators.ge(2))
    eos_every: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # one token in so many is eos; 0: none
    step_seconds: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    text: str = ""  # answers spell this text, byte by byte, again and again, whatever the prompt
    tokenizer: ByteTokenizer = attrs.field(init=False)
    _slots: Any = attrs.field(init=False, default=None)  # int64 [blocks, block_size], or closed
    _host: Any = attrs.field(init=False, default=None)
    _limits: Limits = attrs.field(init=False, default=None)
    _now: float = attrs.field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self.tokenizer = ByteTokenizer(self.vocab_size)

    # ------------------------------------------------------------------------------------------- start

    def load(self) -> ModelInfo:
        return ModelInfo(
            name="toy",
            num_layers=_LAYERS,
            num_heads=_HEADS,
            num_kv_heads=_HEADS,
            head_dim=_HEAD_DIM,
            hidden_size=_HEADS * _HEAD_DIM,
            vocab_size=self.vocab_size,
            max_position=self.max_position,
            num_parameters=10_000,
            dtype="int64",
            kv_bytes_per_token=8,
            eos_token_ids=frozenset(self.tokenizer.eos_ids),
        )

    def prepare(self, hooks: StartHooks, cache: CacheConfig) -> list[str]:
        return []

    def fit_blocks(self, cache: CacheConfig, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Room for ``max_num_seqs`` sequences of ``max_model_len``, at most 65,536 tokens."""
        return max(2, min(max_num_seqs * max_model_len, 65_536) // cache.block_size)

    def allocate(self, limits: Limits) -> None:
        self._limits = limits
        self._slots = np.full((limits.num_blocks, limits.block_size), EMPTY, np.int64)
        self._host = np.full((max(1, limits.num_swap_blocks), limits.block_size), EMPTY, np.int64)

    def measure_cost(self) -> tuple[float, float]:
        """A made-up machine on which short sequences are cheaper to recompute and long ones to swap."""
        return 1e6, 1e10

    def warm_up(self) -> None:
        """Nothing is slow the first time."""

    # ------------------------------------------------------------------------------------------- a step

    def execute(self, batch: Batch, moves: Sequence[Move], sampling: SamplingBatch) -> StepOutput:
        self._now += self.step_seconds
        started = time.perf_counter()
        self._run_moves(moves)
        moved = time.perf_counter()
        self._slots.reshape(-1)[batch.slot_mapping] = batch.token_ids + (batch.positions.astype(np.int64) << 20)
        owners = np.searchsorted(batch.query_start, batch.logit_tokens, side="right") - 1
        lengths = batch.positions[batch.logit_tokens] + 1
        rows = [self._hash(batch, int(owner), int(length)) for owner, length in zip(owners, lengths, strict=True)]
        hashed = time.perf_counter()
        tokens, errors = [], {}
        for i in range(len(sampling)):
            try:
                tokens.append(self._draw(rows[sampling.rows[i]], sampling, i))
            except Exception as error:  # this request's own, as in core/sampler.py
                errors[i] = failure(error)
                tokens.append(-1)
        logprobs = None
        if any(p.logprobs is not None for p in sampling.params):
            logprobs = [
                None if p.logprobs is None or i in errors
                else _logprobs(self._logits(rows[sampling.rows[i]], self._scripted(sampling, i)), tokens[i], p.logprobs)
                for i, p in enumerate(sampling.params)
            ]  # fmt: skip
        scores = [_logprobs(self._logits(rows[one.row]), one.token_id, one.k) for one in sampling.scores]
        seconds = {"move": moved - started, "forward": hashed - moved, "sample": time.perf_counter() - hashed}
        return StepOutput(tokens, seconds, logprobs, errors, scores)

    def _run_moves(self, moves: Sequence[Move]) -> None:
        for kind, source, destination in moves:
            if kind == "copy":
                self._slots[destination] = self._slots[source]
            elif kind == "swap_out":
                self._host[destination] = self._slots[source]
            else:
                self._slots[destination] = self._host[source]

    def _hash(self, batch: Batch, owner: int, length: int) -> int:
        """A hash of the first ``length`` tokens of this sequence, read through its block table."""
        blocks = batch.block_tables[owner, : -(-length // batch.block_size)]
        seen = self._slots[blocks].reshape(-1)[:length].astype(np.uint64)
        # odd multipliers by place, so that order matters; wrap-around is meant
        places = np.arange(1, 2 * length, 2, dtype=np.uint64) * _MIX
        mixed = int(((seen + np.uint64(1)) * places).sum(dtype=np.uint64))
        return (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % 2**64 >> 11

    def _draw(self, row: int, sampling: SamplingBatch, i: int) -> int:
        params, position = sampling.params[i], sampling.positions[i]
        scripted = self._scripted(sampling, i)
        edits = edits_for(sampling, i, self.vocab_size, self.tokenizer.eos_ids)
        number = uniform(sampling.seeds[i], sampling.branches[i], position) if params.temperature > 0 else 0.0
        if edits is not None:
            return _choose(
                apply(self._logits(row, scripted), edits), params.temperature if scripted is None else 0, number
            )
        if scripted is not None:
            return scripted
        return self._token(row ^ int(number * 2**40))

    def _scripted(self, sampling: SamplingBatch, i: int) -> int | None:
        if not self.text:
            return None
        script = self.text.encode()
        return script[(sampling.positions[i] - sampling.num_prompt_tokens[i]) % len(script)]

    def _token(self, row: int) -> int:
        if self.eos_every and row % self.eos_every == 0:
            return self.tokenizer.eos_id
        token = row // 7 % self.vocab_size
        return token if token not in self.tokenizer.eos_ids else 0

    def _logits(self, row: int, best: int | None = None) -> np.ndarray:
        """Made-up logits [V] float64 of one place, the same for the same hash; the greedy token has the largest."""
        logits = np.random.default_rng(row).standard_normal(self.vocab_size)
        logits[list(self.tokenizer.eos_ids)] -= 10
        logits[self._token(row) if best is None else best] = logits.max() + 2
        return logits

    # ------------------------------------------------------------------------------------------- clock

    def now(self) -> float:
        return self._now if self.step_seconds else time.monotonic()

    def wait_until(self, t: float) -> None:
        if self.step_seconds:
            self._now = max(self._now, t)
        else:
            time.sleep(max(0.0, t - time.monotonic()))

    def describe(self) -> dict[str, Any]:
        clock = f"virtual, {self.step_seconds} s a step" if self.step_seconds else "real"
        return {"device": "cpu", "dtype": "int64", "kernels": {}, "clock": clock, "model": "toy"}

    def close(self) -> None:
        self._slots = self._host = None
