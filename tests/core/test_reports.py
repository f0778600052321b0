"""Rows of a step's outputs are made when they are read; what is read is what was true when the token was drawn."""

from __future__ import annotations

import pytest

import core.accounting as accounting
import core.commit
from core.types import Output, Outputs, SamplingParams
from tests.toy import Work, make_engine, run


def test_rows_that_nobody_reads_are_never_made_and_those_that_end_are_there() -> None:
    engine = make_engine(checks="cheap")
    for max_tokens in (2, 4):
        engine.submit((1, 2, 3), SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False))
    reports = [engine.step() for _ in iter(engine.has_work, False)]
    assert [len(report.outputs) for report in reports] == [2, 2, 1, 1]
    assert all(type(row) is tuple for row in reports[0].outputs._rows)
    assert [len(report.outputs.ended) for report in reports] == [0, 1, 0, 1]
    # read long after the sequences are gone
    rows = [row for report in reports for row in report.outputs]
    assert all(isinstance(row, Output) and row.num_prompt_tokens == 3 and len(row.token_ids) == 1 for row in rows)
    assert [row.request_id for row in rows].count(0) == 2
    assert [row.finish_reason for row in rows if row.request_id == 1] == [None, None, None, "length"]


def test_text_and_stop_tokens_are_judged_token_by_token() -> None:
    """The short way past them is only for sequences that want neither."""
    texts = make_engine(checks="cheap")
    texts.submit((65, 66, 67), SamplingParams(max_tokens=3, temperature=0.0))
    outputs = [row for _ in iter(texts.has_work, False) for row in texts.step().outputs]
    tokens = [token for row in outputs for token in row.token_ids]
    stopped = make_engine(checks="cheap")
    stopped.submit(
        (65, 66, 67), SamplingParams(max_tokens=3, temperature=0.0, detokenize=False, stop_token_ids=(tokens[1],))
    )
    last = [row for _ in iter(stopped.has_work, False) for row in stopped.step().outputs][-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", tokens[1])


def test_outputs_read_like_a_tuple() -> None:
    assert not Outputs([]) and list(Outputs([])) == []
    row = Output(1, 2, 0, (3,), "")
    assert Outputs([row])[0] == row and Outputs([row])[-1:] == [row]


@pytest.mark.parametrize("num_blocks", [14, 60])
def test_the_short_way_to_a_memory_report_gives_what_the_long_one_gives(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """Rooms are kept as tables change; the long way measures them anew. With and without preemption."""
    compared = []

    def both(state, *args):
        if not state.pool.num_extra_refs and not state.swapped():
            compared.append((accounting._plain_sums(state), accounting._sums(state, [])))
        return accounting.memory_report(state, *args)

    monkeypatch.setattr(core.commit, "memory_report", both)
    result = run(make_engine(num_blocks=num_blocks), [Work(tuple(range(i, i + 5 + i)), 9 + i) for i in range(7)])
    assert len(compared) > 10 and all(short == long for short, long in compared)
    assert (sum(len(report.preempted) for report in result.reports) > 0) == (num_blocks == 14)
