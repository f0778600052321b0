"""The KV tensors: one device pool of blocks, a fixed host pool for swap, and the moves between them.

Both pools are indexed by block id. A kernel gets per-layer views of the device pool, ``[N, S, H_kv, D]`` for K and for
V, whatever the storage order (``core.kernel.LAYOUTS``). The host pool is always block-major: it is only ever copied
whole blocks at a time.

Which storage order is the default was measured (``python benchmarks/kv_layouts.py``: SmolLM2-135M's shape, 16-token
blocks of 737 kB, float32, 2 CPU cores): swap of a block takes 64 us in block_major and 77 us in layer_major; the torch
kernel's attention in a decode step of 32 sequences of 512 tokens takes 76 ms in one and 77 ms in the other, which is
the same within the noise. On a GPU a block_major block is one copy over the link instead of 60 pieces. So kernels that
read both list block_major first, and that is the default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import torch

from core.hugepages import ask_for_huge_pages, touch
from core.kernel import SCALED, CopiesBlocks, Layout, scaled_bytes
from core.types import CacheConfig, ConfigError, Move, MoveKind

CPU_POOL_BYTES = 2 * 2**30
"""Most bytes of KV on a CPU when ``cache.num_blocks`` is null: more than this many tokens are not decoded at a useful
speed.
"""


@attrs.frozen(slots=True, kw_only=True)
class KVShape:
    """The KV of one model: what a token's entry looks like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def scaled(self) -> bool:
        """Whether values are stored with scales (``core.kernel.SCALED``)."""
        return str(self.dtype).removeprefix("torch.") in SCALED

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers, scales included."""
        head = self.head_dim * self.dtype.itemsize + (4 if self.scaled else 0)
        return 2 * self.num_layers * self.num_kv_heads * head

    def part(self, block_size: int) -> tuple[int, ...]:
        """Shape of one block's K (or V) of one layer, as it is stored: [S, H_kv, D], or bytes with their scales behind."""
        if self.scaled:
            return (scaled_bytes(block_size, self.num_kv_heads, self.head_dim),)
        return (block_size, self.num_kv_heads, self.head_dim)


class KVCache:
    """``pool`` [N, layers, 2, S, H_kv, D] or [layers, 2, N, S, H_kv, D] on the device, ``host`` [M, layers, 2, S,
    H_kv, D].

    Fresh memory is not cleared, since nothing may depend on an unwritten slot; ``poison`` fills it with NaN to show
    that, ``zero`` with zeros, so that the pages of the host pool are there too and a copy can be timed.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        layout: Layout,
        device: torch.device,
        poison: bool = False,
        zero: bool = False,
    ):
        self.shape, self.layout, self.block_size = shape, layout, block_size
        block = shape.part(block_size)
        stored_as = torch.int8 if shape.scaled else shape.dtype
        self.block_bytes = 2 * shape.num_layers * math.prod(block) * stored_as.itemsize
        stored = (
            (num_blocks, shape.num_layers, 2, *block)
            if layout == "block_major"
            else (shape.num_layers, 2, num_blocks, *block)
        )
        what = f"{num_blocks} KV blocks of {block_size} tokens"
        if device.type == "cpu":
            _check_room(num_blocks * self.block_bytes, what)
        self.pool = touch(_allocate(stored, stored_as, device, what))
        host_shape = (num_swap_blocks, shape.num_layers, 2, *block)
        self.host = _allocate(
            host_shape, stored_as, torch.device("cpu"), "host swap pool", pinned=device.type == "cuda"
        )
        self.blocks = self.pool if layout == "block_major" else self.pool.movedim(2, 0)
        if poison:
            self.poison()
        if zero:
            self.pool.zero_()
            self.host.zero_()

    def poison(self) -> None:
        """Fill both pools with NaN: from now on, a slot that is read before it is written shows."""
        nan = -1 if self.shape.scaled else float("nan")  # bytes of ones: a NaN as a scale
        self.pool.fill_(nan)
        self.host.fill_(nan)

    def layer_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K and V views of each layer, [N, S, H_kv, D]; writes go to the pool."""
        layers = range(self.shape.num_layers)
        k, v = ([self._view(self.blocks[:, layer, half]) for layer in layers] for half in (0, 1))
        return k, v

    def _view(self, part: torch.Tensor) -> torch.Tensor:
        if not self.shape.scaled:
            return part
        size = (len(part), self.block_size, self.shape.num_kv_heads, self.shape.head_dim)
        strides = (part.stride(0), size[2] * size[3], size[3], 1)
        return part.as_strided(size, strides, part.storage_offset()).view(self.shape.dtype)

    def run_moves(self, moves: Sequence[Move], copier: CopiesBlocks | None = None) -> None:
        """Copy whole blocks, with the result of doing the moves one after the other in their order.

        On a GPU the copies are queued on the current stream, before the forward pass that is queued next; ``copier`` makes
        one launch of many.
        """
        spaces = {
            "copy": (self.blocks, self.blocks),
            "swap_out": (self.blocks, self.host),
            "swap_in": (self.host, self.blocks),
        }
        if copier is not None:
            for kind, pairs in independent(moves):
                read, write = spaces[kind]
                for source, destination in pairs:
                    _check(kind, source, destination, 1, read, write)
                copier.copy_blocks(read, write, pairs)
            return
        for kind, source, destination, count in runs(moves):
            read, write = spaces[kind]
            _check(kind, source, destination, count, read, write)
            write[destination : destination + count].copy_(read[source : source + count], non_blocking=True)

    def close(self) -> None:
        """Drop the tensors."""
        empty = self.host.new_empty(0)
        self.pool = self.host = self.blocks = empty


