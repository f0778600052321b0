"""Attainment and goodput by the formulas of core/service.py, for everybody, by class and by client."""

from __future__ import annotations

import io
from typing import Any

from core.metrics import Metrics
from core.service import MAX_GROUPS, OTHERS
from core.types import Finished
from tests.toy import Work, make_engine, run


def ended(times: tuple[float, ...], reason: str = "length", **labels: Any) -> Finished:
    return Finished(
        request_id=0, sequence_id=0, branch=0, client_id=labels.pop("client_id", ""), num_prompt_tokens=3, num_cached_tokens=0,
        num_output_tokens=len(times), finish_reason=reason, arrival_s=0.0, first_seen_s=0.0, first_scheduled_s=0.0,
        token_times_s=times, finished_s=10.0, **labels,
    )  # fmt: skip


def test_only_answers_that_came_in_time_and_fast_enough_are_good() -> None:
    metrics = Metrics()
    for record in (
        ended((1.0, 2.0, 3.0), deadline_s=1.0, tpot_s=1.0),  # just met
        ended((1.1, 2.0, 3.0), deadline_s=1.0, tpot_s=1.0),  # first token late
        ended((1.0, 2.0, 3.2), deadline_s=1.0, tpot_s=1.0),  # further ones slow
        ended((1.0, 4.0, 4.1, 4.2), deadline_s=1.0, tpot_s=1.1),  # a stall in one gap, the mean is what counts
        ended((1.0,), deadline_s=1.0, tpot_s=0.1),  # one token: no TPOT
        ended((1.0, 2.0), "error", deadline_s=1.0),
        ended((), "abort", deadline_s=1.0),  # went away: left out
    ):
        metrics.service.add(record, {"length": "finished", "error": "failed", "abort": "aborted"}[record.finish_reason])
    metrics.count_refused(2)
    service = metrics.service.summary(10.0)
    assert service["attainment"] == 3 / 8
    assert service["goodput_per_s"] == 0.3 and service["goodput_tokens_per_s"] == (3 + 4 + 1) / 10


def test_without_targets_nothing_is_judged_and_goodput_is_throughput() -> None:
    metrics = Metrics()
    metrics.service.add(ended((1.0, 2.0)), "finished")
    service = metrics.service.summary(4.0)
    assert service["attainment"] is None and service["goodput_tokens_per_s"] == 0.5
    assert metrics.service.summary(0.0)["goodput_per_s"] is None


def test_figures_come_by_class_and_by_client_and_add_up() -> None:
    engine = make_engine(max_num_seqs=2)
    work = [
        Work((1, 2, i), 6, labels={"client_id": "ab"[i % 2], "deadline_s": 4.0 if i < 4 else 50.0}) for i in range(8)
    ]
    run(engine, work)
    service = engine.metrics.summary()["service"]
    clients = service["clients"]
    assert set(clients) == {"a", "b"} and not service["classes"]
    assert sum(c["finished"] for c in clients.values()) == 8
    assert service["attainment"] * 8 == sum(c["attainment"] * 4 for c in clients.values()) == 6
    assert all(c["ttft_s"]["mean"] and c["tpot_s"]["p90"] for c in clients.values())


def test_invented_client_names_do_not_grow_the_record_without_end() -> None:
    metrics = Metrics()
    for i in range(MAX_GROUPS + 40):
        metrics.service.add(ended((1.0,), client_id=f"c{i}"), "finished")
    clients = metrics.service.summary(1.0)["clients"]
    assert len(clients) == MAX_GROUPS + 1 and clients[OTHERS]["finished"] == 40


def test_the_table_shows_levels_by_client() -> None:
    from rich.console import Console

    from core.results import table

    engine = make_engine()
    run(engine, [Work((1, 2), 3, labels={"client_id": "ann", "deadline_s": 9.0})])
    console = Console(width=100, file=io.StringIO())
    console.print(table({"status": "ok", **engine.metrics.summary()}))
    text = console.file.getvalue()
    assert "client ann" in text and "100.0 % in time" in text
