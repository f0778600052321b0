"""Drives an executor by hand, without an engine: packs batches from prompts and plans, for tests of the device side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from core.kernel import AttentionCase
from core.types import (
    Batch,
    CacheConfig,
    ConfigError,
    Limits,
    Move,
    Refusal,
    SamplingBatch,
    SamplingParams,
    StepOutput,
)

GREEDY = SamplingParams(temperature=0)


class Hooks:
    """The start hooks, with these kernel plugins in order and no linears."""

    def __init__(self, *plugins):
        self.plugins = plugins

    def prepare_model(self, model):
        return model, None

    def select_kernel(self, case: AttentionCase):
        answers = [plugin.select_kernel(case) for plugin in self.plugins]
        taken = [answer for answer in answers if not isinstance(answer, Refusal)]
        if not taken:
            raise ConfigError("; ".join(answer.reason for answer in answers))
        return taken[0]


@attrs.define(eq=False)
class Seq:
    """One sequence: its tokens so far, how many are computed, and its blocks."""

    tokens: list[int]
    params: SamplingParams = GREEDY
    num_prompt: int = 0
    computed: int = 0
    blocks: list[int] = attrs.field(factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Driver:
    """An executor with a pool of its own and sequences whose blocks come from a shuffled list."""

    def __init__(self, executor, *kernels, block_size=16, num_blocks=64, num_swap_blocks=4, kv_dtype=None, seed=0):
        self.executor, self.block_size = executor, block_size
        self.info = executor.load()
        self.lines = executor.prepare(Hooks(*kernels), CacheConfig(block_size=block_size, kv_dtype=kv_dtype))
        self.limits = Limits(
            block_size=block_size,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            max_model_len=min(self.info.max_position, num_blocks * block_size),
            max_num_seqs=64,
            max_num_batched_tokens=4096,
        )
        executor.allocate(self.limits)
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()

    def pack(self, work: Mapping[int, int], seqs: Sequence[Seq]) -> tuple[Batch, SamplingBatch]:
        """A batch that computes ``work[i]`` next tokens of ``seqs[i]``; those that are then complete are sampled."""
        tokens, positions, slots, starts, kv_lens, ends, sampled = [], [], [], [0], [], [], []
        for i, count in work.items():
            seq = seqs[i]
            stop = seq.computed + count
            while len(seq.blocks) * self.block_size < stop:
                seq.blocks.append(self.free.pop())
            for place in range(seq.computed, stop):
                tokens.append(seq.tokens[place])
                positions.append(place)
                slots.append(seq.blocks[place // self.block_size] * self.block_size + place % self.block_size)
            starts.append(len(tokens))
            kv_lens.append(stop)
            if stop == len(seq.tokens):
                ends.append(len(tokens) - 1)
                sampled.append(seq)
        width = max(len(seqs[i].blocks) for i in work)
        tables = np.zeros((len(work), width), dtype=np.int32)
        for row, i in zip(tables, work, strict=True):
            row[: len(seqs[i].blocks)] = seqs[i].blocks
        batch = Batch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            slot_mapping=np.array(slots, dtype=np.int32),
            query_start=np.array(starts, dtype=np.int32),
            kv_lens=np.array(kv_lens, dtype=np.int32),
            block_tables=tables,
            logit_tokens=np.array(ends, dtype=np.int32),
            sequence_ids=tuple(work),
            block_size=self.block_size,
            max_query_len=max(work.values()),
            max_kv_len=max(kv_lens),
        )
        return batch, self._sampling(sampled)

    def _sampling(self, sampled: Sequence[Seq]) -> SamplingBatch:
        return SamplingBatch(
            rows=range(len(sampled)),
            params=[seq.params for seq in sampled],
            seeds=[seq.params.seed or 0 for seq in sampled],
            branches=[0] * len(sampled),
            positions=[len(seq.tokens) for seq in sampled],
            histories=[seq.tokens for seq in sampled],
            num_prompt_tokens=[seq.num_prompt for seq in sampled],
            recorded_output_tokens=[None] * len(sampled),
        )

    def step(self, work: Mapping[int, int], seqs: Sequence[Seq], moves: Sequence[Move] = ()) -> StepOutput:
        """Compute, sample and append."""
        batch, sampling = self.pack(work, seqs)
        output = self.executor.execute(batch, moves, sampling)
        drawn = iter(output.token_ids)
        for i, count in work.items():
            seqs[i].computed += count
            if seqs[i].computed == len(seqs[i].tokens):
                seqs[i].tokens.append(next(drawn))
        return output

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        chunk: int = 10**9,
        params: Sequence[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """All prompts together, each prefill in chunks of ``chunk``: the output tokens of each."""
        params = params or [GREEDY] * len(prompts)
        seqs = [Seq(list(prompt), one, len(prompt)) for prompt, one in zip(prompts, params, strict=True)]
        while work := {
            i: min(chunk, len(seq.tokens) - seq.computed) for i, seq in enumerate(seqs) if len(seq.output) < max_tokens
        }:
            self.step(work, seqs)
        for seq in seqs:
            self.free += seq.blocks
        return [seq.output for seq in seqs]
