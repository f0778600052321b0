"""Rows about seconds: decode steps and what meets a target, prefill beside decodes, swap against recompute."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from core.arithmetic import Shape, prefill_s, swap_s
from core.ledger.inputs import Case, Row, figures, ratio, show, show_bytes

DECODE, PREFILL, PREEMPT = "Decode and goodput", "Prefill beside decodes", "Swap or recompute"


def timing_rows(case: Case) -> Iterator[Row]:
    """Every row about seconds."""
    yield from _decode(case)
    yield from _goodput(case)
    yield from _ridge(case)
    yield from _prefill(case)
    for length in case.inputs.preempted_tokens:
        for name, variant in case.variants():
            yield from _preempt(attrs.evolve(case, shape=variant), name, length)
    yield from _crossover(case)


def largest_batch(case: Case) -> int:
    """Most sequences of the chat workload whose decode step meets the target; 0 when the weights alone take longer."""
    room = case.inputs.tpot_slo_ms / 1e3 * case.bandwidth - case.shape.weight_bytes
    return max(0, math.floor(room / (case.inputs.sequence_tokens * case.kv)))


def batches(case: Case) -> dict[int, str]:
    """Batch sizes worth a row, and what each is."""
    inputs = case.inputs
    found = {1: "alone"}
    naive = case.slots(inputs.max_model_len)
    full, tail = case.paged(inputs.sequence_tokens)
    for size, what in (
        (naive, f"naive at {inputs.max_model_len}"),
        (largest_batch(case), f"largest within {inputs.tpot_slo_ms:g} ms"),
        (tail, "paged with tail"),
        (full, "paged, full blocks"),
        (inputs.batch, "batch"),
    ):
        if size > 0:
            found[size] = f"{found[size]}, {what}" if size in found else what
    return dict(sorted(found.items()))


def _step_numbers(case: Case, size: int, tokens: int) -> str:
    return f"({show_bytes(case.shape.weight_bytes)} + {size} x {tokens} x {show_bytes(case.kv)}) / {show(case.bandwidth, 'B/s')}"


def _decode(case: Case) -> Iterator[Row]:
    inputs, tokens = case.inputs, case.inputs.sequence_tokens
    moved = case.shape.weight_bytes + inputs.batch * tokens * case.kv
    yield Row(
        key="decode.bytes", section=DECODE, quantity=f"bytes read a step, B = {inputs.batch}, {tokens} tokens", value=moved,
        unit="B", formula="weights + B x KV(S)",
        numbers=f"{show_bytes(case.shape.weight_bytes)} + {inputs.batch} x {show_bytes(tokens * case.kv)}",
    )  # fmt: skip
    for size, what in batches(case).items():
        yield Row(
            key=f"tpot.{size}", section=DECODE, quantity=f"TPOT, B = {size} ({what})", value=case.step_s(size), unit="s",
            formula="(weights + B x KV(S)) / bandwidth", numbers=_step_numbers(case, size, tokens),
        )  # fmt: skip
    best = largest_batch(case)
    yield Row(
        key="largest_batch", section=DECODE, quantity=f"largest B with TPOT <= {inputs.tpot_slo_ms:g} ms", value=best,
        unit="sequences", formula="floor((target x bandwidth - weights) / KV(S))",
        numbers=f"floor(({show_bytes(inputs.tpot_slo_ms / 1e3 * case.bandwidth)} - {show_bytes(case.shape.weight_bytes)})"
        f" / {show_bytes(tokens * case.kv)})",
        text="" if best else "none",
    )  # fmt: skip


def _goodput(case: Case) -> Iterator[Row]:
    inputs, target_s = case.inputs, case.inputs.tpot_slo_ms / 1e3
    for size, what in batches(case).items():
        step = case.step_s(size)
        yield Row(
            key=f"throughput.{size}", section=DECODE, quantity=f"throughput, B = {size} ({what})", value=size / step,
            unit="tokens/s", formula="B / step", numbers=f"{size} / {show(step, 's')}",
        )  # fmt: skip
        meets = step <= target_s
        yield Row(
            key=f"goodput.{size}", section=DECODE, quantity=f"  goodput under {inputs.tpot_slo_ms:g} ms",
            value=size / step if meets else 0.0, unit="tokens/s", formula="throughput if TPOT <= target, else 0",
            numbers=f"{show(step, 's')} {'meets' if meets else 'misses'} {inputs.tpot_slo_ms:g} ms",
        )  # fmt: skip
    naive = case.slots(inputs.max_model_len)
    if naive:
        step = case.step_s(naive, inputs.max_model_len)
        yield Row(
            key="throughput.naive_full_slots", section=DECODE, quantity=f"throughput, B = {naive}, full slots", unit="tokens/s",
            value=naive / step, formula="B / step with S = S_max", numbers=f"{naive} / {show(step, 's')}",
        )  # fmt: skip


def _ridge(case: Case) -> Iterator[Row]:
    machine = case.machine
    full, _ = case.paged(case.inputs.sequence_tokens)
    yield Row(
        key="ridge", section=DECODE, quantity="ridge", value=machine.ridge, unit="FLOP/B", formula="peak FLOP/s / bandwidth",
        numbers=f"{figures(machine.flop_per_s / 1e12)}e12 / {figures(machine.bandwidth_bytes_per_s / 1e9)}e9",
    )  # fmt: skip
    share = 2 / case.shape.dtype_bytes * full / machine.ridge
    yield Row(
        key="ridge.share", section=DECODE, quantity="share of the ridge with paging", value=share, unit="fraction",
        formula="2 B / b / ridge: weights give 2 FLOP a parameter of b bytes and sequence",
        numbers=f"{2 / case.shape.dtype_bytes:g} x {full} / {figures(machine.ridge)}",
    )  # fmt: skip


def ambient_s(case: Case) -> float | None:
    """A decode step with every naive slot full: the longest that the workload's steps get. None where none fits."""
    slots = case.slots(case.inputs.max_model_len)
    return case.step_s(slots, case.inputs.max_model_len) if slots else None


