"""``workload=burstgpt``: the BurstGPT traces, CSV with Timestamp (seconds), Request tokens, Response tokens and more.

https://github.com/HPMLL/BurstGPT. A request with 0 response tokens failed there: it is left out and counted. The token ids are
made up, a fixed hash of seed and line. A session of the trace (v1.2) is kept as ``session_id``.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from core.workloads.reading import LeftOut, Row, TraceFile, column, csv_records, seconds, whole

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


@attrs.define(eq=False, kw_only=True, slots=False)
class BurstGptTrace(TraceFile):
    """One row, one request."""

    def _records(self) -> Iterator[tuple[int, dict[str, str]]]:
        return csv_records(self.path, COLUMNS)

    def _row(self, record: dict[str, str], vocab_size: int) -> Row:
        num_output = whole(column(record, "Response tokens"), "Response tokens")
        if not num_output:
            raise LeftOut("failed (0 response tokens)")
        return Row(
            num_prompt=self.scaled(whole(column(record, "Request tokens"), "Request tokens", low=1)),
            num_output=self.scaled(num_output),
            time_s=seconds(column(record, "Timestamp"), "Timestamp"),
            session_id=record.get("Session ID", "").strip(),
            label=record.get("Model", "").strip(),
        )