def _check(kind: MoveKind, source: int, destination: int, count: int, read: torch.Tensor, write: torch.Tensor) -> None:
    if not (0 <= source <= len(read) - count and 0 <= destination <= len(write) - count):
        raise IndexError(f"{kind} {source} -> {destination}: the pools have {len(read)} and {len(write)} blocks")


def independent(moves: Sequence[Move]) -> Iterator[tuple[MoveKind, list[tuple[int, int]]]]:
    """(kind, pairs): successive moves of one kind that may run in any order: no block of a group is written twice, or
    both read and written.
    """
    kind: MoveKind | None = None
    pairs: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for move in moves:
        clash = move.destination in written
        if move.kind == "copy":  # source and destination are one pool
            clash = clash or move.source in written or move.destination in read or move.source == move.destination
        if kind is not None and (move.kind != kind or clash):
            yield kind, pairs
            pairs, read, written = [], set(), set()
        kind = move.kind
        pairs.append((move.source, move.destination))
        read.add(move.source)
        written.add(move.destination)
    if kind is not None:
        yield kind, pairs


def runs(moves: Sequence[Move]) -> Iterator[tuple[MoveKind, int, int, int]]:
    """(kind, source, destination, count): neighbouring moves of one kind from consecutive to consecutive blocks,
    joined.

    Joining may not change the result: within one ``copy`` no block may be both read and written, or a later read would
    see the old content. In a swap, source and destination are different memories, and destinations of a run are all
    different.
    """
    i = 0
    while i < len(moves):
        kind, source, destination = moves[i]
        count = 1
        while (
            i + count < len(moves)
            and moves[i + count] == (kind, source + count, destination + count)
            and not (kind == "copy" and count >= abs(source - destination))
        ):
            count += 1
        yield kind, source, destination, count
        i += count


def _check_room(num_bytes: int, what: str) -> None:
    """Every page of the pool is touched: where there is less memory, that would end the process, not this call."""
    try:
        available = available_memory()
    except ConfigError:  # not known on this system
        return
    if num_bytes > available:
        raise ConfigError(
            f"{what} need {num_bytes / 1e9:.2f} GB on cpu, where {available / 1e9:.2f} GB are available: lower cache.num_blocks"
        )


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, pinned: bool = False
) -> torch.Tensor:
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    try:
        pool = torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned and num_bytes > 0)
        return pool if pinned else ask_for_huge_pages(pool)
    except RuntimeError as error:  # torch's out-of-memory errors are of this kind on every device
        raise ConfigError(f"{what} need {num_bytes / 1e9:.2f} GB on {device}, which cannot be had: {error}") from error


