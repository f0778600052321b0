"""The attention kernel contract: the case, the cache layouts, and what a kernel must do. No torch is imported here.

Letters used in shapes: T packed tokens, B sequences, H query heads, H_kv key heads, D head_dim, N blocks in the pool, S block_size.
Index arrays are int32; a kernel widens a block or slot index to int64 before it multiplies by a stride.
"""

from __future__ import annotations

from collections.abc import Sequence
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

SCALED: dict[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The ``kv_dtype``s that are stored with scales, and their largest magnitude: value = stored * scale.

A scale is a float32 for each token and key head of each layer's K and of its V, the largest magnitude of its D values over
the type's. It is set when the token is written and never changes, so that a block can be copied, swapped and shared as it is.
"""


def scaled_bytes(block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one block's K (or V) of one layer in a ``SCALED`` type: S * H_kv * D values, then S * H_kv float32 scales,
    then what makes it a multiple of 16. So scales travel with their block, and every layer stays aligned.
    """
    return -(-block_size * num_kv_heads * (head_dim + 4) // 16) * 16


def scales_of(view: torch.Tensor) -> torch.Tensor:
    """The scales of a ``SCALED`` cache view [N, S, H_kv, D]: float32 [N, S, H_kv], the same memory."""
    import torch

    num_blocks, block_size, heads, dim = view.shape
    start = view.storage_offset() + block_size * heads * dim
    if start % 4 or view.stride(0) % 4:
        raise ValueError(f"scales are aligned to 4 bytes: H_kv * D of a block must be too, not {tuple(view.shape[1:])}")
    words = torch.empty(0, dtype=torch.float32, device=view.device)
    return words.set_(
        view.untyped_storage(), start // 4, (num_blocks, block_size, heads), (view.stride(0) // 4, heads, 1)
    )


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
class CopiesBlocks(Protocol):
    """What a kernel may offer besides: many blocks in one launch, where a copy each would cost a call each."""

    def copy_blocks(self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """destination[b] = source[a] for each (a, b), queued on the current stream. Both are [blocks, layers, 2, ...] with the
        last dimensions contiguous; either may be pinned host memory. No block is both read and written, or written twice.
        """


@runtime_checkable
class AttendsInOne(Protocol):
    """What a kernel may offer besides: its part of an operator of its own that runs all layers of a model at once.

    A kernel that has this is not called by ``forward`` where such an operator runs (``checks=full`` calls every layer): both must
    do the same, and whoever overrides one overrides the other.
    """

    padded: bool  # the step has rows of no sequence, whose result must be set to 0 before

    def layer_arguments(self, attend: bool = True) -> tuple[Any, ...]:
        """What that operator needs to do in every layer of this step what ``forward`` does; or nothing at all, for measurements."""


@runtime_checkable
class AttentionKernel(Protocol):
    """Writes a step's K and V into the cache and attends over it, for every layer."""

    name: str
    layouts: tuple[Layout, ...]  # storage orders it reads, best first
    graph_safe: bool  # True: prepare and forward can run inside a captured graph

    def bind(self, k_cache: list[torch.Tensor], v_cache: list[torch.Tensor], layers: list[LayerInfo]) -> None:
        """Learn the cache: one [N, S, H_kv, D] view of K and of V for each layer. Called once, when the pool is allocated.

        A kernel that took a case with a ``SCALED`` kv_dtype finds the scales by ``scales_of``, and writes them.
        """

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
