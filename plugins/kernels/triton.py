"""``kernel=triton``: paged attention on a GPU; its kernels are in ``plugins/kernels/triton_attention.py``.

A layer of a step whose sequences all have one new token is one or two launches: the attention, which also writes the new
K and V, and the merge where a sequence may be long enough to be cut. Other steps write first and then attend, chunks and
single tokens in launches of their own: one kernel that branches between the two loses its pipelining. What depends on
lengths is read from device memory, so that all of it can run inside a CUDA graph.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import attrs
import torch

from core.hookspecs import hookimpl
from core.kernel import SCALED, AttentionCase, LayerInfo, Layout, scales_of
from core.types import Batch, Refusal

FLOATS = ("float32", "float16", "bfloat16")
FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}
COPY_WORDS = 1024  # of 4 bytes, one program of a block copy
PROGRAMS_PER_UNIT = 4  # of attention in decode, for each multiprocessor: enough loads in flight to fill the memory bus


class Sizes(NamedTuple):
    """How a launch is cut: ``rows`` (query heads x tokens) and ``tile`` (keys) are powers of two from 16."""

    rows: int
    tile: int
    warps: int
    stages: int
    piece: int = (
        256  # decode: keys of one piece of a sequence, a multiple of tile; 64 kB of K and V at D = 64, bfloat16
    )
    pieces: int = 32  # decode: most pieces of a sequence


def choose_sizes(
    num_rows: int, head_dim: int, item_bytes: int, stored_bytes: int, decode: bool, amd: bool = False
) -> Sizes:
    """Sizes for launches with up to ``num_rows`` rows a key head (group x longest chunk). Values have ``item_bytes`` as
    they are multiplied and ``stored_bytes`` in the cache. Fixed rules, since tuning at run time would stall a first request
    and differ from run to run; ``python benchmarks/aot.py`` shows what compilers make of them:

    * rows: the least that holds them, from 16 (the least M of a tensor core) to 64 (of Hopper's). More reuse a loaded key
      more often, until their output (rows x head_dim float32) fills the registers of 128 threads. float32 has no matrix
      instruction on NVIDIA and keeps its operands in registers too: a quarter of that.
    * tile, stages: K and V of two tiles in 32 kB, so that at least three programs fit one multiprocessor. On NVIDIA a load
      whose address was itself loaded is one tile ahead only from five stages on (with four it is issued and waited for
      at once); AMD's pipeliner counts one less. 64 rows keep two tiles from two stages on.
    * warps: 4. More would share one tensor-core row block. float32 from a scaled cache or of 256 dims: 8, or it spills.
    """
    width = max(16, power_of_two(head_dim))
    rows = max(16, power_of_two(num_rows))
    if not decode:
        rows = min(rows, 64, max(16, (8192 if item_bytes <= 2 else 2048) // width))
    tile = max(16, min(64, 8192 // (width * item_bytes)))
    stages = 5 if width <= 128 else 3 if item_bytes <= 2 else 1
    if rows >= 64:
        stages = 3 if width <= 64 else 2
    if item_bytes > 2 and (stored_bytes == 1 or width > 128):
        return Sizes(rows, tile, 8, min(stages, 2))
    return Sizes(rows, tile, 4, max(2, stages - 1) if amd and stages > 2 else stages)


def power_of_two(number: int) -> int:
    """The least power of two from ``number``."""
    return 1 << max(0, number - 1).bit_length()


class TritonAttention:
    """The kernel itself: see the module docstring and ``core.kernel.AttentionKernel`` for the contract."""

    name = "triton"
    layouts: tuple[Layout, ...] = ("block_major", "layer_major")
    graph_safe = True

    def __init__(self, dtype: str = "float32", sizes: Callable[..., Sizes] = choose_sizes):
        from plugins.kernels import triton_attention

        self.kernels: ModuleType = triton_attention
        self.dtype_bytes, self._sizes = getattr(torch, dtype).itemsize, sizes

    def bind(self, k_cache: list[torch.Tensor], v_cache: list[torch.Tensor], layers: list[LayerInfo]) -> None:
        """Learn the cache: [N, S, H_kv, D] views of one pool, so that all have the same strides."""
        view = k_cache[0]
        strides = {one.stride() for one in (*k_cache, *v_cache)}
        if len(strides) > 1 or view.stride(3) != 1:
            raise ValueError(f"the cache views must have the same strides, the last of them 1: {sorted(strides)}")
        self.layers, self.device, self.stored_bytes = layers, view.device, view.element_size()
        self.format = FORMATS.get(view.dtype, 0)
        self.caches, self.scales = [k_cache, v_cache], [k_cache, v_cache]
        scale_stride = 0
        if self.format:
            self.scales = [[scales_of(one) for one in half] for half in (k_cache, v_cache)]
            self.caches = [[one.view(torch.int8) for one in half] for half in (k_cache, v_cache)]
            scale_stride = self.scales[0][0].stride(0)
        self.strides = (*view.stride()[:3], scale_stride)
        self.block_size, self.num_kv_heads, self.head_dim = view.shape[1:]
        self.programs = 4
        if self.device.type == "cuda":
            units = torch.cuda.get_device_properties(self.device).multi_processor_count
            self.programs = PROGRAMS_PER_UNIT * units
        self.windows = sorted({layer.window or 0 for layer in layers})
        # grown as needed; what a captured graph may still use is never freed
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    # -------------------------------------------------------------------------------------------- once a step

    def prepare(self, batch: Batch, tensors: dict[str, Any]) -> None:
        """Keep the device arrays and list the pieces of the sequences with one new token, on the device.

        Of the batch itself only shapes and the two maxima are read: they bound the grids.
        """
        self._arrays = tensors
        self._num_seqs, self._max_new, self._max_len = batch.num_sequences, batch.max_query_len, batch.max_kv_len
        self._only_decode = batch.max_query_len == 1
        self._decodes = self._only_decode or bool((batch.query_start[1:] - batch.query_start[:-1] == 1).any())
        self._padded = batch.num_tokens > int(batch.query_start[-1])
        group = max(layer.num_heads for layer in self.layers) // self.num_kv_heads
        self._one = self.sizes(group, True)
        if self._decodes:
            for window in self.windows:
                self._plan(window)

    def sizes(self, num_rows: int, decode: bool) -> Sizes:
        """``choose_sizes`` for this cache and device."""
        amd = torch.version.hip is not None
        return self._sizes(num_rows, self.head_dim, self.dtype_bytes, self.stored_bytes, decode, amd)

    def _plan(self, window: int) -> None:
        size = self._one
        work = self._buffer(f"work {window}", 1 + self._num_seqs * size.pieces, torch.int32)
        self.kernels.plan_pieces[(1,)](
            *(work, self._arrays["query_start"], self._arrays["kv_lens"], self._num_seqs, window),
            TILE=size.tile,
            PIECE=size.piece,
            PIECES=size.pieces,
            WINDOW=window > 0,
            BLOCK=min(32, power_of_two(self._num_seqs)),
        )

    def _most_pieces(self, window: int) -> int:
        """Pieces of the longest sequence at most: 1 means that nothing has to be merged."""
        longest = min(self._max_len, window + self._one.tile) if window else self._max_len
        return max(1, min(self._one.pieces, -(-longest // self._one.piece)))

    def _buffer(self, name: str, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Room for ``count`` values, kept from call to call."""
        found = self._buffers.get(name)
        if found is None or len(found) < count:
            if found is not None:
                self._outgrown.append(found)
            found = self._buffers[name] = torch.empty(power_of_two(count), dtype=dtype, device=self.device)
        return found

    # -------------------------------------------------------------------------------------------- once a layer

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T, H_kv, D], then attend: q [T, H, D] -> [T, H, D]. Padding rows give zeros."""
        if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        info = self.layers[layer]
        out = (torch.zeros if self._padded else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
        cache = (self.caches[0][layer], self.caches[1][layer], self.scales[0][layer], self.scales[1][layer])
        if not self._only_decode:
            self._write(cache, k, v)
            self._attend_chunks(info, cache, q, out)
        if self._decodes:
            self._attend_one(info, cache, q, k, v, out)
        return out

    def _write(self, cache: tuple, k: torch.Tensor, v: torch.Tensor) -> None:
        self.kernels.write_kv[(len(k),)](
            *(k, v, *cache, self._arrays["slot_mapping"], *k.stride()[:2], *v.stride()[:2], *self.strides),
            **self._shape(),
            KV_PAD=power_of_two(self.num_kv_heads),
        )

    def _shape(self) -> dict[str, int]:
        return {
            "KV_HEADS": self.num_kv_heads,
            "D": self.head_dim,
            "D_PAD": max(16, power_of_two(self.head_dim)),
            "S": self.block_size,
            "FORMAT": self.format,
        }

    def _switches(self, info: LayerInfo, q: torch.Tensor) -> dict[str, Any]:
        return {
            "GROUP": info.num_heads // info.num_kv_heads,
            "WINDOW": info.window is not None,
            "CAP": info.soft_cap is not None,
            "UPCAST": interpreted() and q.dtype == torch.bfloat16,
        }

    def _attend_chunks(self, info: LayerInfo, cache: tuple, q: torch.Tensor, out: torch.Tensor) -> None:
        group, arrays = info.num_heads // info.num_kv_heads, self._arrays
        size = self.sizes(group * self._max_new, False)
        queries = size.rows // group
        tables = arrays["block_tables"]
        self.kernels.attend_chunks[(len(q) // queries + self._num_seqs, self.num_kv_heads)](
            *(q, out, *cache, arrays["query_start"], arrays["kv_lens"], tables, self._num_seqs, tables.stride(0)),
            *(info.scale, info.soft_cap or 0.0, info.window or 0, *q.stride()[:2], *out.stride()[:2], *self.strides),
            **self._shape(),
            **self._switches(info, q),
            ROWS=size.rows,
            QUERIES=queries,
            TILE=size.tile,
            num_warps=size.warps,
            num_stages=size.stages,
        )

    def _attend_one(
        self, info: LayerInfo, cache: tuple, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        size, arrays, window = self._one, self._arrays, info.window or 0
        cut = {"TILE": size.tile, "PIECE": size.piece, "PIECES": size.pieces, "WINDOW": info.window is not None}
        most, tables = self._most_pieces(window), arrays["block_tables"]
        parts = self._num_seqs * size.pieces * info.num_heads if most > 1 else 1
        partial = (
            self._buffer("acc", parts * self.head_dim),
            self._buffer("peak", parts),
            self._buffer("total", parts),
        )
        self.kernels.attend_one[(min(self.programs, self._num_seqs * most * self.num_kv_heads),)](
            *(q, k, v, out, *cache, self._buffers[f"work {window}"], arrays["query_start"], arrays["kv_lens"]),
            *(arrays["slot_mapping"], tables, tables.stride(0), *partial, info.scale, info.soft_cap or 0.0, window),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], *self.strides),
            **self._shape(),
            **(self._switches(info, q) | cut),
            ROWS=size.rows,
            WRITE=self._only_decode,
            num_warps=size.warps,
            num_stages=size.stages,
        )
        if most > 1:
            self.kernels.merge_pieces[(self._num_seqs, info.num_heads)](
                *(out, *partial, arrays["query_start"], arrays["kv_lens"], window, *out.stride()[:2]),
                HEADS=info.num_heads,
                D=self.head_dim,
                D_PAD=max(16, power_of_two(self.head_dim)),
                **cut,
            )

    # -------------------------------------------------------------------------------------------- moves

    def copy_blocks(self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """See ``core.kernel.CopiesBlocks``: one launch for all pairs."""
        whole = source[0].is_contiguous() and destination[0].is_contiguous()  # else a block is a piece a layer and half
        read, write = _pieces(source, whole), _pieces(destination, whole)
        index = torch.tensor(pairs, dtype=torch.int32)
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        words = read.shape[2]
        self.kernels.copy_pieces[(len(pairs), read.shape[1], -(-words // COPY_WORDS))](
            *(read, write, index, *read.stride()[:2], *write.stride()[:2], words), WORDS=COPY_WORDS
        )


def _pieces(blocks: torch.Tensor, whole: bool) -> torch.Tensor:
    """[blocks, layers, 2, ...] as [blocks, pieces, words]: int32 words, contiguous within a piece. The same memory."""
    words = (blocks.flatten(3) if blocks.dim() > 4 else blocks).view(torch.int32)
    return words.flatten(1)[:, None, :] if whole else words.flatten(1, 2)


def interpreted() -> bool:
    """Whether this process runs Triton in its interpreter, on the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@attrs.define(eq=False)
