"""The figures that benchmarks/sharing.py prints, those that take seconds: exact, and the same on every machine."""

from __future__ import annotations

import pytest

from benchmarks.sharing import NAMES, agent, chat, fan_out, used_by_slots


def test_eight_branches_of_a_long_prompt_hold_it_once() -> None:
    """(4,096 + 8 x 256) tokens' blocks where unshared branches hold 8 x (4,096 + 256), or a block more where slots are declared."""
    assert fan_out(NAMES["paged"]) == fan_out(NAMES["prefix"]) == 6_144
    assert 34_816 <= fan_out(NAMES["naive declared"]) <= 34_816 + 8 * 16


def test_an_agent_computes_what_is_new_and_block_tails() -> None:
    """97,000 tokens submitted, 7,700 distinct, 1,501 of them its own outputs."""
    submitted, cached, own = agent(NAMES["prefix"])
    assert (submitted, own) == (97_000, 1_501)
    assert 7_700 - own <= submitted - cached <= 0.85 * 7_700


@pytest.mark.slow
def test_paged_wastes_little_and_slots_what_arithmetic_says() -> None:
    paged, limit = chat(NAMES["paged"], 600), chat(NAMES["naive limit"], 600)
    assert paged.waste_of_used < 0.04
    assert limit.concurrency == pytest.approx(29, rel=0.05)
    assert limit.used_of_pool == pytest.approx(used_by_slots(600), rel=0.05)
    assert paged.concurrency > 9 * limit.concurrency
