"""Rows about bytes: what a token, a slot, a block and a table take, how many sequences fit, and what is wasted."""

from __future__ import annotations

import math
from collections.abc import Iterator

from core.ledger.inputs import Case, Row, figures, ratio, show_bytes, tail_tokens

BYTES, FIT, WASTE, SHARE = "Bytes", "Sequences at once", "Waste and tables", "Sharing"
POINTER_BYTES = 8


def memory_rows(case: Case) -> Iterator[Row]:
    """Every row about bytes."""
    yield from _bytes(case)
    yield from _naive(case)
    yield from _paged(case)
    yield from _classes(case)
    yield from _waste(case)
    yield from _tables(case)
    yield from _lognormal(case)
    yield from _fanout(case)


def _bytes(case: Case) -> Iterator[Row]:
    shape, machine, inputs = case.shape, case.machine, case.inputs
    yield Row(
        key="kv_per_token", section=BYTES, quantity=f"KV per token, {shape.name}", value=case.kv, unit="B",
        formula="2 L n_kv d b",
        numbers=f"2 x {shape.num_layers} x {shape.num_kv_heads} x {shape.head_dim} x {shape.dtype_bytes} B",
    )  # fmt: skip
    for name, variant in case.variants():
        yield Row(
            key=f"kv_per_token.{name}", section=BYTES, quantity=f"KV per token, {name}", unit="B",
            value=variant.kv_bytes_per_token(), formula="2 L n_kv d b",
            numbers=f"2 x {shape.num_layers} x {variant.num_kv_heads} x {shape.head_dim} x {shape.dtype_bytes} B",
        )  # fmt: skip
    yield Row(
        key="weights", section=BYTES, quantity="weights", value=shape.weight_bytes, unit="B", formula="N b",
        numbers=f"{figures(shape.num_parameters / 1e9)}e9 x {shape.dtype_bytes} B",
    )  # fmt: skip
    given = inputs.kv_budget_gb is not None
    fits = case.budget > 0
    yield Row(
        key="kv_budget", section=BYTES, quantity="KV budget", value=case.budget, unit="B",
        formula="kv_budget_gb" if given else "memory_fraction x memory x cards - weights",
        numbers=f"{inputs.kv_budget_gb:g} GB, as given" if given else
        f"{inputs.memory_fraction:g} x {machine.memory_gb:g} GB x {shape.cards} - {show_bytes(shape.weight_bytes)}"
        + ("" if fits else ": the weights do not fit"),
        text="" if fits else "none",
    )  # fmt: skip
    for length in inputs.max_model_lens:
        yield Row(
            key=f"slot.{length}", section=BYTES, quantity=f"slot at S_max {length}", value=length * case.kv, unit="B",
            formula="S_max x KV", numbers=f"{length:,} x {show_bytes(case.kv)}",
        )  # fmt: skip
    block = inputs.block_size
    yield Row(
        key="block", section=BYTES, quantity=f"block of {block} tokens", value=block * case.kv, unit="B", formula="b x KV",
        numbers=f"{block} x {show_bytes(case.kv)}",
    )  # fmt: skip


def _naive(case: Case) -> Iterator[Row]:
    tokens = case.inputs.sequence_tokens
    for length in dict.fromkeys((case.inputs.max_model_len, *case.inputs.max_model_lens)):
        slots = case.slots(length)
        used, reserved = slots * tokens * case.kv, slots * length * case.kv
        yield Row(
            key=f"naive.{length}", section=FIT, quantity=f"naive, S_max {length}", value=slots, unit="sequences",
            formula="floor(budget / slot)", numbers=f"floor({show_bytes(case.budget)} / {show_bytes(length * case.kv)})"
            + ("" if slots else ": a slot exceeds the budget"),
            text="" if slots else "none",
        )  # fmt: skip
        if not slots or tokens > length:
            continue
        yield Row(
            key=f"naive.{length}.used_of_budget", section=FIT, quantity=f"  used of the budget, {tokens} tokens each",
            value=used / case.budget, unit="fraction", formula="used / budget",
            numbers=f"{slots} x {tokens} x {show_bytes(case.kv)} / {show_bytes(case.budget)}",
        )  # fmt: skip
        yield Row(
            key=f"naive.{length}.used_of_reserved", section=FIT, quantity="  used of what is reserved", unit="fraction",
            value=used / reserved, formula="used / reserved", numbers=f"{tokens} / {length} tokens",
        )  # fmt: skip


