"""The arithmetic of a machine and a model: bytes, FLOP and seconds, by formula, for simulator, ledger and cost model alike.

No torch and no clock: a figure here depends on nothing but its inputs. Notation: N parameters, L layers, n_h heads,
n_kv KV heads of d elements, b bytes an element, S tokens, C of them cached. Decimal units (1 GB = 1e9 bytes).

    KV per token      2 L n_kv d b
    weights           N b
    prefill FLOP      2 N S + 4 L n_h d S^2            (with C cached: 2 N (S - C) + 4 L n_h d (S^2 - C^2))
    decode step       (weights + B x KV(S)) / bandwidth              the bare form, ``decode_step_s``
    a step, phased    sum over phases of max(bytes / bandwidth, FLOP / rate), plus overheads: ``StepModel``

The quadratic term counts both halves of the square, as the lecture notes and core/cost.py do, though a causal kernel
skips one: what is simulated then agrees with what policies are told, and with rates that were measured under the same
formula (core/calibrate.py).

**Phases of a step.** Layers alternate linear and attention work, and each kind meets its own limit, so times add up:

    linear     reads every body weight once; 2 x body parameters x tokens FLOP; or as measured (``linear_curve``)
    attention  decodes read the KV of all they see: bound by bytes nearly always; prefills pay the quadratic term
    head       reads the head's weights; 2 x head parameters x rows that need logits; or as measured (``head_curve``)
    cards      two all-reduces a layer, when the model is split over several cards
    overhead   fixed + per sequence + per token
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import attrs
from attrs.validators import ge, gt, in_, instance_of, le, optional

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
_count: list[Any] = [instance_of(int), ge(1)]
_rate: list[Any] = [instance_of((int, float)), gt(0)]
_seconds: list[Any] = [instance_of((int, float)), ge(0)]


@attrs.frozen(slots=True, kw_only=True)
class Shape:
    """What the arithmetic needs to know of a model, from its config alone."""

    name: str
    num_layers: int = attrs.field(validator=_count)
    hidden_size: int = attrs.field(validator=_count)
    intermediate_size: int = attrs.field(validator=_count)
    num_heads: int = attrs.field(validator=_count)
    num_kv_heads: int = attrs.field(validator=_count)
    head_dim: int = attrs.field(validator=_count)
    vocab_size: int = attrs.field(validator=_count)
    max_position: int = attrs.field(validator=_count)
    dtype: str = attrs.field(default="bfloat16", validator=in_(sorted(DTYPE_BYTES)))
    tied: bool = False  # the head's weights are the embedding's
    mlp_matrices: int = attrs.field(default=3, validator=_count)  # 3: gate, up, down; 2: up, down
    cards: int = attrs.field(default=1, validator=_count)  # the model is split over so many
    stated_parameters: int | None = attrs.field(default=None, validator=optional(_count))  # as published; None: counted

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def attention_width(self) -> int:
        """L n_h d: the quadratic term is 4 x this x S^2."""
        return self.num_layers * self.num_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def counted_parameters(self) -> int:
        """Weights of embedding, layers, norms and head, without biases."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + self.mlp_matrices * self.intermediate_size + 2)
        ends = self.embedding_parameters * (1 if self.tied else 2)
        return self.num_layers * layer + ends + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """N: as published where that is stated, else counted."""
        return self.stated_parameters or self.counted_parameters

    @property
    def head_parameters(self) -> int:
        """What the head reads and multiplies with: as many as the embedding."""
        return self.embedding_parameters

    @property
    def body_parameters(self) -> int:
        """What every token is multiplied with: all but the head and the embedding, of which a token reads one row."""
        return self.num_parameters - self.embedding_parameters * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        """N b, over all cards."""
        return self.num_parameters * self.dtype_bytes

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """2 L n_kv d b, over all cards; ``dtype`` of the cache, None: the model's."""
        width = DTYPE_BYTES[dtype or self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * width

    def prefill_flop(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """FLOP to compute the KV of tokens ``num_cached_tokens`` .. ``num_tokens`` of one sequence."""
        new = num_tokens - num_cached_tokens
        return 2 * self.num_parameters * new + 4 * self.attention_width * (num_tokens**2 - num_cached_tokens**2)


def _pairs(value: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(rows), float(rate)) for rows, rate in value)


def _check_curve(machine: object, attribute: attrs.Attribute, value: tuple[tuple[float, float], ...]) -> None:
    rows = [row for row, _ in value]
    if rows != sorted(set(rows)) or any(row < 1 or rate <= 0 for row, rate in value):
        raise ValueError(f"{attribute.name} must be [rows, FLOP/s] pairs by ascending rows, all above 0, got {value}")


@attrs.frozen(slots=True, kw_only=True)
class Machine:
    """One card (or a CPU) and its link to the host. Rates are per card; ``machine=h100`` and the like are made of this."""

    name: str
    memory_gb: float = attrs.field(validator=_rate)  # 1e9 bytes
    bandwidth_bytes_per_s: float = attrs.field(validator=_rate)  # of reading memory
    flop_per_s: float = attrs.field(validator=_rate)  # peak, at the model's type
    prefill_efficiency: float = attrs.field(default=0.5, validator=[gt(0), le(1)])  # of the peak, as matmuls reach it
    link_bytes_per_s: float = attrs.field(validator=_rate)  # device to host, and back
    card_link_bytes_per_s: float = attrs.field(default=450e9, validator=_rate)  # card to card, one way
    card_latency_s: float = attrs.field(default=0.0, validator=_seconds)  # of one all-reduce
    # fitted overheads
    step_overhead_s: float = attrs.field(default=0.0, validator=_seconds)  # every step
    sequence_overhead_s: float = attrs.field(default=0.0, validator=_seconds)  # every sequence in it
    token_overhead_s: float = attrs.field(default=0.0, validator=_seconds)  # every token computed in it
    move_overhead_s: float = attrs.field(default=0.0, validator=_seconds)  # every block moved
    # where attention or matmuls reach other rates than the above; None / empty: they do not. A curve is measured: reading
    # the weights is in it
    attention_bytes_per_s: float | None = attrs.field(default=None, validator=optional(_rate))
    attention_flop_per_s: float | None = attrs.field(default=None, validator=optional(_rate))
    linear_curve: tuple[tuple[float, float], ...] = attrs.field(default=(), converter=_pairs, validator=_check_curve)
    head_curve: tuple[tuple[float, float], ...] = attrs.field(default=(), converter=_pairs, validator=_check_curve)

    def read(self) -> Machine:
        """Itself: what ``machine=`` options answer with, as ``core.machines.Local`` does after reading its file."""
        return self

    @property
    def rate(self) -> float:
        """FLOP/s that matmuls reach."""
        return self.flop_per_s * self.prefill_efficiency

    @property
    def prefill_rate(self) -> float:
        """FLOP/s of matmuls of many rows."""
        return self.linear_curve[-1][1] if self.linear_curve else self.rate

    @property
    def ridge(self) -> float:
        """FLOP per byte at which peak compute and bandwidth take the same time."""
        return self.flop_per_s / self.bandwidth_bytes_per_s

    def linear_rate(self, rows: float) -> float:
        """FLOP/s of the layers' matmuls at so many rows: from ``linear_curve``, else ``rate``."""
        return rate_at(self.linear_curve, rows) if self.linear_curve else self.rate

    def head_rate(self, rows: float) -> float:
        """FLOP/s of the head's matmul at so many rows: from ``head_curve``, else as the layers'."""
        return rate_at(self.head_curve, rows) if self.head_curve else self.linear_rate(rows)


def rate_at(curve: Sequence[tuple[float, float]], rows: float) -> float:
    """FLOP/s at so many rows: between two points of the curve the seconds are linear in rows, beyond it the rate is flat."""
    i = bisect_left(curve, (rows, 0.0))
    if i == 0 or i == len(curve):
        return curve[min(i, len(curve) - 1)][1]
    (low, slow), (high, fast) = curve[i - 1], curve[i]
    share = (rows - low) / (high - low)
    return rows / (low / slow * (1 - share) + high / fast * share)


def budget_bytes(shape: Shape, machine: Machine, memory_fraction: float) -> float:
    """KV bytes that fit beside the weights: fraction x memory x cards - weights. May be negative: then nothing fits."""
    return memory_fraction * machine.memory_gb * 1e9 * shape.cards - shape.weight_bytes


def decode_step_s(shape: Shape, machine: Machine, num_sequences: float, context_tokens: float) -> float:
    """The bare form: (weights + B x KV(S)) / bandwidth, over all cards. A lower bound of a decode step."""
    kv = num_sequences * context_tokens * shape.kv_bytes_per_token()
    return (shape.weight_bytes + kv) / (machine.bandwidth_bytes_per_s * shape.cards)


def prefill_s(shape: Shape, machine: Machine, num_tokens: int, num_cached_tokens: int = 0) -> float:
    """The bare form: prefill FLOP / (efficiency x peak), over all cards."""
    return shape.prefill_flop(num_tokens, num_cached_tokens) / (machine.rate * shape.cards)


def swap_s(kv_bytes: float, machine: Machine, cards: int = 1) -> float:
    """Seconds to copy KV out to the host and in again; each card has its own link."""
    return 2 * kv_bytes / (machine.link_bytes_per_s * cards)


@attrs.define(slots=True)
class Work:
    """What one step computes. ``add`` one sequence after the other; a chunk of one token is a decode."""

    tokens: int = 0
    sequences: int = 0
    rows: int = 0  # that need logits
    decode_kv: int = 0  # tokens whose KV the decodes read
    prefill_kv: int = 0  # tokens whose KV the prefills read
    prefill_squares: int = 0  # sum of end^2 - start^2

    def add(self, start: int, end: int, sampled: bool) -> None:
        """One sequence computes its tokens ``start`` .. ``end`` and sees everything before them."""
        self.tokens += end - start
        self.sequences += 1
        self.rows += sampled
        if end - start == 1:
            self.decode_kv += end
        else:
            self.prefill_kv += end
            self.prefill_squares += end * end - start * start


@attrs.frozen(slots=True)
class Phases:
    """Seconds of one step by phase."""

    linear: float
    attention: float
    head: float
    cards: float
    overhead: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head + self.cards + self.overhead


class StepModel:
    """Prices steps of one model on one machine: the products of their constants, taken once."""

    def __init__(self, shape: Shape, machine: Machine, kv_dtype: str | None = None):
        self.shape, self.machine = shape, machine
        cards = shape.cards
        self._bandwidth = machine.bandwidth_bytes_per_s * cards
        self._kv_seconds = shape.kv_bytes_per_token(kv_dtype) / (
            (machine.attention_bytes_per_s or machine.bandwidth_bytes_per_s) * cards
        )
        self._square_seconds = 4 * shape.attention_width / ((machine.attention_flop_per_s or machine.rate) * cards)
        self._body_bytes_s = (
            0.0 if machine.linear_curve else shape.body_parameters * shape.dtype_bytes / self._bandwidth
        )
        self._head_bytes_s = 0.0 if machine.head_curve else shape.head_parameters * shape.dtype_bytes / self._bandwidth
        self._body_flop = 2 * shape.body_parameters / cards
        self._head_flop = 2 * shape.head_parameters / cards
        row_bytes = shape.hidden_size * shape.dtype_bytes
        self._reduce_s = 2 * shape.num_layers * 2 * (cards - 1) / cards * row_bytes / machine.card_link_bytes_per_s
        self._reduce_fixed_s = 2 * shape.num_layers * machine.card_latency_s if cards > 1 else 0.0

    def phases(self, work: Work) -> Phases:
        """Seconds of a step that computes ``work``; all 0 when it computes nothing."""
        if not work.tokens:
            return Phases(0.0, 0.0, 0.0, 0.0, 0.0)
        machine, kv_s, square_s = self.machine, self._kv_seconds, self._square_seconds
        linear = max(self._body_bytes_s, self._body_flop * work.tokens / machine.linear_rate(work.tokens))
        attention = max(work.decode_kv * kv_s, work.decode_kv * square_s)
        attention += max(work.prefill_kv * kv_s, work.prefill_squares * square_s)
        head = max(self._head_bytes_s, self._head_flop * work.rows / machine.head_rate(work.rows)) if work.rows else 0.0
        overhead = machine.step_overhead_s + machine.sequence_overhead_s * work.sequences
        overhead += machine.token_overhead_s * work.tokens
        return Phases(linear, attention, head, self._reduce_fixed_s + self._reduce_s * work.tokens, overhead)

    def seconds(self, work: Work) -> float:
        return self.phases(work).total


def machine_of(value: Any) -> Machine:
    """A machine from a mapping of its fields; an unknown field is a TypeError that names it."""
    return value if isinstance(value, Machine) else Machine(**value)
