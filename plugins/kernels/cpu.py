"""``kernel=cpu``: attention on a CPU that reads the blocks where they lie. Our own C++ (``cpu_attention.cpp``).

Decode loads each key and value once for all query heads that share it and never gathers. A sequence is cut into pieces
of about 256 keys, which threads take one by one and whose results are merged (the split of Flash-Decoding, Dao et al.
2023, with the online softmax of Milakov and Gimelshein, 2018). How a sequence is cut depends on its own length only.
Prompts and chunks go in tiles of about 128 query rows, each a pair of small matrix products a tile of keys.

The operators are built on first use (``cpu_build``). Without a compiler, or where they do not fit, every case is refused
with the reason, and ``kernel=auto`` goes on to the next kernel.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from core.hookspecs import hookimpl
from core.kernel import AttentionCase, LayerInfo, Layout
from core.types import Batch, Refusal
from plugins.kernels import cpu_build

KV_TYPES = ("float32", "bfloat16")
MAX_HEAD_DIM = 1024


class CpuAttention:
    """The kernel itself: see the module docstring and ``core.kernel.AttentionKernel`` for the contract."""

    name = "cpu"
    layouts: tuple[Layout, ...] = ("block_major", "layer_major")
    graph_safe = False
    padded = False

    def __init__(self, instructions: str = ""):
        self.instructions = instructions
        self._attend = torch.ops.quire_cpu.attend.default
        self._plan = torch.ops.quire_cpu.plan.default

    def bind(self, k_cache: list[torch.Tensor], v_cache: list[torch.Tensor], layers: list[LayerInfo]) -> None:
        """Learn the cache: [N, S, H_kv, D] views, float32 or bfloat16, any strides but the last."""
        self.k_cache, self.v_cache, self.layers = k_cache, v_cache, layers
        self.windows = {layer.window or 0: layer for layer in layers}
        self._partials = torch.empty(0)
        self._manners = (
            [layer.scale for layer in layers],
            [layer.window or 0 for layer in layers],
            [layer.soft_cap or 0.0 for layer in layers],
        )

    def prepare(self, batch: Batch, tensors: dict[str, Any]) -> None:
        """The step's work list, once for all layers with the same window; room for partial results grows as needed."""
        self._slots, self._starts = tensors["slot_mapping"], tensors["query_start"]
        self._lens, self._tables = tensors["kv_lens"], tensors["block_tables"]
        self._items: dict[int, torch.Tensor] = {}
        for window, layer in self.windows.items():
            items = self._plan(self._starts, self._lens, layer.num_heads, layer.num_kv_heads, window)
            self._items[window] = items
            if len(items):
                parts = int(items[:, 7].max()) + 1
                floats = parts * layer.num_heads * (layer.head_dim + 2)
                if floats > len(self._partials):
                    self._partials = torch.empty(2 * floats)
        # rows of no sequence give zeros, not whatever lay in memory
        self.padded = batch.num_tokens > int(batch.query_start[-1])

    def layer_arguments(self, attend: bool = True) -> tuple[Any, ...]:
        """Of ``quire_cpu.layers``, in its order: see ``core.kernel.AttendsInOne``."""
        items = [self._items[window] for window in self._manners[1]]
        slots = self._slots
        if not attend:
            items, slots = [items[0][:0]] * len(items), torch.full_like(slots, -1)
        return (
            *(self.k_cache, self.v_cache, items, *self._manners),
            *(slots, self._starts, self._lens, self._tables, self._partials),
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T, H_kv, D], then attend: q [T, H, D] -> [T, H, D]. Any strides but the last dimension's."""
        info = self.layers[layer]
        out = q.new_zeros(q.shape) if self.padded else q.new_empty(q.shape)
        if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        window = info.window or 0
        self._attend(
            *(q, k, v, self.k_cache[layer], self.v_cache[layer], self._items[window], self._slots, self._starts),
            *(self._lens, self._tables, self._partials, info.scale, window, info.soft_cap or 0.0, out),
        )
        return out


@attrs.define(eq=False)
class CpuKernel:
    """Provides ``CpuAttention`` for float32 models on a CPU, with a float32 or bfloat16 cache."""

    _kernel: CpuAttention | None = attrs.field(default=None, init=False)
    _reason: str = attrs.field(default="", init=False)  # why there is no kernel: found out once

    @hookimpl
    def select_kernel(self, case: AttentionCase) -> CpuAttention | Refusal:
        if case.device != "cpu":
            return Refusal(f"cpu runs on a CPU, not on {case.device}")
        if case.dtype != "float32" or case.kv_dtype not in KV_TYPES:
            return Refusal(
                f"cpu computes in float32 with a cache of {' or '.join(KV_TYPES)}, not dtype={case.dtype} with "
                f"kv_dtype={case.kv_dtype}"
            )
        if not 1 <= case.head_dim <= MAX_HEAD_DIM:
            return Refusal(f"cpu takes head_dim 1 to {MAX_HEAD_DIM}, not {case.head_dim}")
        if self._kernel is None and not self._reason:
            try:
                self._kernel = CpuAttention(cpu_build.load())
            except cpu_build.Unavailable as error:
                self._reason = f"cpu is not available: {error}"
        return self._kernel or Refusal(self._reason)
