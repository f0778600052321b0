"""What the ledger takes in, the rows it gives out, and the few figures that most rows start from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import attrs

from core.arithmetic import Machine, Shape, budget_bytes, decode_step_s
from core.types import ConfigError

UNITS = ("B", "s", "tokens", "sequences", "blocks", "fraction", "x", "FLOP", "FLOP/B", "B/s", "tokens/s", "copies")


@attrs.frozen(slots=True, kw_only=True)
class Row:
    """One figure. ``value`` None: there is none, and ``text`` says why."""

    key: str
    section: str
    quantity: str
    value: float | int | None
    unit: str = attrs.field(validator=attrs.validators.in_(UNITS))
    formula: str  # in symbols
    numbers: str  # the same with the numbers put in
    text: str = ""  # shown instead of the value

    @property
    def shown(self) -> str:
        return self.text or show(self.value, self.unit)


def figures(value: float, digits: int = 4) -> str:
    """So many significant digits, thousands marked, no exponent; halves go up, as on paper."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP):,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def show(value: float | int | None, unit: str) -> str:
    """A value with its unit, in decimal units (1 GB = 1e9 bytes), but KiB where it is a whole number of them."""
    if value is None:
        return "-"
    if unit == "B":
        return show_bytes(value)
    if unit == "s":
        scale, name = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
        return f"{figures(value * scale)} {name}"
    if unit == "fraction":
        return f"{figures(100 * value)} %"
    if unit == "x":
        return f"{figures(value)}x"
    if unit == "FLOP":
        scale, name = (1e15, "PFLOP") if value >= 1e15 else (1e12, "TFLOP") if value >= 1e12 else (1e9, "GFLOP")
        return f"{figures(value / scale)} {name}"
    if unit == "B/s":
        return f"{figures(value / 1e9)} GB/s"
    if unit in ("tokens", "sequences", "blocks", "copies") and float(value).is_integer():
        return f"{int(value):,}"
    return f"{figures(value)} {unit if unit in ('FLOP/B', 'tokens/s') else ''}".strip()


def show_bytes(value: float) -> str:
    if 1024 <= value < 2**20 and float(value).is_integer() and value % 1024 == 0:
        return f"{figures(value / 1024)} KiB"
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if abs(value) >= scale:
            return f"{figures(value / scale)} {name}"
    return f"{figures(value)} B"


# ------------------------------------------------------------------------------------------------ inputs


def _whole(low: int) -> Any:
    def check(instance: object, attribute: attrs.Attribute, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{attribute.name}={value!r}: allowed is a whole number from {low}")

    return check


def _number(allowed: str, holds: Callable[[float], bool], null: bool = False) -> Any:
    def check(instance: object, attribute: attrs.Attribute, value: Any) -> None:
        if null and value is None:
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not holds(value)
        ):
            raise ConfigError(f"{attribute.name}={value!r}: allowed is {allowed}{', or null' if null else ''}")

    return check


