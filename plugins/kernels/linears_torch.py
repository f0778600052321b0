"""``linears=torch``: the model's own torch.nn.Linear layers, as they are."""

from __future__ import annotations

from typing import Any

import attrs

from core.hookspecs import hookimpl


@attrs.define(eq=False)
class TorchLinears:
    """Leaves every linear layer to torch."""

    @hookimpl
    def prepare_model(self, model: Any) -> tuple[Any, str]:
        return model, "linears: torch.nn.Linear, unchanged"
