"""``workload=azure``: the Azure LLM inference traces, CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

https://github.com/Azure/AzurePublicDataset (2023: conversation and code; 2024: a week of both). Lengths only: the token ids
are made up, a fixed hash of seed and line.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from core.workloads.reading import LeftOut, Row, TraceFile, column, csv_records, date_seconds, whole

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@attrs.define(eq=False, kw_only=True, slots=False)
class AzureTrace(TraceFile):
    """One row, one request. Rows without an output are left out and counted."""

    def _records(self) -> Iterator[tuple[int, dict[str, str]]]:
        return csv_records(self.path, COLUMNS)

    def _row(self, record: dict[str, str], vocab_size: int) -> Row:
        num_output = whole(column(record, "GeneratedTokens"), "GeneratedTokens")
        row = Row(
            num_prompt=self.scaled(whole(column(record, "ContextTokens"), "ContextTokens", low=1)),
            num_output=self.scaled(num_output),
            time_s=date_seconds(column(record, "TIMESTAMP"), "TIMESTAMP"),
        )
        if not num_output:
            raise LeftOut("without output (0 generated tokens)")
        return row
