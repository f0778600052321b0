"""Times both KV storage orders: swap of scattered blocks, and the torch kernel's attention in a decode step.

    python benchmarks/kv_layouts.py [--threads 2] [--repeat 7]

The shape is SmolLM2-135M's: 30 layers, 9 heads, 3 KV heads, head_dim 64, float32, blocks of 16 tokens. The orders take
turns, and the best of the runs counts. ``core/cache.py`` quotes the result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from core.cache import KVCache, KVShape
from core.kernel import LAYOUTS, LayerInfo
from core.types import Batch, Move
from plugins.kernels.torch import TorchAttention

BLOCK = 16
SHAPE = KVShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.float32)
HEADS = 9


def decode_batch(num_seqs: int, num_keys: int, num_blocks: int) -> Batch:
    """One new token for each sequence, blocks scattered over the pool."""
    width = -(-num_keys // BLOCK)
    tables = np.random.default_rng(0).permutation(num_blocks)[: num_seqs * width].reshape(num_seqs, width)
    last = num_keys - 1
    return Batch(
        token_ids=np.zeros(num_seqs, np.int32),
        positions=np.full(num_seqs, last, np.int32),
        slot_mapping=(tables[:, last // BLOCK] * BLOCK + last % BLOCK).astype(np.int32),
        query_start=np.arange(num_seqs + 1, dtype=np.int32),
        kv_lens=np.full(num_seqs, num_keys, np.int32),
        block_tables=tables.astype(np.int32),
        logit_tokens=np.arange(num_seqs, dtype=np.int32),
        sequence_ids=tuple(range(num_seqs)),
        block_size=BLOCK,
        max_query_len=1,
        max_kv_len=num_keys,
    )


def swap_run(cache: KVCache, count: int) -> Callable[[], None]:
    order = np.random.default_rng(1).permutation(len(cache.blocks))[:count].tolist()
    out = [Move("swap_out", block, host) for host, block in enumerate(order)]
    back = [Move("swap_in", host, block) for host, block in enumerate(order)]
    return lambda: cache.run_moves(out + back)


def decode_run(cache: KVCache, batch: Batch) -> Callable[[], None]:
    kernel = TorchAttention()
    infos = [LayerInfo(index=i, num_heads=HEADS, num_kv_heads=3, head_dim=64, scale=0.125) for i in range(30)]
    kernel.bind(*cache.layer_views(), infos)
    count = batch.num_tokens
    q, k, v = torch.randn(count, HEADS, 64), torch.randn(count, 3, 64), torch.randn(count, 3, 64)

    def run() -> None:
        kernel.prepare(batch, {})
        for layer in range(30):
            kernel.forward(layer, q, k, v)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    num_blocks, swapped = 1100, 64
    runs: dict[tuple[str, str], Callable[[], None]] = {}
    for layout in LAYOUTS:
        cache = KVCache(
            SHAPE,
            num_blocks=num_blocks,
            num_swap_blocks=swapped,
            block_size=BLOCK,
            layout=layout,
            device=torch.device("cpu"),
            zero=True,
        )
        runs["swap, us a block one way", layout] = swap_run(cache, swapped)
        for num_seqs in (1, 8, 32):
            name = f"decode attention of {num_seqs} x 512 tokens, ms a step"
            runs[name, layout] = decode_run(cache, decode_batch(num_seqs, 512, num_blocks))
    best = dict.fromkeys(runs, float("inf"))
    with torch.inference_mode():
        for turn in range(args.repeat + 1):
            for key, run in runs.items():
                started = time.perf_counter()
                run()
                if turn:
                    best[key] = min(best[key], time.perf_counter() - started)
    for name in dict.fromkeys(name for name, _ in runs):
        scale = 1e6 / (2 * swapped) if name.startswith("swap") else 1e3
        print(name.ljust(46), *(f"{layout} {best[name, layout] * scale:8.2f}" for layout in LAYOUTS), sep="  ")


if __name__ == "__main__":
    main()
