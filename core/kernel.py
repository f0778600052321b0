"""The attention kernel contract: the case, the cache layouts, and what a kernel must do. No torch is imported here.

Letters used in shapes: T packed tokens, B sequences, H query heads, H_kv key heads, D head_dim, N blocks in the pool, S block_size.
Index arrays are int32; a kernel widens a block or slot index to int64 before it multiplies by a stride.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from core.types import Batch

if TYPE_CHECKING:
    import torch

Phase = Literal["prefill", "decode", "mixed"]
Layout = Literal["block_major", "layer_major"]

LAYOUTS: dict[str, str] = {
    # one block's K and V of all layers are contiguous, so that a swap is one copy a block
    "block_major": "[N, layers, 2, S, H_kv, D]",
    # one layer's blocks are contiguous
    "layer_major": "[layers, 2, N, S, H_kv, D]",
}
"""Storage order of the pool tensor. A kernel always gets per-layer views k, v of shape [N, S, H_kv, D] with int64 strides."""


@attrs.frozen(slots=True, kw_only=True)
class AttentionCase:
    """One combination that can occur in this engine. Every case is resolved to a kernel before the pool is laid out."""

    phase: Phase  # decode: every query_len is 1; prefill: none is; mixed: both
    dtype: str  # of q, k, v: "float32", "bfloat16", "float16"
    kv_dtype: str
    head_dim: int
    group_size: int  # H / H_kv
    window: int | None  # sliding window: keys visible, the token itself included; None: all
    soft_cap: float | None
    block_size: int
    device: str  # "cpu", "cuda"


@attrs.frozen(slots=True, kw_only=True, eq=False)
class LayerInfo:
    """What a kernel needs to know of one attention layer."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@runtime_checkable
class AttentionKernel(Protocol):
    """Writes a step's K and V into the cache and attends over it, for every layer."""

    name: str
    layouts: tuple[Layout, ...]  # storage orders it reads, best first
    graph_safe: bool  # True: prepare and forward can run inside a captured graph

    def bind(self, k_cache: list[torch.Tensor], v_cache: list[torch.Tensor], layers: list[LayerInfo]) -> None:
        """Learn the cache: one [N, S, H_kv, D] view of K and of V for each layer. Called once, when the pool is allocated."""

    def prepare(self, batch: Batch, tensors: dict[str, Any]) -> None:
        """Once a step, before the first layer. ``tensors`` holds the batch's arrays on the device, by the names of ``Batch``.

        A padding row has slot -1: nothing is written for it, and its output is not read. Entries of a block table at or behind
        ceil(kv_len / S), and slots of the last block at or behind kv_len, are never read: they may hold NaN.
        """

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Once a layer: store k and v at ``slot_mapping``, then attend.

        q is [T, H, D], k and v are [T, H_kv, D] (rotary embedding applied), all of the case's dtype; gives [T, H, D]. A query
        at position p of its sequence sees keys 0..p (of its window), computed in earlier steps or in this one.
        """
