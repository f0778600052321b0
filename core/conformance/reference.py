"""A slow, readable fp32 reference of what an attention kernel must do, and the made-up batches to try it on."""

from __future__ import annotations

import math

import numpy as np
import torch

from core.kernel import LayerInfo
from core.types import Batch

BATCH_ARRAYS = ("token_ids", "positions", "slot_mapping", "query_start", "kv_lens", "block_tables", "logit_tokens")


def attention(info: LayerInfo, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One sequence, one query after the other, in float32: the last T positions of ``keys``, ``values`` [L, H_kv, D]
    ask.

    q is [T, H, D]; gives [T, H, D] float32.
    """
    q, keys, values = q.float(), keys.float(), values.float()
    new, num_keys, group = len(q), len(keys), info.num_heads // info.num_kv_heads
    out = torch.zeros(q.shape)
    for t in range(new):
        position = num_keys - new + t
        first = 0 if info.window is None else max(0, position - info.window + 1)
        for head in range(info.num_heads):
            seen = slice(first, position + 1)
            scores = (keys[seen, head // group] * q[t, head]).sum(-1) * info.scale
            if info.soft_cap is not None:
                scores = info.soft_cap * torch.tanh(scores / info.soft_cap)
            out[t, head] = (torch.softmax(scores, 0)[:, None] * values[seen, head // group]).sum(0)
    return out


class Case:
    """A made-up batch: ``lengths`` are (new tokens, keys) of each sequence; block tables are permuted; the pool holds
    ``filler``.

    ``padding`` rows with slot -1 follow the real tokens. ``expected`` is the reference's answer for the real ones.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
        filler: float = math.nan,
        window: int | None = None,
        soft_cap: float | None = None,
        layout: str = "block_major",
        padding: int = 0,
        seed: int = 0,
    ):
        self.lengths, self.block_size, self.padding, self.device = lengths, block_size, padding, device
        self.kv_dtype = kv_dtype or dtype
        self.infos = [
            LayerInfo(
                index=index,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                window=window,
                soft_cap=soft_cap,
            )
            for index in range(2)
        ]
        rng = torch.Generator().manual_seed(seed)
        needs = [-(-keys // block_size) for _, keys in lengths]
        num_blocks = sum(needs) + 3
        order = np.random.default_rng(seed).permutation(num_blocks)
        self.tables = np.split(order[: sum(needs)], np.cumsum(needs)[:-1])
        block = (block_size, num_kv_heads, head_dim)
        stored = (num_blocks, 2, 2, *block) if layout == "block_major" else (2, 2, num_blocks, *block)
        self.pool = torch.full(stored, filler, dtype=self.kv_dtype, device=device)
        blocks = self.pool if layout == "block_major" else self.pool.permute(2, 0, 1, 3, 4, 5)
        self.k_cache, self.v_cache = [blocks[:, i, 0] for i in range(2)], [blocks[:, i, 1] for i in range(2)]
        num_tokens = sum(new for new, _ in lengths) + padding
        self.q = torch.randn(num_tokens, num_heads, head_dim, generator=rng).to(device, dtype)
        self.k = torch.randn(num_tokens, num_kv_heads, head_dim, generator=rng).to(device, dtype)
        self.v = torch.randn(num_tokens, num_kv_heads, head_dim, generator=rng).to(device, dtype)
        self.k[num_tokens - padding :] = self.v[num_tokens - padding :] = math.nan
        self.past = [
            torch.randn(2, keys - new, num_kv_heads, head_dim, generator=rng).to(device, self.kv_dtype)
            for new, keys in lengths
        ]
        self._fill_past()
        self.batch = self._pack()

    def _fill_past(self) -> None:
        """Put the keys of earlier steps where the block tables say, in both layers."""
        for table, past in zip(self.tables, self.past, strict=True):
            for position in range(past.shape[1]):
                block, offset = table[position // self.block_size], position % self.block_size
                for layer in range(2):
                    self.k_cache[layer][block, offset] = past[0, position]
                    self.v_cache[layer][block, offset] = past[1, position]

    def _pack(self) -> Batch:
        new = [count for count, _ in self.lengths]
        positions = np.concatenate([np.arange(keys - count, keys) for count, keys in self.lengths])
        owners = np.repeat(np.arange(len(new)), new)
        slots = [
            self.tables[owner][place // self.block_size] * self.block_size + place % self.block_size
            for owner, place in zip(owners, positions, strict=True)
        ]
        # entries behind a sequence's last block are never read: a wild number there must do no harm
        tables = np.full((len(new), max(map(len, self.tables)) + 1), 10**6, dtype=np.int32)
        for row, table in zip(tables, self.tables, strict=True):
            row[: len(table)] = table
        pad = np.zeros(self.padding)
        return Batch(
            token_ids=np.zeros(len(slots) + self.padding, dtype=np.int32),
            positions=np.concatenate([positions, pad]).astype(np.int32),
            slot_mapping=np.concatenate([slots, pad - 1]).astype(np.int32),
            query_start=np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
            kv_lens=np.array([keys for _, keys in self.lengths], dtype=np.int32),
            block_tables=tables,
            logit_tokens=(np.cumsum(new) - 1).astype(np.int32),
            sequence_ids=tuple(range(len(new))),
            block_size=self.block_size,
            max_query_len=max(new),
            max_kv_len=max(keys for _, keys in self.lengths),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(getattr(self.batch, name)).to(self.device) for name in BATCH_ARRAYS}

    def run(self, kernel, layer: int = 1) -> torch.Tensor:
        """Bind, prepare and run one layer of ``kernel`` on this batch: its output [T, H, D]."""
        kernel.bind(self.k_cache, self.v_cache, self.infos)
        kernel.prepare(self.batch, self.tensors())
        return kernel.forward(layer, self.q, self.k, self.v)

    def expected(self) -> torch.Tensor:
        """The reference's output for the real tokens, on the CPU: [T - padding, H, D] float32."""
        parts, start = [], 0
        for (new, _), past in zip(self.lengths, self.past, strict=True):
            here = slice(start, start + new)
            new_k, new_v = self.k[here].to(self.kv_dtype), self.v[here].to(self.kv_dtype)
            keys, values = torch.cat([past[0], new_k]), torch.cat([past[1], new_v])
            parts.append(attention(self.infos[0], self.q[here].cpu(), keys.cpu(), values.cpu()))
            start += new
        return torch.cat(parts)
