"""``linears=packed | onednn``: linear layers in the form that is fastest here, and the decoder around them without overhead.

A model that ``decoder.Decoder`` knows is replaced by it, if their logits agree. In any other model each ``torch.nn.Linear``
is replaced by itself. Which form each shape gets is measured at start and printed; a form that cannot be had is named.
Only float32 models on a CPU are changed.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attrs.validators import deep_iterable, in_

from core.hookspecs import hookimpl
from plugins.kernels.decoder import TOLERANCE, CpuOperators, Decoder, TorchOperators, difference, refusal
from plugins.kernels.linears import FORMS, Chooser, Linear, available


class FastLinear(torch.nn.Module):
    """A ``torch.nn.Linear`` [.., K] -> [.., N] in another form."""

    def __init__(self, linear: Linear, width: int):
        super().__init__()
        self.linear, self.width = linear, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = self.linear(rows, rows.new_empty(len(rows), self.width))
        return out.view(*x.shape[:-1], self.width)


@attrs.define(eq=False)
class FastLinears:
    """See the module docstring. ``forms``: those to try, of compact, packed, onednn and torch."""

    forms: list[str] = attrs.field(factory=lambda: list(FORMS), validator=deep_iterable(in_(tuple(FORMS))))

    @hookimpl
    def prepare_model(self, model: Any) -> tuple[Any, str] | None:
        weight = next(model.parameters())
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return None
        can, cannot = available(self.forms)
        if not set(can) - {"torch"}:
            return None
        chooser = Chooser(can)
        with torch.no_grad():
            decoder, why_not = self._decoder(model, bool({"compact", "packed"} & set(can)))
            if decoder is not None:
                decoder.pack(chooser)
            else:
                replace_linears(model, chooser)
        how = "layers called directly, q+k+v and gate+up merged" if decoder is not None else f"one by one ({why_not})"
        return decoder or model, "; ".join([f"linears: {chooser.line}; {how}", *cannot])

    def _decoder(self, model: Any, compiled: bool) -> tuple[Decoder | None, str]:
        """The model as a ``Decoder`` with the same logits, or why there is none."""
        if reason := refusal(model):
            return None, reason
        decoder = Decoder(model, CpuOperators() if compiled else TorchOperators())
        apart = difference(model, decoder, model.config.vocab_size)
        if not apart <= TOLERANCE:
            return None, f"called directly, its logits differ by {apart:.2g}, more than {TOLERANCE:g}"
        return decoder.eval(), ""


def replace_linears(model: torch.nn.Module, chooser: Chooser) -> None:
    """Put a ``FastLinear`` in the place of every ``torch.nn.Linear``; tied weights stay where they are used otherwise."""
    places = [
        (parent, name, module)
        for parent in model.modules()
        for name, module in parent.named_children()
        if type(module) is torch.nn.Linear
    ]
    for parent, name, module in places:
        bias = None if module.bias is None else module.bias.detach()
        setattr(parent, name, FastLinear(chooser.make(module.weight.detach(), bias, name), module.out_features))
