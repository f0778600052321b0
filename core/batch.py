"""Pack: a plan with its leases becomes the index arrays of one step. Pure but for its buffers, which are reused every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from core.state import Sequence
from core.types import Batch, Limits, SamplingBatch, Score

MAX_SCORED_TOKENS = 256
"""Prompt tokens that are scored in one step, over all sequences: each costs a row of logits as wide as the vocabulary."""


class Run(NamedTuple):
    """What one sequence computes in this step: tokens ``start`` .. ``end`` of it."""

    seq: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether computed meets known: only then can a token be drawn."""
        return self.end == len(self.seq.tokens)


def to_score(run: Run) -> range:
    """Tokens of a run whose logits score the prompt token behind them, each once, also after a preemption."""
    scores = run.seq.scores
    if scores is None:
        return range(0)
    return range(max(run.start, len(scores)), min(run.end, run.seq.view.num_prompt_tokens - 1))


class BatchBuilder:
    """Owns the persistent int32 buffers. A running sequence keeps its row of the block table from step to step."""

    def __init__(self, limits: Limits):
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self.block_size = limits.block_size
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self._tables = np.zeros((seqs, max_blocks), np.int32)
        self._packed_tables = np.zeros((seqs, max_blocks), np.int32)
        self._token_ids = np.zeros(tokens, np.int32)
        self._positions = np.zeros(tokens, np.int32)
        self._slots = np.zeros(tokens, np.int32)
        self._query_start = np.zeros(seqs + 1, np.int32)
        self._kv_lens = np.zeros(seqs, np.int32)
        self._logit_tokens = np.zeros(seqs + tokens, np.int32)

    def set_block(self, row: int, index: int, block: int) -> None:
        self._tables[row, index] = block

    def set_row(self, row: int, table: list[int]) -> None:
        """Write a whole table when a sequence gets its row."""
        self._tables[row, : len(table)] = table

    def pack(self, runs: list[Run]) -> Batch:
        """Index arrays for these runs, as views into the buffers: valid until the next call."""
        tokens: list[int] = []
        positions: list[int] = []
        rows, lens, kv_lens, ends = [], [], [], []
        scored: list[int] = []
        for run in runs:
            seq, start, end = run
            if seq.scores is not None:
                scored += [len(tokens) + at - start for at in to_score(run)]
            if end - start == 1:
                tokens.append(seq.tokens[start])
                positions.append(start)
            else:
                tokens += seq.tokens[start:end]
                positions += range(start, end)
            rows.append(seq.row)
            lens.append(end - start)
            kv_lens.append(end)
            if end == len(seq.tokens):
                ends.append(len(tokens) - 1)
        ends += scored
        t, b = len(tokens), len(runs)
        self._token_ids[:t] = tokens
        self._positions[:t] = positions
        self._kv_lens[:b] = kv_lens
        self._logit_tokens[: len(ends)] = ends
        np.cumsum(lens, out=self._query_start[1 : b + 1])
        max_kv_len = max(kv_lens)
        width = -(-max_kv_len // self.block_size)
        tables = self._packed_tables[:b, :width]
        np.take(self._tables[:, :width], rows, axis=0, out=tables, mode="clip")
        self._map_slots(t, b, lens, tables)
        return Batch(
            token_ids=self._token_ids[:t],
            positions=self._positions[:t],
            slot_mapping=self._slots[:t],
            query_start=self._query_start[: b + 1],
            kv_lens=self._kv_lens[:b],
            block_tables=tables,
            logit_tokens=self._logit_tokens[: len(ends)],
            sequence_ids=tuple([run.seq.view.id for run in runs]),
            block_size=self.block_size,
            max_query_len=max(lens),
            max_kv_len=max_kv_len,
        )

    def _map_slots(self, t: int, b: int, lens: list[int], tables: np.ndarray) -> None:
        """slot = block_table[position // block_size] * block_size + position % block_size, for every packed token."""
        positions = self._positions[:t]
        owner = np.arange(b) if t == b else np.repeat(np.arange(b), lens)
        index, offset = np.divmod(positions, self.block_size)
        np.multiply(tables[owner, index], self.block_size, out=self._slots[:t])
        self._slots[:t] += offset


def sampling_batch(runs: Iterable[Run]) -> SamplingBatch:
    """Who draws what: one sample for each run that samples, n for a parent whose branches are still to come."""
    rows, params, seeds, branches, positions = [], [], [], [], []
    histories, prompts, recorded, constraints = [], [], [], []
    scored: list[tuple[int, int]] = []
    row = -1
    for run in runs:
        seq, _, end = run
        if seq.scores is not None:
            scored += [(seq.tokens[at + 1], seq.params.prompt_logprobs or 0) for at in to_score(run)]
        if end != len(seq.tokens):
            continue
        row += 1
        view = seq.view
        for branch in range(view.branch, view.branch + 1 + seq.to_fork):
            rows.append(row)
            params.append(seq.params)
            seeds.append(seq.seed)
            branches.append(branch)
            positions.append(end)
            histories.append(seq.tokens)
            prompts.append(view.num_prompt_tokens)
            recorded.append(view.recorded_output_tokens)
            constraints.append(seq.grammar)
    scores = [Score(row + 1 + i, token, k) for i, (token, k) in enumerate(scored)]
    return SamplingBatch(rows, params, seeds, branches, positions, histories, prompts, recorded, constraints, scores)
