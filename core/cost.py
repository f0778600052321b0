"""Seconds to move KV and seconds to compute it again: plain arithmetic on two measured rates.

    swap      = 2 x KV bytes / link_bytes_per_s                     (out and back in)
    recompute = (2 N S + 4 L n_h d S^2) / prefill_flop_per_s        (N parameters, L layers, n_h heads of d; S tokens)

The rates are measured at start on the machine that serves, or set in config (``cost.link_bytes_per_s``,
``cost.prefill_flop_per_s``), which tests and simulations do.
"""

from __future__ import annotations

import attrs

from core.types import ModelInfo

_positive = attrs.validators.gt(0)


@attrs.frozen(slots=True, kw_only=True)
class CostModel:
    """What preemption policies compare. All lengths in tokens, all results in seconds."""

    link_bytes_per_s: float = attrs.field(validator=_positive)  # device to host, and back
    prefill_flop_per_s: float = attrs.field(validator=_positive)
    kv_bytes_per_token: int = attrs.field(validator=_positive)
    num_parameters: int = attrs.field(validator=_positive)
    attention_width: int = 0  # layers x heads x head_dim

    @classmethod
    def of(cls, model: ModelInfo, link_bytes_per_s: float, prefill_flop_per_s: float) -> CostModel:
        return cls(
            link_bytes_per_s=link_bytes_per_s,
            prefill_flop_per_s=prefill_flop_per_s,
            kv_bytes_per_token=model.kv_bytes_per_token,
            num_parameters=model.num_parameters,
            attention_width=model.num_layers * model.num_heads * model.head_dim,
        )

    def swap_s(self, num_tokens: int) -> float:
        """Seconds to copy the KV of ``num_tokens`` tokens out to the host and in again."""
        return 2 * num_tokens * self.kv_bytes_per_token / self.link_bytes_per_s

    def prefill_flop(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """FLOP to compute the KV of tokens ``num_cached_tokens`` .. ``num_tokens`` of a sequence."""
        new = num_tokens - num_cached_tokens
        squares = num_tokens**2 - num_cached_tokens**2
        return 2 * self.num_parameters * new + 4 * self.attention_width * squares

    def recompute_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Seconds to compute the KV of ``num_tokens`` tokens again, less a prefix that is still cached."""
        return self.prefill_flop(num_tokens, num_cached_tokens) / self.prefill_flop_per_s

    def crossover_tokens(self) -> float | None:
        """Length from which swapping is cheaper, in tokens; 0 when it always is, None when recomputing always is."""
        linear = 2 * self.kv_bytes_per_token / self.link_bytes_per_s - 2 * self.num_parameters / self.prefill_flop_per_s
        square = 4 * self.attention_width / self.prefill_flop_per_s
        if linear <= 0:
            return 0.0
        return linear / square if square else None
