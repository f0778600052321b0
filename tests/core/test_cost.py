"""Swap against recompute: the reference figures of the lecture notes, exactly."""

from __future__ import annotations

import pytest

from core.cost import CostModel

LLAMA = {"num_parameters": 6_740_000_000, "attention_width": 32 * 32 * 128, "prefill_flop_per_s": 494.5e12}
MHA, GQA = 2 * 32 * 32 * 128 * 2, 2 * 32 * 8 * 128 * 2


def cost(kv: int, link: float) -> CostModel:
    return CostModel(kv_bytes_per_token=kv, link_bytes_per_s=link, **LLAMA)


def test_the_round_trip_and_the_prefill_of_4k_tokens() -> None:
    assert cost(MHA, 64e9).swap_s(4096) == pytest.approx(67.1e-3, rel=1e-3)
    assert cost(MHA, 64e9).prefill_flop(4096) == pytest.approx((55.2 + 8.8) * 1e12, rel=1e-3)
    assert cost(MHA, 64e9).recompute_s(4096) == pytest.approx(129.4e-3, rel=1e-3)
    assert cost(GQA, 64e9).recompute_s(16384) == pytest.approx(731e-3, rel=1e-2)


def test_the_crossover_length_lies_where_both_cost_the_same() -> None:
    model = cost(MHA, 32e9)
    crossover = model.crossover_tokens()
    assert crossover == pytest.approx(5195, abs=1)
    assert model.swap_s(round(crossover)) == pytest.approx(model.recompute_s(round(crossover)), rel=1e-3)
    assert model.swap_s(4096) > model.recompute_s(4096) and model.swap_s(8192) < model.recompute_s(8192)


def test_there_is_no_crossover_where_swap_always_wins() -> None:
    assert cost(MHA, 64e9).crossover_tokens() == 0
    assert cost(GQA, 9.7e9).crossover_tokens() == 0
    assert cost(GQA, 9.5e9).crossover_tokens() > 0


def test_a_cached_prefix_makes_recompute_cheaper_by_what_it_holds() -> None:
    model = cost(MHA, 64e9)
    assert model.recompute_s(4096, 1024) == pytest.approx(model.recompute_s(4096) - model.recompute_s(1024))


@pytest.mark.parametrize("field", ["link_bytes_per_s", "prefill_flop_per_s", "kv_bytes_per_token", "num_parameters"])
def test_rates_must_be_positive(field: str) -> None:
    good = {"kv_bytes_per_token": MHA, "link_bytes_per_s": 1e9, **LLAMA}
    with pytest.raises(ValueError, match=field):
        CostModel(**{**good, field: 0})