class TritonKernel:
    """Provides ``TritonAttention`` for float types on a GPU, with a cache of a float type, int8 or e4m3."""

    _kernel: TritonAttention | None = attrs.field(default=None, init=False)

    @hookimpl
    def select_kernel(self, case: AttentionCase) -> TritonAttention | Refusal:
        if case.device != "cuda" and not interpreted():
            return Refusal(f"triton runs on a GPU, not on {case.device}")
        if importlib.util.find_spec("triton") is None:
            return Refusal("triton is not installed: pip install 'quire[gpu]'")
        if case.dtype not in FLOATS or case.kv_dtype not in (*FLOATS, *SCALED):
            return Refusal(
                f"triton computes in {', '.join(FLOATS)} with a cache of those or {', '.join(SCALED)}, not "
                f"dtype={case.dtype} with kv_dtype={case.kv_dtype}"
            )
        if not 1 <= case.head_dim <= 256:
            return Refusal(f"triton takes head_dim 1 to 256, not {case.head_dim}")
        if case.kv_dtype in SCALED and case.head_dim % 4:
            return Refusal(f"triton takes head_dim in fours with kv_dtype={case.kv_dtype}, not {case.head_dim}")
        if self._kernel is None:
            self._kernel = TritonAttention(case.dtype)
        return self._kernel