def _prefill(case: Case) -> Iterator[Row]:
    inputs, length = case.inputs, case.inputs.max_model_len
    shape, machine = case.shape, case.machine
    ambient, slots = ambient_s(case), case.slots(length)
    yield Row(
        key="scheduling_delay", section=PREFILL, quantity="scheduling delay at most (ambient TPOT)", value=ambient, unit="s",
        formula="one step: (weights + naive slots x slot) / bandwidth", numbers=_step_numbers(case, slots, length),
        text="" if ambient else "none",
    )  # fmt: skip
    whole = prefill_s(shape, machine, length)
    yield Row(
        key="prefill", section=PREFILL, quantity=f"prefill of {length} tokens", value=whole, unit="s",
        formula="(2 N S + 4 L n_h d S^2) / F", numbers=f"{show(shape.prefill_flop(length), 'FLOP')} / {_rate(case)}",
    )  # fmt: skip
    yield Row(
        key="interference", section=PREFILL, quantity="TPOT of the others, that prefill in one step", unit="x",
        value=ratio(whole + (ambient or 0), ambient or 0), formula="(prefill + ambient) / ambient",
        numbers=f"({show(whole, 's')} + {show(ambient, 's')}) / {show(ambient, 's')}",
    )  # fmt: skip
    chunk = min(inputs.max_num_batched_tokens, length)
    last = prefill_s(shape, machine, length, length - chunk)
    yield Row(
        key="interference.chunk", section=PREFILL, quantity=f"  in chunks of {chunk} (the last, dearest one)", unit="x",
        value=ratio(last + (ambient or 0), ambient or 0), formula="(chunk + ambient) / ambient",
        numbers=f"({show(last, 's')} + {show(ambient, 's')}) / {show(ambient, 's')}",
    )  # fmt: skip


def _rate(case: Case) -> str:
    return f"{figures(case.rate / 1e12)} TFLOP/s"


