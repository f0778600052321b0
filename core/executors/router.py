"""Which kernel serves which layer of a step: what every attention module of the model calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from core.kernel import AttentionKernel, Phase
from core.types import Batch, PolicyError


class Router:
    """What attention modules call: passes each layer's call to the kernel that was chosen for this step's phase."""

    def __init__(self, table: dict[Phase, list[AttentionKernel]], checked: bool):
        self.table = table  # phase -> kernel of each layer
        self.forward: Callable = self._checked if checked else self._plain
        self._current: list[AttentionKernel] = []

    @property
    def kernels(self) -> list[AttentionKernel]:
        """Every chosen kernel once."""
        return _distinct(kernel for row in self.table.values() for kernel in row)

    def begin(self, batch: Batch, tensors: dict[str, torch.Tensor]) -> None:
        """Choose by the batch's phase, and let those kernels prepare."""
        self._current = self.table[phase_of(batch)]
        for kernel in _distinct(self._current):
            kernel.prepare(batch, tensors)

    @property
    def only(self) -> AttentionKernel | None:
        """The kernel that serves every layer of this step, for a model that calls it by itself; None if there are several, or
        their answers are to be checked.
        """
        if self.forward == self._checked or len(_distinct(self._current)) != 1:
            return None
        return self._current[0]

    def _plain(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._current[layer].forward(layer, q, k, v)

    def _checked(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kernel = self._current[layer]
        out = kernel.forward(layer, q, k, v)
        if out.shape != q.shape or out.dtype != q.dtype:
            shapes = f"{tuple(out.shape)} {out.dtype} for {tuple(q.shape)} {q.dtype}"
            raise PolicyError(f"kernel {kernel.name}, layer {layer}: gave {shapes}")
        bad = ~out.isfinite().flatten(1).all(1)
        fed = q.isfinite().flatten(1).all(1) & k.isfinite().flatten(1).all(1) & v.isfinite().flatten(1).all(1)
        if fed.all() and bad.any():  # a model that is itself not finite is the sampler's to report, row by row
            raise PolicyError(
                f"kernel {kernel.name}, layer {layer}: its output for packed token {int(bad.nonzero()[0])} is not "
                "finite although q, k and v are"
            )
        return out


def phase_of(batch: Batch) -> Phase:
    """decode: every sequence has one new token; prefill: none has; mixed: both kinds."""
    if batch.max_query_len == 1:
        return "decode"
    return "mixed" if (np.diff(batch.query_start) == 1).any() else "prefill"


def _distinct(items: Any) -> list:
    return list({id(item): item for item in items}.values())
