"""Decode attention over a paged cache against the machine's read bandwidth, and against other ways to hold the cache.

    python -m benchmarks.attention --kernel cpu --sequences 32 --context 512 [--threads 2] [--repeat 9] [--clock wall]

The shape is SmolLM2-135M's unless told otherwise: 30 layers, 9 heads, 3 KV heads, head_dim 64, float32. All ways read the
same memory and take turns: `contiguous` (one block a sequence, in order), `paged` with permuted blocks of every size
asked for, `gather` (kernel=torch, block 16), a plain sum over the memory, which is the read bandwidth, and `scattered`: the
sum once more, layer by layer in the order of the permuted blocks of --block-size, as any kernel must read them. Times are the
median of the turns (best in brackets); ratios are medians of the ratios within a turn. Bytes are those of K and V, once.
Last line: `fraction: X`, the bandwidth of paged attention at --block-size over the measured one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.timing import add_arguments, full_memory, ratio, read_of, set_up, take_turns
from core.kernel import AttentionKernel, LayerInfo
from core.types import Batch
from plugins.kernels import cpu_build

ARRAYS = ("slot_mapping", "query_start", "kv_lens", "block_tables")


def kernel_named(name: str) -> AttentionKernel:
    """An attention kernel of this package by the name of its option."""
    if name == "torch":
        from plugins.kernels.torch import TorchAttention

        return TorchAttention()
    if name == "cpu":
        from plugins.kernels.cpu import CpuAttention

        return CpuAttention(cpu_build.load())
    raise SystemExit(f"--kernel {name}: allowed are torch, cpu")


def decode_batch(num_seqs: int, context: int, block_size: int, permuted: bool) -> Batch:
    """One new token for each sequence; its blocks in order, or scattered over the pool."""
    width = -(-context // block_size)
    blocks = np.arange(num_seqs * width)
    tables = (np.random.default_rng(0).permutation(blocks) if permuted else blocks).reshape(num_seqs, width)
    last = context - 1
    return Batch(
        token_ids=np.zeros(num_seqs, np.int32),
        positions=np.full(num_seqs, last, np.int32),
        slot_mapping=(tables[:, last // block_size] * block_size + last % block_size).astype(np.int32),
        query_start=np.arange(num_seqs + 1, dtype=np.int32),
        kv_lens=np.full(num_seqs, context, np.int32),
        block_tables=tables.astype(np.int32),
        logit_tokens=np.arange(num_seqs, dtype=np.int32),
        sequence_ids=tuple(range(num_seqs)),
        block_size=block_size,
        max_query_len=1,
        max_kv_len=context,
    )


def attention_run(
    args: argparse.Namespace, memory: torch.Tensor, kernel: str, block_size: int, permuted: bool
) -> Callable[[], None]:
    """All layers of one decode step over ``memory``, seen as a pool of blocks of this size."""
    batch = decode_batch(args.sequences, args.context, block_size, permuted)
    inner = (block_size, args.kv_heads, args.head_dim)
    num_blocks = batch.block_tables.size
    shape = (
        (num_blocks, args.layers, 2, *inner) if args.layout == "block_major" else (args.layers, 2, num_blocks, *inner)
    )
    pool = memory[: int(np.prod(shape))].view(shape)
    blocks = pool if args.layout == "block_major" else pool.permute(2, 0, 1, 3, 4, 5)
    infos = [
        LayerInfo(
            index=i, num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim, scale=args.head_dim**-0.5
        )
        for i in range(args.layers)
    ]
    attention = kernel_named(kernel)
    attention.bind([blocks[:, i, 0] for i in range(args.layers)], [blocks[:, i, 1] for i in range(args.layers)], infos)
    tensors = {name: torch.from_numpy(getattr(batch, name)) for name in ARRAYS}
    count = args.sequences
    q = torch.randn(count, args.heads, args.head_dim)
    k, v = torch.randn(2, count, args.kv_heads, args.head_dim)

    def run() -> None:
        attention.prepare(batch, tensors)
        for layer in range(args.layers):
            attention.forward(layer, q, k, v)

    return run


def scattered_run(args: argparse.Namespace, memory: torch.Tensor) -> Callable[[], object]:
    """A sum over the K and V of each layer of each block, layer by layer, the blocks permuted."""
    cpu_build.load()
    tables = decode_batch(args.sequences, args.context, args.block_size, True).block_tables.ravel()
    width = args.block_size * args.kv_heads * args.head_dim
    if args.layout == "block_major":  # K and V of a layer of a block follow each other
        order, width = np.concatenate([tables * args.layers + layer for layer in range(args.layers)]), 2 * width
    else:
        order = np.concatenate([half * tables.size + tables for half in range(2 * args.layers)])
    rows = memory[: len(order) * width].view(-1, width)
    return partial(torch.ops.quire_cpu.read_rows.default, rows, torch.from_numpy(order.astype(np.int32)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="cpu")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16, help="the one that `fraction` is about")
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[1, 4, 64, 256], help="further sizes")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layout", default="block_major", choices=["block_major", "layer_major"])
    add_arguments(parser, repeat=9)
    args = parser.parse_args()
    set_up(args)
    sizes = list(dict.fromkeys([args.block_size, *args.block_sizes]))
    tokens = args.sequences * max(-(-args.context // size) * size for size in [*sizes, args.context])
    memory = full_memory(tokens * args.layers * 2 * args.kv_heads * args.head_dim)
    used = memory[: args.sequences * args.context * args.layers * 2 * args.kv_heads * args.head_dim]
    runs: dict[str, Callable[[], object]] = {"read": read_of(used)}
    if args.kernel == "cpu":
        runs["scattered"] = scattered_run(args, memory)
    runs["contiguous"] = attention_run(args, memory, args.kernel, args.context, False)
    for size in sizes:
        runs[f"paged {size}"] = attention_run(args, memory, args.kernel, size, True)
    if args.kernel != "torch":
        runs["gather"] = attention_run(args, memory, "torch", 16, True)
    with torch.inference_mode():
        seconds = take_turns(runs, args.repeat, args.clock)
    num_bytes, read = used.numel() * 4, seconds["read"]
    chosen = seconds[f"paged {args.block_size}"]
    print(f"{args.sequences} x {args.context} tokens, {num_bytes / 1e6:.0f} MB of K and V, {args.threads} threads")
    for name, times in seconds.items():
        print(
            f"{name:12} {statistics.median(times) * 1e3:9.2f} ms ({min(times) * 1e3:.2f})  "
            f"{num_bytes / statistics.median(times) / 1e9:6.2f} GB/s  {ratio(read, times):5.2f} of read  "
            f"{ratio(times, chosen):5.2f} x the time of paged {args.block_size}"
        )
    print(f"fraction: {ratio(read, chosen):.3f}")


if __name__ == "__main__":
    main()