def break_even(case: Case, length: float) -> float:
    """Link bandwidth (bytes a second, of all cards) at which swapping so many tokens takes as long as computing them again."""
    return 2 * length * case.kv * case.rate / case.shape.prefill_flop(length)  # type: ignore[arg-type]


def _preempt(case: Case, name: str, length: int) -> Iterator[Row]:
    shape, machine = case.shape, case.machine
    held = length * case.kv
    swap, again = swap_s(held, machine, shape.cards), prefill_s(shape, machine, length)
    link = machine.link_bytes_per_s * shape.cards
    what, key = f"{length} tokens, {name}", f"preempt.{length}.{name}"
    yield Row(
        key=f"{key}.kv", section=PREEMPT, quantity=f"{what}: KV", value=held, unit="B", formula="S x KV",
        numbers=f"{length:,} x {show_bytes(case.kv)}",
    )  # fmt: skip
    yield Row(
        key=f"{key}.swap", section=PREEMPT, quantity="  swap out and in", value=swap, unit="s", formula="2 KV(S) / link",
        numbers=f"2 x {show_bytes(held)} / {show(link, 'B/s')}",
    )  # fmt: skip
    linear, square = 2 * shape.num_parameters * length, 4 * shape.attention_width * length**2
    yield Row(
        key=f"{key}.recompute", section=PREEMPT, quantity="  recompute", value=again, unit="s",
        formula="(2 N S + 4 L n_h d S^2) / F", numbers=f"({show(linear, 'FLOP')} + {show(square, 'FLOP')}) / {_rate(case)}",
    )  # fmt: skip
    yield Row(
        key=f"{key}.ratio", section=PREEMPT, quantity="  recompute / swap", value=again / swap, unit="x", formula="",
        numbers=f"{show(again, 's')} / {show(swap, 's')}: {'swap' if swap < again else 'recompute'} is faster",
    )  # fmt: skip
    yield Row(
        key=f"{key}.break_even", section=PREEMPT, quantity="  break-even link", value=break_even(case, length), unit="B/s",
        formula="2 KV(S) F / FLOP(S)", numbers=f"2 x {show_bytes(held)} x {_rate(case)} / {show(linear + square, 'FLOP')}",
    )  # fmt: skip


def crossover_tokens(shape: Shape, link: float, rate: float) -> float | None:
    """Length at which swap and recompute take equally long; below it recompute is faster, above it swap. None: swap always is."""
    numerator = 2 * shape.kv_bytes_per_token() * rate / link - 2 * shape.num_parameters
    return numerator / (4 * shape.attention_width) if numerator > 0 else None


def _crossover(case: Case) -> Iterator[Row]:
    cards = case.shape.cards
    links = {"slow": case.inputs.slow_link_gb_per_s * 1e9 * cards, "link": case.machine.link_bytes_per_s * cards}
    for name, shape in case.variants():
        for which, link in links.items():
            found = crossover_tokens(shape, link, case.rate)
            yield Row(
                key=f"crossover.{which}.{name}", section=PREEMPT, unit="tokens", value=found,
                quantity=f"crossover length, {name}, {show(link, 'B/s')}",
                formula="(2 KV F / W - 2 N) / (4 L n_h d): shorter recompute, longer swap",
                numbers=f"(2 x {show_bytes(shape.kv_bytes_per_token())} x {_rate(case)} / {show(link, 'B/s')}"
                f" - {figures(2 * shape.num_parameters / 1e9)}e9) / {4 * shape.attention_width:,}"
                + (": below 0, swap is always faster" if found is None else ""),
                text="none" if found is None else f"{found:,.0f}",
            )  # fmt: skip
        most = shape.kv_bytes_per_token() * case.rate / shape.num_parameters
        yield Row(
            key=f"break_even.most.{name}", section=PREEMPT, quantity=f"break-even link at most, {name}", unit="B/s", value=most,
            formula="KV F / N: the limit for short sequences; a faster link always swaps",
            numbers=f"{show_bytes(shape.kv_bytes_per_token())} x {_rate(case)} / {figures(shape.num_parameters / 1e9)}e9",
        )  # fmt: skip
