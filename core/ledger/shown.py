"""How the ledger is shown: a table on a screen, Markdown, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from core.arithmetic import Machine, Shape
from core.ledger.inputs import Inputs, Row, figures

ABOUT = {
    "Bytes": "What a token's keys and values take in memory, and how much memory is left for them.",
    "Sequences at once": "How many requests fit: naive reserves S_max tokens for each, paged gives blocks as they grow.",
    "Waste and tables": "Slots of a last block that stay empty, and the table that maps blocks: small blocks waste less.",
    "Sharing": "Several answers to one prompt, or one system prompt for all: blocks that are held once.",
    "Decode and goodput": "A step reads all weights and all KV: more sequences, more tokens a second, longer steps.",
    "Prefill beside decodes": "A long prompt in the same step makes everyone else wait.",
    "Swap or recompute": "A request is pushed out: is it faster to copy its KV out and back, or to compute it again?",
    "Long context": "A long S_max and short requests: what naive reserves is nearly all unused.",
    "An agent": "Every step sends the whole history again.",
}
SYMBOLS = "N parameters, L layers, n_h heads, n_kv KV heads of d, b bytes or tokens a block, B sequences of S"


def head(shape: Shape, machine: Machine, inputs: Inputs) -> list[str]:
    """What the figures are for, in lines."""
    cards = f", over {shape.cards} cards" if shape.cards > 1 else ""
    return [
        f"{shape.name}: {figures(shape.num_parameters / 1e9)}e9 parameters of {shape.dtype}, {shape.num_layers} layers, "
        f"{shape.num_heads} heads, {shape.num_kv_heads} KV heads of {shape.head_dim}{cards}",
        f"{machine.name}: {machine.memory_gb:g} GB, {figures(machine.bandwidth_bytes_per_s / 1e9)} GB/s, "
        f"{figures(machine.flop_per_s / 1e12)} TFLOP/s (F = {machine.prefill_efficiency:g} of it), "
        f"link {figures(machine.link_bytes_per_s / 1e9)} GB/s",
        f"requests: {inputs.prompt_tokens} prompt + {inputs.output_tokens} output = {inputs.sequence_tokens} tokens; "
        "1 GB = 1e9 bytes, 1 KiB = 1,024",
    ]


def as_json(shape: Shape, machine: Machine, inputs: Inputs, rows: Mapping[str, Row]) -> dict[str, Any]:
    """``rows`` by key, values in bytes, seconds, tokens and fractions; null where there is none (``shown`` says why)."""
    return {
        "model": {**attrs.asdict(shape), "num_parameters": shape.num_parameters},
        "machine": attrs.asdict(machine),
        "inputs": attrs.asdict(inputs),
        "rows": {key: {**attrs.asdict(row, filter=_but_key), "shown": row.shown} for key, row in rows.items()},
    }


def _but_key(attribute: attrs.Attribute, value: object) -> bool:
    return attribute.name not in ("key", "text")


def sections(rows: Mapping[str, Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows.values():
        found.setdefault(row.section, []).append(row)
    return found


def as_markdown(shape: Shape, machine: Machine, inputs: Inputs, rows: Mapping[str, Row]) -> str:
    """One table a section."""
    lines = ["\n\n".join(head(shape, machine, inputs)), ""]
    for name, own in sections(rows).items():
        lines += [
            f"## {name}",
            "",
            ABOUT[name],
            "",
            "| quantity | value | formula | with numbers |",
            "|---|---:|---|---|",
        ]
        lines += [f"| {_cell(r.quantity)} | {_cell(r.shown)} | {_cell(r.formula)} | {_cell(r.numbers)} |" for r in own]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    indent = "&nbsp;&nbsp;" if text.startswith("  ") else ""
    return indent + text.strip().replace("|", "\\|")


def as_table(shape: Shape, machine: Machine, inputs: Inputs, rows: Mapping[str, Row]) -> RenderableType:
    """For a screen of 100 columns: the formula, and under it the same with its numbers."""
    parts: list[RenderableType] = [Text(line) for line in head(shape, machine, inputs)]
    parts.append(Text(SYMBOLS, style="dim"))
    for name, own in sections(rows).items():
        parts += ["", Text(name, style="bold"), Text(ABOUT[name], style="italic")]
        table = Table(box=None, pad_edge=False, show_header=False, expand=False)
        table.add_column(width=38)
        table.add_column(justify="right", width=14)
        table.add_column()
        before = ""
        for row in own:
            formula = row.formula if row.formula != before else ""  # said once for a run of equal ones
            before = row.formula
            detail = Text(f"= {row.numbers}" if row.formula else row.numbers)
            if formula:
                detail = Text.assemble((formula, "cyan"), "\n= ", row.numbers)
            quantity = row.quantity if not row.quantity.startswith("  ") else "  " + row.quantity.strip()
            table.add_row(Text(quantity), Text(row.shown, style="bold"), detail)
        parts.append(table)
    return Group(*parts)
