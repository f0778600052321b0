"""What a cache in int8 or float8_e4m3fn costs in quality, on a CPU: the default model reads a text with K and V rounded as
the Triton kernels store them (a scale for each token and key head), by torch's own conversions.

    python -m benchmarks.kv_error [--tokens 512] [--text LICENSE]

Prints, for each ``cache.kv_dtype``, the negative log-likelihood a token, how often the most likely token is the exact
cache's, and the largest difference of a logit. The last line is ``nll_int8_minus_exact: X``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import attrs
import numpy as np
import torch

from core.executors.calibration import one_sequence
from core.executors.torch import TorchExecutor
from core.kernel import SCALED, AttentionCase
from core.sources import SmolLM2
from core.types import CacheConfig, Limits
from plugins.kernels.torch import TorchAttention


def rounded(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """x [T, H_kv, D] as it comes back from the cache."""
    if kv_dtype in SCALED:
        scale = x.abs().amax(-1, keepdim=True) / SCALED[kv_dtype]
        stored = x / scale
        return (stored.round() if kv_dtype == "int8" else stored).to(getattr(torch, kv_dtype)).to(x.dtype) * scale
    return x.to(getattr(torch, kv_dtype)).to(x.dtype)


class Rounding(TorchAttention):
    """The torch kernel with K and V rounded on their way in."""

    def __init__(self, kv_dtype: str):
        self.kv_dtype = kv_dtype

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().forward(layer, q, rounded(k, self.kv_dtype), rounded(v, self.kv_dtype))


@attrs.frozen(eq=False)
class Hooks:
    """The start hooks of an executor that is driven by hand."""

    kv_dtype: str

    def prepare_model(self, model: torch.nn.Module) -> tuple[torch.nn.Module, None]:
        return model, None

    def select_kernel(self, case: AttentionCase) -> TorchAttention:
        return Rounding(self.kv_dtype)


def logits_of(kv_dtype: str, text: str, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [T, V], token ids [T]) of the text's first tokens."""
    executor = TorchExecutor(model=SmolLM2(), device="cpu", dtype="float32")
    executor.load()
    ids = np.array(executor.tokenizer.encode(text)[:most], np.int32)
    executor.prepare(Hooks(kv_dtype), CacheConfig(block_size=16))
    blocks = -(-len(ids) // 16)
    executor.allocate(
        Limits(
            block_size=16,
            num_blocks=blocks,
            num_swap_blocks=0,
            max_model_len=len(ids),
            max_num_seqs=1,
            max_num_batched_tokens=len(ids),
        )
    )
    batch = one_sequence(len(ids), 16, 1, 0, np.arange(len(ids)))
    logits = executor._run(attrs.evolve(batch, token_ids=ids))
    executor.close()
    return logits.float(), torch.from_numpy(ids).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--text", type=Path, default=Path("LICENSE"))
    args = parser.parse_args()
    text = " ".join(args.text.read_text(encoding="utf-8").split())
    exact, losses = None, {}
    for kv_dtype in ("float32", "bfloat16", *SCALED):
        logits, ids = logits_of(kv_dtype, text, args.tokens)
        losses[kv_dtype] = float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))
        exact = logits if exact is None else exact
        same = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
        apart = float((logits - exact).abs().max())
        print(
            f"{kv_dtype:14} nll {losses[kv_dtype]:.4f}  same best token {same:.3f}  largest logit difference {apart:.3f}"
        )
    print(f"nll_int8_minus_exact: {losses['int8'] - losses['float32']:.5f}")


if __name__ == "__main__":
    main()