def _paged(case: Case) -> Iterator[Row]:
    inputs, tokens, block = case.inputs, case.inputs.sequence_tokens, case.inputs.block_size
    full, tail = case.paged(tokens)
    budget = show_bytes(case.budget)
    blocks = math.ceil(tokens / block)
    yield Row(
        key="paged.full_blocks", section=FIT, quantity=f"paged, block {block}, all full", value=full, unit="sequences",
        formula="floor(budget / (ceil(S / b) x block bytes))",
        numbers=f"floor({budget} / ({blocks} x {show_bytes(block * case.kv)})), S = {tokens}",
    )  # fmt: skip
    yield Row(
        key="paged.with_tail", section=FIT, quantity=f"paged, block {block}, mean tail", value=tail, unit="sequences",
        formula="floor(budget / ((S + (b - 1) / 2) x KV))",
        numbers=f"floor({budget} / ({tokens + tail_tokens(block):g} x {show_bytes(case.kv)}))",
    )  # fmt: skip
    naive = case.slots(inputs.max_model_len)
    yield Row(
        key="paged.gain", section=FIT, quantity=f"paged against naive at {inputs.max_model_len}", value=ratio(full, naive),
        unit="x", formula="paged / naive", numbers=f"{full} / {naive}", text="" if naive else "none",
    )  # fmt: skip
    mean = inputs.prompt_tokens + inputs.output_tokens / 2
    yield Row(
        key="paged.growing", section=FIT, quantity="paged, sequences that grow, mean", unit="sequences",
        value=case.paged(mean)[1], formula="floor(budget / ((P + O / 2 + (b - 1) / 2) x KV))",
        numbers=f"floor({budget} / ({mean + tail_tokens(block):g} x {show_bytes(case.kv)}))",
    )  # fmt: skip
    yield Row(
        key="paged.bare_prompts", section=FIT, quantity="paged, bare prompts (the start)", unit="sequences",
        value=case.paged(inputs.prompt_tokens)[0], formula="floor(budget / (ceil(P / b) x block bytes))",
        numbers=f"floor({budget} / ({math.ceil(inputs.prompt_tokens / block)} x {show_bytes(block * case.kv)}))",
    )  # fmt: skip


