"""Every composition of shipped options serves: all of them on the toy model, pairwise on the tiny one."""

from __future__ import annotations

from itertools import combinations, product

import pytest

import core
from core.discovery import discover

POLICIES = ("allocator", "scheduler", "preemption")
DEVICE = ("kernel", "linears")
PROMPTS = [list(range(3, 3 + n)) for n in (5, 21, 37, 16)]
PARAMS = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
# four requests of at most 61 tokens need 14 blocks of 16; with 6 they must be preempted where the allocator overcommits
SMALL = ["cache.num_blocks=6", "max_model_len=96", "max_num_batched_tokens=96", "checks=full"]
# options that need to be told more than their name to serve here
NEEDS: dict[str, list[str]] = {}


def names(kind: str) -> list[str]:
    """Shipped options of a group; kernel=triton refuses a CPU, and has tests of its own (tests/plugins/test_kernel_triton.py)."""
    return sorted(o.name for o in discover().options if o.kind == kind and o.dist == "quire" and o.name != "triton")


def pairwise(kinds: tuple[str, ...]) -> list[dict[str, str]]:
    """Choices such that every pair of options of two groups occurs: greedy cover, in a fixed order."""
    options = {kind: names(kind) for kind in kinds}
    missing = {((a, x), (b, y)) for a, b in combinations(kinds, 2) for x in options[a] for y in options[b]}
    rows = []
    while missing:
        best = max(
            (dict(zip(kinds, choice, strict=True)) for choice in product(*options.values())),
            key=lambda row: sum(1 for pair in combinations(row.items(), 2) if pair in missing),
        )
        missing -= set(combinations(best.items(), 2))
        rows.append(best)
    return rows


def words(choice: dict[str, str]) -> list[str]:
    chosen = [f"{kind}={name}" for kind, name in choice.items()]
    return chosen + [more for one in chosen for more in NEEDS.get(one, [])]


def serve(overrides: list[str]) -> list[tuple[int, ...]]:
    with core.build([*SMALL, *overrides]) as quire:
        answers = quire.generate(PROMPTS, PARAMS)
        quire.engine.assert_idle()
    assert [a.finish_reason for a in answers] == ["length"] * len(PROMPTS)
    return [a.token_ids for a in answers]


@pytest.fixture(scope="module")
def toy_tokens() -> list[tuple[int, ...]]:
    return serve(["executor=toy", "cache.num_blocks=256"])


@pytest.fixture(scope="module")
def tiny_tokens() -> list[tuple[int, ...]]:
    return serve(["model=tiny", "cache.num_blocks=256"])


@pytest.mark.parametrize("choice", list(product(*map(names, POLICIES))), ids="-".join)
def test_every_composition_serves_the_same_tokens_on_the_toy_model(choice: tuple[str, ...], toy_tokens: list) -> None:
    assert serve(["executor=toy", *words(dict(zip(POLICIES, choice, strict=True)))]) == toy_tokens


@pytest.mark.parametrize("choice", pairwise(POLICIES + DEVICE), ids=lambda c: "-".join(c.values()))
def test_every_pair_of_options_serves_the_same_tokens_on_a_model(choice: dict[str, str], tiny_tokens: list) -> None:
    """Greedy and float32; the tiny model's largest logits lie far enough apart for equality."""
    assert serve(["model=tiny", "num_threads=1", *words(choice)]) == tiny_tokens


def test_the_small_pool_forces_preemptions() -> None:
    with core.build([*SMALL, "executor=toy"]) as quire:
        quire.generate(PROMPTS, PARAMS)
        assert sum(quire.engine.metrics.summary()["preemptions"].values()) > 0
