"""Rows that tell a story: a very long context, and an agent that sends its whole history at every step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from core.ledger.inputs import Case, Row, figures, ratio, show, show_bytes, tail_tokens

LONG, AGENT = "Long context", "An agent"


def scenario_rows(case: Case) -> Iterator[Row]:
    """Both stories."""
    yield from _long_context(case)
    for name, shape in list(case.variants())[-1:]:
        yield from _agent(attrs.evolve(case, shape=shape), name)


def _long_context(case: Case) -> Iterator[Row]:
    length, tokens, block = max(case.inputs.max_model_lens), case.inputs.sequence_tokens, case.inputs.block_size
    for name, shape in case.variants():
        kv = shape.kv_bytes_per_token()
        slots = case.slots(length, kv)
        yield Row(
            key=f"long.{name}.naive", section=LONG, quantity=f"naive, S_max {length}, {name}", value=slots, unit="sequences",
            formula="floor(budget / slot)", numbers=f"floor({show_bytes(case.budget)} / {show_bytes(length * kv)})"
            + ("" if slots else ": a slot exceeds the budget"),
            text="" if slots else "none",
        )  # fmt: skip
        full, tail = case.paged(tokens, kv=kv)
        if slots:
            yield Row(
                key=f"long.{name}.naive_used", section=LONG, quantity="  used of the budget", unit="fraction",
                value=slots * tokens * kv / case.budget, formula="used / budget",
                numbers=f"{slots} x {tokens} x {show_bytes(kv)} / {show_bytes(case.budget)}",
            )  # fmt: skip
        yield Row(
            key=f"long.{name}.paged", section=LONG, quantity=f"paged, {name}, full blocks", value=full, unit="sequences",
            formula="floor(budget / (ceil(S / b) x block bytes))",
            numbers=f"floor({show_bytes(case.budget)} / ({math.ceil(tokens / block)} x {show_bytes(block * kv)}))",
        )  # fmt: skip
        yield Row(
            key=f"long.{name}.paged_tail", section=LONG, quantity=f"paged, {name}, mean tail", value=tail, unit="sequences",
            formula="floor(budget / ((S + (b - 1) / 2) x KV))",
            numbers=f"floor({show_bytes(case.budget)} / ({tokens + tail_tokens(block):g} x {show_bytes(kv)}))",
        )  # fmt: skip
        for key, held in (("lost", full), ("lost_tail", tail)):
            yield Row(
                key=f"long.{name}.{key}", section=LONG, value=ratio(held, slots), unit="x", formula="paged / naive",
                quantity=f"  paged / naive{', mean tail' if key == 'lost_tail' else ''}", numbers=f"{held} / {slots}",
                text="" if slots else "none",
            )  # fmt: skip


def _agent(case: Case, name: str) -> Iterator[Row]:
    inputs, shape = case.inputs, case.shape
    first, more, steps = inputs.agent_first_tokens, inputs.agent_tokens_per_step, inputs.agent_steps
    lengths = [first + more * k for k in range(steps)]
    sent, distinct = sum(lengths), lengths[-1]
    peak, slot = distinct * case.kv, inputs.agent_max_model_len * case.kv
    yield _agent_row(
        "submitted",
        f"prompt tokens submitted, {steps} steps",
        sent,
        "tokens",
        "sum over steps of (first + k x more)",
        f"{steps} steps from {first:,} to {distinct:,}",
    )
    yield _agent_row(
        "distinct",
        "  of them distinct",
        distinct,
        "tokens",
        "first + (steps - 1) x more",
        f"{first} + {steps - 1} x {more}",
    )
    yield _agent_row(
        "resent",
        "  sent again",
        1 - distinct / sent,
        "fraction",
        "1 - distinct / submitted",
        f"1 - {distinct:,} / {sent:,}",
    )
    yield _agent_row(
        "peak", f"KV at the end, {name}", peak, "B", "distinct x KV", f"{distinct:,} x {show_bytes(case.kv)}"
    )
    paged, naive = int(case.budget // peak), int(case.budget // slot)
    yield _agent_row(
        "sessions",
        "sessions at their end, paged",
        paged,
        "sequences",
        "floor(budget / KV at the end)",
        f"floor({show_bytes(case.budget)} / {show_bytes(peak)})",
    )
    yield _agent_row(
        "sessions_naive",
        f"sessions, naive at {inputs.agent_max_model_len}",
        naive,
        "sequences",
        "floor(budget / slot)",
        f"floor({show_bytes(case.budget)} / {show_bytes(slot)})",
    )
    yield _agent_row(
        "sessions_gain", "  paged / naive", ratio(paged, naive), "x", "paged / naive", f"{paged} / {naive}"
    )
    rate = f"{figures(case.rate / 1e12)} TFLOP/s"
    squares = sum(length**2 for length in lengths)
    for key, what, tokens, square in (
        ("", "prefill of all that is submitted", sent, squares),
        (".shared", "prefill with a shared prefix", distinct, distinct**2),
    ):
        linear, attention = 2 * shape.num_parameters * tokens, 4 * shape.attention_width * square
        size = f"{figures(shape.num_parameters / 1e9)}e9"
        yield _agent_row(
            f"prefill{key}.flop", f"{what}, weights", linear, "FLOP", "2 N x tokens", f"2 x {size} x {tokens:,}"
        )
        yield _agent_row(
            f"prefill{key}.seconds",
            "  in seconds",
            linear / case.rate,
            "s",
            "2 N x tokens / F",
            f"{show(linear, 'FLOP')} / {rate}",
        )
        yield _agent_row(
            f"prefill{key}.flop_all",
            "  with attention",
            linear + attention,
            "FLOP",
            "2 N x tokens + 4 L n_h d x sum of S^2",
            f"sum of S^2 = {square:,}",
        )
        yield _agent_row(
            f"prefill{key}.seconds_all",
            "  in seconds",
            (linear + attention) / case.rate,
            "s",
            "FLOP / F",
            f"{show(linear + attention, 'FLOP')} / {rate}",
        )


def _agent_row(key: str, quantity: str, value: float | None, unit: str, formula: str, numbers: str) -> Row:
    text = "-" if value is None else ""
    return Row(
        key=f"agent.{key}",
        section=AGENT,
        quantity=quantity,
        value=value,
        unit=unit,
        formula=formula,
        numbers=numbers,
        text=text,
    )
