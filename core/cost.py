"""Seconds to move KV, to compute it again, and of a step: plain arithmetic on a few rates.

    swap      = 2 x KV bytes / link_bytes_per_s                               (out and back in)
    recompute = (2 N (S - C) + 4 L n_h d (S^2 - C^2)) / prefill_flop_per_s    (N parameters, L layers, n_h heads of d; S tokens, of
                                                                              which C are found again)
    step      = max(N b / memory_bytes_per_s, 2 N T / prefill_flop_per_s) + KV bytes read / memory_bytes_per_s    (T tokens)

The rates are measured at start on the machine that serves, or set in config (``cost.link_bytes_per_s``,
``cost.prefill_flop_per_s``, ``cost.memory_bytes_per_s``), which tests and simulations do.

For one sequence, ``swap_of`` and ``recompute_of`` take what sharing changes into account: shared blocks stay on the device, so they
are not moved; and where the allocator finds prefixes, tokens in blocks that others hold are found again, so they are not computed.
"""

from __future__ import annotations

import attrs

from core.types import HOLE, ModelInfo, SequenceView, View

_positive = attrs.validators.gt(0)


@attrs.frozen(slots=True, kw_only=True)
class CostModel:
    """What policies compare. All lengths in tokens, all results in seconds."""

    link_bytes_per_s: float = attrs.field(validator=_positive)  # device to host, and back
    prefill_flop_per_s: float = attrs.field(validator=_positive)
    kv_bytes_per_token: int = attrs.field(validator=_positive)
    num_parameters: int = attrs.field(validator=_positive)
    attention_width: int = 0  # layers x heads x head_dim
    weight_bytes: int = 0
    memory_bytes_per_s: float | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))

    @classmethod
    def of(
        cls,
        model: ModelInfo,
        link_bytes_per_s: float,
        prefill_flop_per_s: float,
        memory_bytes_per_s: float | None = None,
    ) -> CostModel:
        return cls(
            link_bytes_per_s=link_bytes_per_s,
            prefill_flop_per_s=prefill_flop_per_s,
            kv_bytes_per_token=model.kv_bytes_per_token,
            num_parameters=model.num_parameters,
            attention_width=model.num_layers * model.num_heads * model.head_dim,
            weight_bytes=model.num_parameters * (4 if model.dtype == "float32" else 2),
            memory_bytes_per_s=memory_bytes_per_s,
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

    # ------------------------------------------------------------------------------------------- one sequence

    def swap_of(self, sequence: SequenceView, block_size: int) -> float:
        """``swap_s`` of what a sequence alone holds: whole blocks, at most its computed tokens."""
        return self.swap_s(min(sequence.private_blocks * block_size, sequence.num_computed_tokens))

    def recompute_of(self, sequence: SequenceView, view: View) -> float:
        """``recompute_s`` of a sequence's computed tokens, less the leading ones in blocks that others keep, if they are found
        again."""
        shared = 0
        if view.finds_prefixes:
            refs = view.block_refs
            for block in sequence.block_table:
                if block == HOLE or refs[block] < 2:
                    break
                shared += view.block_size
        return self.recompute_s(sequence.num_computed_tokens, min(shared, sequence.num_computed_tokens))

    # ------------------------------------------------------------------------------------------- one step

    def step_s(self, num_tokens: int, kv_tokens: int) -> float:
        """Seconds of a step that computes ``num_tokens`` tokens and reads the KV of ``kv_tokens``.

        Without ``memory_bytes_per_s`` only computing counts: whoever needs more scales it by what steps turn out to take.
        """
        compute_s = 2 * self.num_parameters * num_tokens / self.prefill_flop_per_s
        if self.memory_bytes_per_s is None:
            return compute_s
        read_s = kv_tokens * self.kv_bytes_per_token / self.memory_bytes_per_s
        return max(self.weight_bytes / self.memory_bytes_per_s, compute_s) + read_s