def _wholes(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if not isinstance(value, tuple) or not value or len(set(value)) != len(value):
        raise ConfigError(f"{attribute.name}={value!r}: allowed is a list of different whole numbers, e.g. [16,64]")
    for each in value:
        if not isinstance(each, int) or isinstance(each, bool) or each < 1:
            raise ConfigError(f"{attribute.name}={list(value)!r}: allowed are whole numbers from 1")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _list(*default: int) -> Any:
    return attrs.field(default=default, converter=_tuple, validator=_wholes)


_above_0 = _number("a number above 0", lambda v: v > 0)


@attrs.frozen(slots=True, kw_only=True)
class Inputs:
    """What may be changed with ``name=value``. The defaults are those of the reference table (docs/ledger.md)."""

    memory_fraction: float = attrs.field(default=0.95, validator=_number("above 0 up to 1", lambda v: 0 < v <= 1))
    kv_budget_gb: float | None = attrs.field(default=None, validator=_number("a number above 0", lambda v: v > 0, True))
    block_size: int = attrs.field(default=16, validator=_whole(1))
    block_sizes: tuple[int, ...] = _list(1, 16, 64, 256)  # compared
    max_model_len: int = attrs.field(default=4096, validator=_whole(2))  # S_max: what naive reserves a sequence
    max_model_lens: tuple[int, ...] = _list(4096, 32768, 131072)  # compared
    prompt_tokens: int = attrs.field(default=512, validator=_whole(1))
    output_tokens: int = attrs.field(default=128, validator=_whole(1))
    batch: int = attrs.field(default=199, validator=_whole(1))  # B, where a row needs one
    tpot_slo_ms: float = attrs.field(default=20.0, validator=_above_0)
    max_num_batched_tokens: int = attrs.field(default=512, validator=_whole(1))  # a chunk of a prompt beside decodes
    preempted_tokens: tuple[int, ...] = _list(4096, 16384)  # swapped out or computed again
    slow_link_gb_per_s: float = attrs.field(default=32.0, validator=_above_0)  # compared with the machine's
    gqa_kv_heads: int | None = None  # of the variant compared; null: 8 where that divides the heads
    fanout_n: tuple[int, ...] = attrs.field(default=(8, 16), converter=_tuple, validator=_wholes)
    fanout_prompts: tuple[int, ...] = attrs.field(default=(4096, 8192), converter=_tuple)
    fanout_outputs: tuple[int, ...] = attrs.field(default=(256, 512), converter=_tuple)
    classes: tuple[int, ...] = _list(512, 4096, 32768)  # per-request S_max
    class_percents: tuple[int, ...] = attrs.field(default=(70, 25, 5), converter=_tuple)
    median_tokens: int = attrs.field(default=800, validator=_whole(1))  # log-normal lengths
    tail_tokens: int = attrs.field(default=20000, validator=_whole(1))  # 5 % are longer
    agent_first_tokens: int = attrs.field(default=2000, validator=_whole(1))
    agent_tokens_per_step: int = attrs.field(default=300, validator=_whole(0))
    agent_steps: int = attrs.field(default=20, validator=_whole(1))
    agent_max_model_len: int = attrs.field(default=16384, validator=_whole(1))
    shared_tokens: int = attrs.field(default=2000, validator=_whole(1))  # a system prompt

    def __attrs_post_init__(self) -> None:
        for first, others in (("fanout_n", ("fanout_prompts", "fanout_outputs")), ("classes", ("class_percents",))):
            for name in others:
                value, want = getattr(self, name), len(getattr(self, first))
                if not isinstance(value, tuple) or len(value) != want or not all(_is_whole(each) for each in value):
                    raise ConfigError(
                        f"{name}={value!r}: allowed are {want} whole numbers from 1, one for each of {first}"
                    )
        if sum(self.class_percents) != 100:
            raise ConfigError(f"class_percents={list(self.class_percents)}: they must add up to 100")
        if self.tail_tokens <= self.median_tokens:
            raise ConfigError(
                f"tail_tokens={self.tail_tokens}: it must be more than median_tokens={self.median_tokens}"
            )
        if self.gqa_kv_heads is not None and not _is_whole(self.gqa_kv_heads):
            raise ConfigError(f"gqa_kv_heads={self.gqa_kv_heads!r}: allowed is a whole number from 1, or null")

    @property
    def sequence_tokens(self) -> int:
        """Prompt and output of the chat workload."""
        return self.prompt_tokens + self.output_tokens


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# ------------------------------------------------------------------------------------------------ what most rows start from


@attrs.frozen(kw_only=True)
class Case:
    """A model, a machine and the inputs, with the figures that several rows share."""

    shape: Shape
    machine: Machine
    inputs: Inputs

    @property
    def kv(self) -> int:
        """KV bytes of a token."""
        return self.shape.kv_bytes_per_token()

    @property
    def budget(self) -> float:
        """KV bytes in all; never below 0."""
        given = self.inputs.kv_budget_gb
        found = budget_bytes(self.shape, self.machine, self.inputs.memory_fraction) if given is None else given * 1e9
        return max(0.0, found)

    @property
    def bandwidth(self) -> float:
        """Of all cards, bytes a second."""
        return self.machine.bandwidth_bytes_per_s * self.shape.cards

    @property
    def rate(self) -> float:
        """FLOP/s of a prefill, over all cards."""
        return self.machine.rate * self.shape.cards

    def slots(self, max_model_len: int, kv: int | None = None) -> int:
        """Sequences that naive holds: floor(budget / slot)."""
        return int(self.budget // (max_model_len * (kv or self.kv)))

    def paged(self, tokens: float, block: int | None = None, kv: int | None = None) -> tuple[int, int]:
        """Sequences of so many tokens in paged blocks: in full blocks, and with a mean tail of (b - 1) / 2 tokens."""
        block, kv = block or self.inputs.block_size, kv or self.kv
        full = math.ceil(tokens / block) * block
        return int(self.budget // (full * kv)), int(self.budget // ((tokens + tail_tokens(block)) * kv))

    def step_s(self, num_sequences: float, tokens: float | None = None) -> float:
        """Seconds of one decode step, by bandwidth."""
        return decode_step_s(self.shape, self.machine, num_sequences, tokens or self.inputs.sequence_tokens)

    def variants(self) -> Iterable[tuple[str, Shape]]:
        """The model with a KV head for every head, and with fewer: what grouped queries alone change."""
        heads = self.shape.num_heads
        fewer = self.inputs.gqa_kv_heads
        if fewer is None:
            fewer = 8 if heads % 8 == 0 and heads > 8 else self.shape.num_kv_heads
        if heads % fewer:
            raise ConfigError(f"gqa_kv_heads={fewer}: it must divide the {heads} heads of {self.shape.name}")
        found = [("MHA", attrs.evolve(self.shape, num_kv_heads=heads))]
        return found if fewer == heads else [*found, (f"GQA-{fewer}", attrs.evolve(self.shape, num_kv_heads=fewer))]


def tail_tokens(block: int) -> float:
    """The last block's empty slots in the mean over all lengths: (b - 1) / 2."""
    return (block - 1) / 2


def ratio(one: float, other: float) -> float | None:
    return one / other if other else None