def _classes(case: Case) -> Iterator[Row]:
    inputs = case.inputs
    pairs = list(zip(inputs.classes, inputs.class_percents, strict=True))
    mean = sum(length * percent for length, percent in pairs) / 100
    parts = " + ".join(f"{percent / 100:g} x {length}" for length, percent in pairs)
    yield Row(
        key="classes.mean_slot", section=FIT, quantity="maximum by request: mean slot", value=mean * case.kv, unit="B",
        formula="sum of share x S_max x KV", numbers=f"({parts}) x {show_bytes(case.kv)}",
    )  # fmt: skip
    yield Row(
        key="classes.sequences", section=FIT, quantity="maximum by request: sequences", unit="sequences",
        value=int(case.budget // (mean * case.kv)), formula="floor(budget / mean slot), external waste left out",
        numbers=f"floor({show_bytes(case.budget)} / {show_bytes(mean * case.kv)})",
    )  # fmt: skip


def _waste(case: Case) -> Iterator[Row]:
    tokens, batch = case.inputs.sequence_tokens, case.inputs.batch
    for block in case.inputs.block_sizes:
        tail = tail_tokens(block)
        yield Row(
            key=f"tail.{block}", section=WASTE, quantity=f"tail, block {block}: tokens a sequence", value=tail,
            unit="tokens", formula="(b - 1) / 2", numbers=f"({block} - 1) / 2",
        )  # fmt: skip
        yield Row(
            key=f"tail.{block}.of_held", section=WASTE, quantity="  of used + tail", value=tail / (tokens + tail),
            unit="fraction", formula="tail / (used + tail)", numbers=f"{tail:g} / ({tokens} + {tail:g})",
        )  # fmt: skip
        yield _tail_of_budget(case, f"tail.{block}.of_budget", f"  of the budget, B = {batch}", block)


def _tail_of_budget(case: Case, key: str, quantity: str, block: int) -> Row:
    tail, batch = tail_tokens(block), case.inputs.batch
    return Row(
        key=key, section=WASTE, quantity=quantity, unit="fraction",
        value=ratio(batch * tail * case.kv, case.budget), formula="B x tail x KV / budget",
        numbers=f"{batch} x {tail:g} x {show_bytes(case.kv)} / {show_bytes(case.budget)}",
    )  # fmt: skip


def _tables(case: Case) -> Iterator[Row]:
    length = case.inputs.max_model_len
    for block in case.inputs.block_sizes:
        entries = math.ceil(length / block)
        yield Row(
            key=f"table.{block}", section=WASTE, quantity=f"table entries at {length} tokens, block {block}", unit="blocks",
            value=entries, formula="ceil(S / b)", numbers=f"ceil({length} / {block})",
        )  # fmt: skip
    entries = math.ceil(length / case.inputs.block_size)
    yield Row(
        key="table.bytes", section=WASTE, quantity=f"table bytes, block {case.inputs.block_size}", unit="B",
        value=entries * POINTER_BYTES, formula="entries x 8 B",
        numbers=f"{entries} x 8 B, for {show_bytes(length * case.kv)} of KV",
    )  # fmt: skip
    yield Row(
        key="table.of_kv", section=WASTE, quantity="  of the KV it maps", value=entries * POINTER_BYTES / (length * case.kv),
        unit="fraction", formula="table bytes / KV(S)", numbers=f"{entries * POINTER_BYTES} B / {show_bytes(length * case.kv)}",
    )  # fmt: skip


def _lognormal(case: Case) -> Iterator[Row]:
    """Block size from a distribution of lengths: the tail does not depend on it, the table does."""
    inputs = case.inputs
    for block in dict.fromkeys((8, 16, *inputs.block_sizes[2:], 64, 256)):
        what = f"log-normal, block {block}"
        yield _tail_of_budget(case, f"lognormal.{block}.of_budget", f"{what}: tail of budget", block)
        for at, length in (("median", inputs.median_tokens), ("95 %", inputs.tail_tokens)):
            yield Row(
                key=f"lognormal.{block}.entries_{at.replace(' %', '')}", section=WASTE, unit="blocks",
                quantity=f"  entries at {length} tokens ({at})", value=math.ceil(length / block), formula="ceil(S / b)",
                numbers=f"ceil({length} / {block})",
            )  # fmt: skip


def _fanout(case: Case) -> Iterator[Row]:
    inputs = case.inputs
    for n, prompt, output in zip(inputs.fanout_n, inputs.fanout_prompts, inputs.fanout_outputs, strict=True):
        apart, shared = n * (prompt + output), prompt + n * output
        what = f"fan-out of {n}, {prompt} + {output}"
        for key, name, tokens, formula, numbers in (
            ("apart", "unshared", apart, "n (P + O)", f"{n} x ({prompt} + {output})"),
            ("shared", "shared", shared, "P + n O", f"{prompt} + {n} x {output}"),
        ):
            yield Row(
                key=f"fanout.{n}.{key}", section=SHARE, quantity=f"{what}: {name}", value=tokens, unit="tokens",
                formula=formula, numbers=numbers,
            )  # fmt: skip
            yield Row(
                key=f"fanout.{n}.{key}_bytes", section=SHARE, quantity="  in bytes", value=tokens * case.kv, unit="B",
                formula="tokens x KV", numbers=f"{tokens:,} x {show_bytes(case.kv)}",
            )  # fmt: skip
        yield Row(
            key=f"fanout.{n}.gain", section=SHARE, quantity="  unshared / shared", value=apart / shared, unit="x",
            formula="n (P + O) / (P + n O)", numbers=f"{apart:,} / {shared:,}",
        )  # fmt: skip
    n = inputs.fanout_n[0]
    for block in inputs.block_sizes:
        one = block * case.kv
        yield Row(
            key=f"copy_on_write.{block}", section=SHARE, quantity=f"copy on write, fan-out of {n}, block {block}", unit="B",
            value=n * one, formula="n x block bytes at most (part-full last block; the last writer needs no copy: n - 1)",
            numbers=f"{n} x {show_bytes(one)}; n - 1: {show_bytes((n - 1) * one)}",
        )  # fmt: skip
    yield Row(
        key="shared_prompt.blocks", section=SHARE, quantity=f"system prompt of {inputs.shared_tokens} tokens", unit="blocks",
        value=math.ceil(inputs.shared_tokens / inputs.block_size), formula="ceil(S / b)",
        numbers=f"ceil({inputs.shared_tokens} / {inputs.block_size})",
    )  # fmt: skip
