"""Beam search equals transformers' own on tiny models: token ids and order, over pools in which beams share, copy and are preempted."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import core
from core.sources import Tiny

PROMPTS = [list(range(3, 20)), [7, 200, 41, 9], [99] * 11]
NUM_TOKENS = 16
CASES = [
    (2, 1, 1.0),
    (4, 4, 1.0),
    (4, 2, 0.0),
    (5, 5, 2.0),
    (3, 3, -1.0),
    (1, 1, 1.0),
]  # beams, answers, length_penalty
SIZES = {
    "default": {},
    "eos-often": {"vocab_size": 258, "num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "seed": 21},
}
SMALL = [
    "cache.num_blocks=12",
    "cache.block_size=4",
    "max_model_len=36",
    "max_num_batched_tokens=48",
    "max_num_seqs=8",
    "checks=full",
]


@pytest.fixture(scope="module", params=SIZES)
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SIZES[request.param]


@pytest.fixture(scope="module")
def expected(model: dict[str, Any]) -> dict[tuple[Any, ...], list[list[int]]]:
    """What transformers gives, less the padding behind eos, for every case and prompt."""
    ours = Tiny(**model).load("cpu", "float32").model  # its attention is connected to our kernels: a copy has its own
    theirs = AutoModelForCausalLM.from_config(
        copy.deepcopy(ours.config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    found = {}
    for width, n, penalty in CASES:
        for i, prompt in enumerate(PROMPTS):
            ids = theirs.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=width, num_return_sequences=n,
                max_new_tokens=NUM_TOKENS, length_penalty=penalty, early_stopping=False, do_sample=False, pad_token_id=257,
            )  # fmt: skip
            rows = [row[len(prompt) :].tolist() for row in ids]
            found[width, n, penalty, i] = [r[: r.index(257) + 1] if 257 in r else r for r in rows]
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def serve(model: dict[str, Any], overrides: list[str]) -> tuple[dict[tuple[Any, ...], list[list[int]]], dict[str, Any]]:
    """All cases at once."""
    words = [f"model.{name}={value}" for name, value in model.items()]
    asked = [(case, i) for case in CASES for i in range(len(PROMPTS))]
    params = [
        {"beam_width": width, "n": n, "max_tokens": NUM_TOKENS, "length_penalty": penalty, "temperature": 0}
        for (width, n, penalty), _ in asked
    ]
    with core.build(["model=tiny", "num_threads=1", *words, *overrides]) as quire:
        answers = iter(quire.generate([PROMPTS[i] for _, i in asked], params))
        quire.engine.assert_idle()
        summary = quire.engine.metrics.summary()
    return {(*case, i): [list(next(answers).token_ids) for _ in range(case[1])] for case, i in asked}, summary


def test_the_cases_end_in_both_ways(model: dict[str, Any], expected: dict[tuple[Any, ...], list[list[int]]]) -> None:
    """At max_tokens, and where the vocabulary is small by eos before it, too."""
    lengths = {len(row) for rows in expected.values() for row in rows}
    assert NUM_TOKENS in lengths
    assert not model or len(lengths) > 5


def test_in_a_large_pool(model: dict[str, Any], expected: dict[tuple[Any, ...], list[list[int]]]) -> None:
    found, summary = serve(
        model, ["cache.num_blocks=2048", "cache.block_size=4", "max_model_len=64", "max_num_seqs=128"]
    )
    assert found == expected
    assert summary["forks"]["branches"] > 0 and summary["forks"]["copied_bytes"] > 0


@pytest.mark.parametrize(
    ("allocator", "preemption"), [("paged", "recompute"), ("paged", "swap"), ("prefix", "swap"), ("naive", "breakeven")]
)
def test_in_a_small_pool(
    allocator: str, preemption: str, model: dict[str, Any], expected: dict[tuple[Any, ...], list[list[int]]]
) -> None:
    """One beam fits alone and a few more do; with naive a fork copies the parent's blocks."""
    words = [f"allocator={allocator}", f"preemption={preemption}"]
    if allocator == "naive":
        words.append("cache.num_blocks=27")
    found, summary = serve(model, [*SMALL, *words])
    assert found == expected
    assert summary["forks"]["branches"] > 0 and summary["forks"]["copied_bytes"] > 0
    kinds = summary["preemptions"]
    assert kinds["swap" if preemption == "swap" else "recompute"] > 0, kinds
