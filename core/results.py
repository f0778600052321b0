"""What people read of a run's record: a table on the screen, ``result.json``, columns for a sweep's summary.csv."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

RESULT_FILE = "result.json"
MAX_ROWS = 20
"""Classes and clients shown on the screen; the record has them all."""

LATENCIES = (
    ("first token (TTFT)", ("ttft_s",)),
    ("  until the next step", ("ttft_terms_s", "scheduling")),
    ("  waiting in the queue", ("ttft_terms_s", "queueing")),
    ("  computing the prompt", ("ttft_terms_s", "prefill")),
    ("each further token, by request (TPOT)", ("tpot_s",)),
    ("gap between two tokens (ITL)", ("itl_s",)),
    ("whole answer (E2E)", ("e2e_s",)),
)
"""Rows of the latency table: what it says, and where the record holds it. All are times the client sees."""


def write_result(record: Mapping[str, Any], folder: str | Path) -> Path:
    """Write ``result.json`` into ``folder`` (made if missing) and give its path.

    Strict JSON: numbers that are not finite become null. Atomic: a reader finds the old file or the new one, never a
    part.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(jsonable(record), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, prefix=".result-", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)  # a temporary file is its owner's alone
            temporary.replace(folder / RESULT_FILE)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return folder / RESULT_FILE


def jsonable(value: Any) -> Any:
    """The value in JSON's types: non-finite numbers as None, what JSON has no word for as its text."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [jsonable(item) for item in sorted(value, key=str)]
    return str(value)


def flatten(record: Mapping[str, Any], leave_out: tuple[str, ...] = ("manifest",)) -> dict[str, Any]:
    """The record's figures under dotted keys, as ``ttft_s.p50``, in the record's order: the columns of summary.csv.

    ``leave_out`` names top-level keys that are no figures. A list becomes its JSON text.
    """
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}", item)
        else:
            flat[prefix] = json.dumps(value) if isinstance(value, list) else value

    for key, value in jsonable(record).items():
        if key not in leave_out:
            walk(key, value)
    return flat


# ------------------------------------------------------------------------------------------------ the table


def table(record: Mapping[str, Any]) -> RenderableType:
    """A run's figures for the screen, in words and units that need no manual, within 80 columns."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, text in _facts(record):
        facts.add_row(name, text)
    latencies = Table(
        title="Times as the client sees them", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    latencies.add_column("", no_wrap=True)
    for column in ("mean", "p50", "p90", "p99"):
        latencies.add_column(column, justify="right", no_wrap=True)
    for label, path in LATENCIES:
        spread: Any = record
        for key in path:
            spread = spread[key]
        latencies.add_row(label, *(seconds(spread[column]) for column in ("mean", "p50", "p90", "p99")))
    levels = _service_table(record["service"])
    times = ("", latencies) if record["e2e_s"]["mean"] is not None else ()  # nothing ended: nothing to say
    return Group(facts, *times, *(("", levels) if levels is not None else ()))


def _service_table(service: Mapping[str, Any]) -> Table | None:
    """Attainment and goodput by class and by client; None where requests named neither."""
    rows = [(f"class {name}", each) for name, each in service["classes"].items()]
    rows += [(f"client {name}", each) for name, each in service["clients"].items()]
    if not rows:
        return None
    title = "Service levels (met: TTFT and mean TPOT within their targets)"
    shown = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for column in ("met", "goodput", "tokens", "TTFT p90", "TPOT p90"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, each in rows[:MAX_ROWS]:
        good = each["goodput_per_s"]
        shown.add_row(
            name[:24],
            percent(each["attainment"]),
            "-" if good is None else f"{good:.3g}/s",
            f"{each['output_tokens']:,}",
            seconds(each["ttft_s"]["p90"]),
            seconds(each["tpot_s"]["p90"]),
        )
    return shown


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    requests, concurrency, kv = record["requests"], record["concurrency"], record["kv"]
    preemptions, prefix = record["preemptions"], record["prefix"]
    rate = record["output_tokens_per_s"]
    speed = "" if rate is None else f", {rate:,.1f} tokens/s"
    running = (
        "-" if concurrency["mean"] is None else f"{concurrency['mean']:.1f} on average, {concurrency['peak']} at most"
    )
    preempted = ", ".join(f"{num} {kind}" for kind, num in preemptions.items() if num) or "none"
    lines = [
        ("Status", record["status"] + (f": {record['error']}" if record.get("error") else "")),
        ("Requests", ", ".join(f"{num} {what}" for what, num in requests.items() if num or what == "finished")),
        ("Output", f"{record['output_tokens']:,} tokens in {seconds(record['duration_s'])}{speed}"),
        ("Steps", f"{record['steps']:,}; time in {_shares(record['stage_seconds'])}"),
        ("Running at once", running),
        (
            "KV pool in use",
            f"{percent(kv['used_of_pool']['mean'])} on average, {percent(kv['used_of_pool']['peak'])} at most",
        ),
        ("KV reserved in use", f"{percent(kv['used_of_reserved']['mean'])} of what requests had reserved"),
        ("Preempted", preempted),
        *_service_fact(record["service"]),
    ]
    if prefix["hit_tokens"]:
        share = percent(prefix["hit_tokens"] / prefix["query_tokens"])
        lines.append(("Prompt from cache", f"{prefix['hit_tokens']:,} of {prefix['query_tokens']:,} tokens ({share})"))
    return lines


def _service_fact(service: Mapping[str, Any]) -> list[tuple[str, str]]:
    if service["attainment"] is None:
        return []
    good, tokens = service["goodput_per_s"] or 0.0, service["goodput_tokens_per_s"] or 0.0
    text = f"{percent(service['attainment'])} in time; goodput {good:.3g} answers/s, {tokens:,.1f} tokens/s"
    return [("Service level", text)]


def _shares(stage_seconds: Mapping[str, float]) -> str:
    """The three stages that took most, in percent of all."""
    total = sum(stage_seconds.values())
    if not total:
        return "-"
    most = sorted(stage_seconds.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{stage} {percent(spent / total)}" for stage, spent in most)


def percent(fraction: float | None) -> str:
    """One decimal, or ``-``."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def seconds(time_s: float | None) -> str:
    """Three figures and a unit, or ``-``."""
    if time_s is None:
        return "-"
    if time_s >= 1 or time_s == 0:
        return f"{time_s:.3g} s" if time_s < 1000 else f"{time_s:,.0f} s"
    if time_s >= 1e-3:
        return f"{time_s * 1e3:.3g} ms"
    return f"{time_s * 1e6:.3g} µs"
