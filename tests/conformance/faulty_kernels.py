"""Attention kernels with one planted fault each, all changes of the shipped torch kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import torch

from core.hookspecs import hookimpl
from core.kernel import AttentionCase
from plugins.kernels.torch import TorchAttention, TorchKernel


def plugin(kernel: type) -> type:
    """A plugin class that gives this kernel for every case."""

    def select_kernel(self: Any, case: AttentionCase) -> Any:
        return kernel()

    fields = {"select_kernel": hookimpl(select_kernel), "__doc__": kernel.__doc__, "__module__": __name__}
    return attrs.define(eq=False)(type(f"{kernel.__name__}Plugin", (), fields))


class TablesInOrder(TorchAttention):
    """Reads blocks 0, 1, 2, ... whatever the table says."""

    def _rows(self, tables: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
        return super()._rows(np.broadcast_to(np.arange(tables.shape[-1]), tables.shape), positions, block_size)


class ReadsUnused(TorchAttention):
    """Multiplies what it may not see by zero instead of leaving it out: NaN stays NaN."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = super().forward(layer, q, k, v)
        return out + 0 * self.v_rows[layer].sum().to(out.dtype)


class OneTooMany(TorchAttention):
    """Decodes read one key behind the end."""

    def _decode_group(self, batch: Any, members: Any, starts: Any, kv_lens: Any) -> Any:
        room = batch.block_tables.shape[1] * batch.block_size
        longer = np.where(kv_lens % batch.block_size, np.minimum(kv_lens + 1, room), kv_lens)
        return super()._decode_group(batch, members, starts, longer)


class NoCausalMask(TorchAttention):
    """A prompt's tokens see those behind them."""

    def _prefill(self, batch: Any, index: int, starts: Any, kv_lens: Any) -> Any:
        part = super()._prefill(batch, index, starts, kv_lens)
        shape = (part.end - part.start, len(part.rows))
        return part._replace(masks=dict.fromkeys(part.masks, torch.ones(shape, dtype=torch.bool)))


class WrongHeads(TorchAttention):
    """Query head h reads key head h modulo H_kv."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        info = self.layers[layer]
        order = torch.arange(info.num_heads).view(-1, info.num_kv_heads).T.reshape(-1)
        return super().forward(layer, q[:, order], k, v)[:, torch.argsort(order)]


class NoWindow(TorchAttention):
    """Takes a window and ignores it."""

    def bind(self, k_cache: Any, v_cache: Any, layers: Any) -> None:
        super().bind(k_cache, v_cache, [attrs.evolve(layer, window=None) for layer in layers])


class NoCap(TorchAttention):
    """Takes a soft cap and ignores it."""

    def bind(self, k_cache: Any, v_cache: Any, layers: Any) -> None:
        super().bind(k_cache, v_cache, [attrs.evolve(layer, soft_cap=None) for layer in layers])


class WritesPadding(TorchAttention):
    """Slot -1 is the pool's last slot."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = super().forward(layer, q, k, v)
        if self._written is not None:
            self.k_rows[layer][-1] = 0
        return out


class OtherLayer(TorchAttention):
    """Writes layer 1's keys over layer 0's too."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        super()._write(self.k_rows[0], k)
        return super().forward(layer, q, k, v)


class Forgets(TorchAttention):
    """Does not store V where the step has one token only."""

    def _write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        if rows is not self.v_rows[1] or self._prefills:
            super()._write(rows, values)


class WrongType(TorchAttention):
    """Answers in float32 whatever it was asked in."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().forward(layer, q, k, v).float()


class Shared(TorchAttention):
    """Counts its calls in the class: what another engine does changes the third answer."""

    calls: ClassVar[list[int]] = []

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.calls.append(layer)
        return super().forward(layer, q, k, v) + (1e-3 if len(self.calls) % 3 == 0 else 0)


@attrs.define(eq=False)
class Silent(TorchKernel):
    """Gives None where it cannot."""

    @hookimpl
    def select_kernel(self, case: AttentionCase) -> Any:
        return TorchKernel.select_kernel(self, case) if case.head_dim % 8 == 0 else None


@attrs.define(eq=False)
class RefusesAll(TorchKernel):
    """No case is good enough."""

    @hookimpl
    def select_kernel(self, case: AttentionCase) -> Any:
        from core.types import Refusal

        return Refusal("not on this machine")


TablesInOrderPlugin = plugin(TablesInOrder)
ReadsUnusedPlugin = plugin(ReadsUnused)
OneTooManyPlugin = plugin(OneTooMany)
NoCausalMaskPlugin = plugin(NoCausalMask)
WrongHeadsPlugin = plugin(WrongHeads)
NoWindowPlugin = plugin(NoWindow)
NoCapPlugin = plugin(NoCap)
WritesPaddingPlugin = plugin(WritesPadding)
OtherLayerPlugin = plugin(OtherLayer)
ForgetsPlugin = plugin(Forgets)
WrongTypePlugin = plugin(WrongType)
SharedPlugin = plugin(Shared)
