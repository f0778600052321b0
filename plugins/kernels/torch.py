"""``kernel=torch``: gather the blocks, then scaled_dot_product_attention. The readable reference; it serves every case.

A step's sequences fall into two kinds. Those with one new token (decode) are padded together into a few groups of
similar length, one attention call a group; the G query heads that share a key head become its G query rows, so no head
is copied. The others (prefill, chunks) are served one by one with a causal mask that starts behind their cached
tokens.

Unused slots are never read: a padded place in a group reads the sequence's own first slot instead and is masked, so
whatever lies in the rest of the pool (NaN, old values) cannot reach a result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
import torch.nn.functional as F

from core.hookspecs import hookimpl
from core.kernel import AttentionCase, LayerInfo, Layout
from core.types import Batch, Refusal

FLOATS = ("float32", "float64", "bfloat16", "float16")


class DecodeGroup(NamedTuple):
    """B sequences with one new token each, padded to L keys."""

    tokens: torch.Tensor  # [B] int64, packed token of each sequence
    rows: torch.Tensor  # [B * L] int64, cache rows to read, sequence by sequence
    masks: dict[int | None, torch.Tensor | None]  # window -> bool [B, 1, 1, L], True = visible; None: all are
    num_keys: int  # L


class Prefill(NamedTuple):
    """One sequence with several new tokens: packed tokens ``start:end``, ``num_keys`` keys of which the last are its
    own.
    """

    start: int
    end: int
    rows: torch.Tensor  # [num_keys] int64, cache rows to read
    fresh: bool  # every key is computed in this step, so that nothing need be read
    masks: dict[int | None, torch.Tensor | None]  # window -> bool [end - start, num_keys]; None: plain causal, fresh


class CacheRows:
    """A [N, S, H_kv, D] view as rows of H_kv * D values, whatever its strides: token slot (n, s) is row ``n *
    block_rows + s``.

    The rows of other layers may lie between those of two blocks (block_major); they are never named.
    """

    def __init__(self, view: torch.Tensor):
        num_blocks, block_size, heads, dim = view.shape
        width = heads * dim
        block_stride = view.stride(0)
        if view.stride()[1:] != (width, dim, 1) or block_stride % width:
            raise ValueError(f"the cache view has strides {view.stride()}: a block's tokens must be contiguous")
        self.block_rows = block_stride // width
        num_rows = (num_blocks - 1) * self.block_rows + block_size
        self.rows = torch.as_strided(view, (num_rows, width), (width, 1), view.storage_offset())


class TorchAttention:
    """The kernel itself: see the module docstring and ``core.kernel.AttentionKernel`` for the contract."""

    name = "torch"
    layouts: tuple[Layout, ...] = ("block_major", "layer_major")
    graph_safe = False  # prepare reads lengths on the host

    def bind(self, k_cache: list[torch.Tensor], v_cache: list[torch.Tensor], layers: list[LayerInfo]) -> None:
        """Learn the cache. Views of different layers must have the same strides (they are views of one pool)."""
        self.layers = layers
        self.windows = sorted({layer.window for layer in layers}, key=lambda window: (window is not None, window))
        self.k_rows = [CacheRows(view).rows for view in k_cache]
        self.v_rows = [CacheRows(view).rows for view in v_cache]
        self.block_rows = CacheRows(k_cache[0]).block_rows
        self.cache_dtype = k_cache[0].dtype
        self.device = k_cache[0].device
        self._buffers: dict[str, torch.Tensor] = {}

    # -------------------------------------------------------------------------------------------- once a step

    def prepare(self, batch: Batch, tensors: dict[str, Any]) -> None:
        """Turn block tables into cache rows, once for all layers (host arithmetic in int64, then one copy to the
        device each).
        """
        slots = batch.slot_mapping.astype(np.int64)
        blocks, offsets = np.divmod(slots, batch.block_size)
        written = slots >= 0
        self._write_rows = self._to_device((blocks * self.block_rows + offsets)[written])
        self._written = None if written.all() else self._to_device(np.flatnonzero(written))

        starts = batch.query_start.astype(np.int64)
        query_lens = np.diff(starts)
        kv_lens = batch.kv_lens.astype(np.int64)
        decode = np.flatnonzero((query_lens == 1) & (kv_lens > 0))
        self._groups = [self._decode_group(batch, part, starts, kv_lens) for part in similar_lengths(decode, kv_lens)]
        self._prefills = [self._prefill(batch, i, starts, kv_lens) for i in np.flatnonzero(query_lens > 1).tolist()]
        served = len(decode) + sum(part.end - part.start for part in self._prefills)
        self._padded = served < batch.num_tokens

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _rows(self, tables: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
        """Cache rows of ``positions`` [..., L] under block tables [..., blocks], int64."""
        blocks = np.take_along_axis(tables.astype(np.int64), positions // block_size, axis=-1)
        return blocks * self.block_rows + positions % block_size

    def _decode_group(self, batch: Batch, members: np.ndarray, starts: np.ndarray, kv_lens: np.ndarray) -> DecodeGroup:
        lens = kv_lens[members][:, None]  # [B, 1]
        num_keys = int(lens.max())
        positions = np.broadcast_to(np.arange(num_keys), (len(members), num_keys))
        visible = positions < lens
        rows = self._rows(batch.block_tables[members], np.where(visible, positions, 0), batch.block_size)
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in self.windows:
            seen = visible if window is None else visible & (positions >= lens - window)
            masks[window] = None if seen.all() else self._to_device(np.ascontiguousarray(seen))[:, None, None, :]
        return DecodeGroup(self._to_device(starts[members]), self._to_device(rows.reshape(-1)), masks, num_keys)

    def _prefill(self, batch: Batch, index: int, starts: np.ndarray, kv_lens: np.ndarray) -> Prefill:
        start, end, num_keys = int(starts[index]), int(starts[index + 1]), int(kv_lens[index])
        keys = np.arange(num_keys)
        queries = np.arange(num_keys - (end - start), num_keys)[:, None]  # positions of the new tokens
        fresh = num_keys == end - start
        rows = self._to_device(self._rows(batch.block_tables[index], keys, batch.block_size))
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in self.windows:
            if fresh and (window is None or window >= num_keys):
                masks[window] = None
                continue
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            masks[window] = self._to_device(seen)
        return Prefill(start, end, rows, fresh, masks)

    # -------------------------------------------------------------------------------------------- once a layer

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T, H_kv, D], then attend: q [T, H, D] -> [T, H, D]. Padding rows give zeros."""
        info = self.layers[layer]
        self._write(self.k_rows[layer], k)
        self._write(self.v_rows[layer], v)
        out = (torch.zeros if self._padded else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.tokens] = self._decode(info, q[group.tokens], group)
        for part in self._prefills:
            out[part.start : part.end] = self._extend(info, q, k, v, part)
        return out

    def _write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Store [T, H_kv, D] at the step's slots; padding rows (slot -1) are left out."""
        if self._written is not None:
            values = values[self._written]
        rows.index_copy_(0, self._write_rows, values.reshape(len(self._write_rows), rows.shape[1]).to(rows.dtype))

    def _read(self, name: str, source: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The named cache rows in a buffer that is used again by the next layer, in the computing dtype: [rows, H_kv *
        D].
        """
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < len(rows):
            buffer = self._buffers[name] = source.new_empty((len(rows), source.shape[1]))
        return torch.index_select(source, 0, rows, out=buffer[: len(rows)]).to(dtype)

    def _decode(self, info: LayerInfo, q: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        """One query token for each of B sequences: q [B, H, D] -> [B, H, D]."""
        count, heads, dim = q.shape
        shape = (count, group.num_keys, info.num_kv_heads, dim)
        keys = self._read("k", self.k_rows[info.index], group.rows, q.dtype).view(shape).transpose(1, 2)
        values = self._read("v", self.v_rows[info.index], group.rows, q.dtype).view(shape).transpose(1, 2)
        folded = q.reshape(count, info.num_kv_heads, heads // info.num_kv_heads, dim)
        out = attend(info, folded, keys, values, group.masks[info.window], causal=False)
        return out.reshape(count, heads, dim)

    def _extend(
        self, info: LayerInfo, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Prefill
    ) -> torch.Tensor:
        """Several query tokens of one sequence: [T_q, H, D]. Keys come from the cache if some were computed earlier."""
        queries = q[part.start : part.end].transpose(0, 1)[None]  # [1, H, T_q, D]
        if part.fresh and self.cache_dtype == q.dtype:
            keys, values = k[part.start : part.end], v[part.start : part.end]
        else:
            shape = (len(part.rows), info.num_kv_heads, q.shape[2])
            keys = self._read("k", self.k_rows[info.index], part.rows, q.dtype).view(shape)
            values = self._read("v", self.v_rows[info.index], part.rows, q.dtype).view(shape)
        mask = part.masks[info.window]
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, H_kv, L, D]
        return attend(info, queries, keys, values, mask, causal=mask is None)[0].transpose(0, 1)


def attend(
    info: LayerInfo, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> torch.Tensor:
    """q [B, H, T, D] over k, v [B, H_kv, L, D]; mask bool, broadcast to [B, H, T, L], True = visible. Gives [B, H, T,
    D].

    ``causal`` needs T == L. A soft cap c (scores become c * tanh(scores / c)) is not a thing SDPA knows, so it is
    spelled out.
    """
    grouped = q.shape[1] != k.shape[1]
    if info.soft_cap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and q.shape[2] > 1, scale=info.scale, enable_gqa=grouped
        )
    if grouped:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)  # scores of a half type may overflow before the cap
    scores = (q.to(wide) * info.scale) @ k.to(wide).transpose(-1, -2)
    scores = info.soft_cap * torch.tanh(scores / info.soft_cap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v.to(wide)).to(q.dtype)


def similar_lengths(members: np.ndarray, kv_lens: np.ndarray) -> list[np.ndarray]:
    """Split sequences into groups whose shortest is at least half the longest, so that padding at most doubles the
    work.
    """
    order = members[np.argsort(-kv_lens[members], kind="stable")]
    groups, first = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or 2 * kv_lens[order[i]] < kv_lens[order[first]]:
            groups.append(order[first:i])
            first = i
    return groups


@attrs.define(eq=False)
class TorchKernel:
    """Provides ``TorchAttention`` for every case of floating-point tensors; any device, head size, group, block size,
    window, cap.
    """

    _kernel: TorchAttention | None = attrs.field(default=None, init=False)

    @hookimpl
    def select_kernel(self, case: AttentionCase) -> TorchAttention | Refusal:
        for field in ("dtype", "kv_dtype"):
            if getattr(case, field) not in FLOATS:
                return Refusal(f"torch reads {', '.join(FLOATS)}, not {field}={getattr(case, field)}")
        if self._kernel is None:
            self._kernel = TorchAttention()
        return self._kernel