# ------------------------------------------------------------------------------------------------ how many blocks


def fit_blocks_cpu(
    cache: CacheConfig, token_bytes: int, available_bytes: int, max_model_len: int, max_num_seqs: int
) -> tuple[int, str]:
    """Blocks for a CPU pool, and a line that explains the number.

    The least of ``memory_fraction`` of the available memory (less the swap pool), all sequences at full length, and 2
    GiB.
    """
    block_bytes = token_bytes * cache.block_size
    blocks_each = -(-max_model_len // cache.block_size)
    swap_bytes = int(cache.swap_gb * 1e9)
    free = max(0, int(available_bytes * cache.memory_fraction) - swap_bytes)
    memory = (
        f"{cache.memory_fraction:g} of {available_bytes / 1e9:.1f} GB available, less {swap_bytes / 1e9:g} GB of swap"
    )
    bounds = {
        memory: free // block_bytes,
        f"{max_num_seqs} sequences of {max_model_len} tokens": blocks_each * max_num_seqs,
        "2 GiB, enough for a CPU": CPU_POOL_BYTES // block_bytes,
    }
    return _least(bounds, cache, token_bytes, blocks_each)


def fit_blocks_gpu(
    cache: CacheConfig, token_bytes: int, total_bytes: int, used_bytes: int, peak_bytes: int, max_model_len: int
) -> tuple[int, str]:
    """Blocks for a GPU pool: ``memory_fraction`` of the card, less what is in use (weights and other processes) and
    what the largest batch needed on top of it when it was run once; and a line that explains the number. All in bytes.
    """
    blocks_each = -(-max_model_len // cache.block_size)
    free = int(total_bytes * cache.memory_fraction) - used_bytes - peak_bytes
    why = (
        f"{cache.memory_fraction:g} of {total_bytes / 1e9:.1f} GB, less {used_bytes / 1e9:.2f} GB in use and "
        f"{peak_bytes / 1e9:.2f} GB for the largest batch"
    )
    return _least({why: free // (token_bytes * cache.block_size)}, cache, token_bytes, blocks_each)


def _least(bounds: dict[str, int], cache: CacheConfig, token_bytes: int, blocks_each: int) -> tuple[int, str]:
    why, num_blocks = min(bounds.items(), key=lambda item: item[1])
    if num_blocks < 2:
        needed = 2 * token_bytes * cache.block_size / 1e9
        raise ConfigError(
            f"no room for a KV pool: {why} leaves {num_blocks} blocks of {cache.block_size} tokens; at least 2 "
            f"({needed:.3f} GB) are needed; lower cache.swap_gb or set cache.num_blocks"
        )
    tokens = num_blocks * cache.block_size
    line = (
        f"KV pool: {num_blocks} blocks of {cache.block_size} = {tokens} tokens, {tokens * token_bytes / 1e9:.2f} GB, "
        f"{num_blocks / blocks_each:.1f} sequences of max_model_len ({why})"
    )
    return num_blocks, line


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the least of MemAvailable and what its control groups (v2 or v1) leave."""
    bounds = [_meminfo(root)]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            bounds += _group_bounds(root / "sys/fs/cgroup", name, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            bounds += _group_bounds(root / "sys/fs/cgroup/memory", name, *files)
    return max(0, min(bounds))


def _group_bounds(base: Path, name: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Bytes left under each limit from the process's group up. File pages that can be dropped count as free."""
    folder = base / name.strip("/")
    for level in (folder, *folder.parents):
        if (most := _read(level / limit).strip()).isdigit() and (used := _read(level / usage).strip()).isdigit():
            stat = dict(line.split(" ", 1) for line in _read(level / "memory.stat").splitlines() if " " in line)
            yield int(most) - int(used) + int(stat.get(reclaimable, 0))
        if level == base:
            return


def _meminfo(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("cannot find out how much memory is available on this system: set cache.num_blocks")


def _read(path: Path) -> str:
    """The text of a small system file; "" where this system has none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
