"""Weights in fewer bits than float32: kept so only if every one comes out as the float that went in, and products to the bit
those of the floats.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from core.fetch import model_dir
from core.model import build_random, connect, find_layers, packed_logits
from core.sources import SmolLM2
from plugins.kernels import cpu_build
from plugins.kernels.decoder import PlainAttention
from plugins.kernels.linears import Chooser, CompactLinear, Inexact, PackedLinear
from plugins.kernels.linears_fast import FastLinears

try:
    cpu_build.load()
except cpu_build.Unavailable as error:
    pytest.skip(f"the operators are not available: {error}", allow_module_level=True)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantised(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """The values that a GGUF file of this kind gives back for a weight, by the gguf library."""
    which = GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), which), which).astype(np.float32))


def come_out(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Every weight of the compact form, by a product with the unit matrix, and its bits."""
    made, (n, k) = CompactLinear(weight, None), weight.shape
    return made(torch.eye(k), torch.empty(k, n)).T.contiguous(), made.bits


KINDS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "BF16": 16}


@pytest.mark.parametrize("shape", [(1, 32), (47, 64), (96, 288), (200, 576)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_quantised_file_stores_comes_out_to_the_bit(instructions, kind, shape):
    weight = quantised(kind, random(*shape) * 0.05)
    found, bits = come_out(weight)
    assert bits == KINDS[kind] and torch.equal(found, weight)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 17, 130, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_floats_to_the_bit(instructions, kind, rows):
    weight, bias, x = quantised(kind, random(100, 352)), random(100), random(rows, 352)
    compact, packed = CompactLinear(weight, bias), PackedLinear(weight, bias)
    outs = [form(x, torch.full((rows, 100), torch.nan)).clone() for form in (compact, packed)]
    assert torch.equal(*outs)
    for form, out in zip((compact, packed), outs, strict=True):
        form.add_to(x, out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("depth", [1, 3, 4, 7])
def test_a_form_that_would_be_no_smaller_is_not_taken(instructions, depth):
    for weight in (random(50, depth), random(50, depth).bfloat16().float()):
        with pytest.raises(Inexact):
            CompactLinear(weight, None)


@pytest.mark.parametrize("depth", [8, 9, 33, 65, 255])
def test_bfloat16_of_any_depth(instructions, depth):
    weight, x = random(50, depth).bfloat16().float(), random(3, depth)
    compact = CompactLinear(weight, None)
    assert compact.bits == 16
    for rows in (1, 3):
        out = compact(x[:rows], torch.empty(rows, 50))
        assert torch.equal(out, PackedLinear(weight, None)(x[:rows], torch.empty(rows, 50)))


@pytest.mark.parametrize("where", [(0, 0), (31, 63), (95, 95)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_weight_off_by_the_least_is_not_lost(instructions, kind, where):
    weight = quantised(kind, random(96, 96))
    weight[where] = torch.nextafter(weight[where], torch.tensor(9.0))
    with pytest.raises(Inexact, match="32 bits"):
        CompactLinear(weight, None)


@pytest.mark.parametrize(("value", "fits"), [(np.nan, False), (np.inf, True), (2.0**100, True), (1e-30, False)])
def test_a_weight_beyond_float16_is_held_by_bfloat16_or_by_nothing_smaller(instructions, value, fits):
    weight = quantised("BF16", random(40, 64))
    weight[3, 5] = value
    if fits:
        compact = CompactLinear(weight, None)
        x = torch.zeros(1, 64)
        x[0, 5] = 1
        assert compact.bits == 16 and compact(x, torch.empty(1, 40))[0, 3] == value
    else:
        with pytest.raises(Inexact):
            CompactLinear(weight, None)


@pytest.mark.parametrize("scale", [1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_subnormal_scales_and_blocks_of_one_value(instructions, kind, scale):
    """Float16 scales below 2^-14 are subnormal: they count, also where float32 subnormals are flushed to zero."""
    weight, x = quantised(kind, random(48, 64) * scale), random(1, 64)
    weight[5] = weight[5, 0].half().float()
    found, bits = come_out(weight)
    assert torch.equal(found, weight) and bits in (4, 8)
    compact, packed = CompactLinear(weight, None), PackedLinear(weight, None)
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(compact(x, torch.empty(1, 48)), packed(x, torch.empty(1, 48)))
    finally:
        torch.set_flush_denormal(False)


@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 7, 15, 127, 200]), st.floats(1e-4, 100.0), st.floats(-50.0, 50.0))
def test_any_grid_is_exact_or_refused(seed, levels, unit, offset):
    """Blocks on grids of any number of levels and any offset, whether or not one form holds them: nothing changes."""
    rng = np.random.default_rng(seed)
    unit, offset = float(np.float16(unit)), float(np.float16(offset))
    places = rng.integers(0, levels + 1, (20, 64)).astype(np.float32)
    weight = torch.from_numpy(np.float32(unit) * places + np.float32(offset))
    try:
        found, bits = come_out(weight)
    except Inexact:
        return
    assert torch.equal(found, weight) and bits in (4, 8, 16)


def test_a_file_of_a_few_kinds_gets_the_fewest_bits_for_each_weight():
    weights = [quantised(kind, random(64, 64)) for kind in KINDS]
    assert [CompactLinear(weight, None).bits for weight in weights] == list(KINDS.values())
    assert [
        CompactLinear(w, None).panels.nbytes / PackedLinear(w, None).panels.nbytes for w in weights
    ] == pytest.approx([5 / 32, 5 / 32, 8.5 / 32, 0.5])


def test_weights_of_one_shape_are_compact_or_not_each_by_its_values():
    """A file may mix kinds: the choice is made for the weights of a shape that have a compact form, and for the others."""
    chooser = Chooser(["compact", "packed"])
    few, many = quantised("Q4_1", random(64, 64)), random(64, 64)
    chooser.chosen = {(64, 64, True): "compact", (64, 64, False): "packed"}
    made = [type(chooser.make(weight, None, "o")) for weight in (many, few, many)]
    assert made == [PackedLinear, CompactLinear, PackedLinear]
    x = random(3, 64)
    assert torch.equal(
        chooser.make(many, None, "o")(x, torch.empty(3, 64)), PackedLinear(many, None)(x, torch.empty(3, 64))
    )


def test_only_the_compact_form_asked_for_and_none_fits_is_torchs_own():
    chooser = Chooser(["compact"])
    weight, x = random(64, 64), random(2, 64)
    assert torch.equal(chooser.make(weight, None, "o")(x, torch.empty(2, 64)), x @ weight.T)
    assert chooser.line.startswith("o torch (torch ")


def test_a_form_that_was_interrupted_is_timed_until_it_was_not(monkeypatch):
    """Another process takes the core for the first six products: the fastest form is found all the same."""
    clock, calls = [0.0], []

    def slow(seconds):
        def run():
            calls.append(seconds)
            clock[0] += seconds if len(calls) > 6 else 5.0 - 0.7 * len(calls)

        return run

    monkeypatch.setattr("plugins.kernels.linears.time.perf_counter", lambda: clock[0])
    assert Chooser(["packed"])._time({"a": slow(1e-3), "b": slow(2e-3)}) == pytest.approx({"a": 1e-3, "b": 2e-3})


def logits_of(model, forms) -> tuple[torch.Tensor, str]:
    made = FastLinears(forms=forms).prepare_model(model)
    assert made is not None
    connect(made[0], PlainAttention())
    with torch.inference_mode():
        return packed_logits(made[0], torch.arange(40) * 7 % 331, torch.arange(40), torch.arange(40)).clone(), made[1]


def test_a_published_bfloat16_checkpoint_computes_the_same_from_half_the_bytes():
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=331, max_position_embeddings=256, initializer_range=0.15,
    )  # fmt: skip
    found = []
    for forms in (["compact"], ["packed"]):
        model = build_random(config, "cpu", "bfloat16", seed=0).float()
        find_layers(model)
        logits, line = logits_of(model, forms)
        found.append(logits)
        assert ("compact of 16 bits" in line) == (forms == ["compact"])
    assert torch.equal(*found)


@pytest.mark.skipif(not model_dir().is_dir(), reason="SmolLM2 is not in the cache: run python -m core.fetch")
def test_the_default_model_is_kept_in_the_bits_of_its_file_and_computes_the_same():
    found = []
    for forms in (["compact"], ["packed"]):
        logits, line = logits_of(SmolLM2().load("cpu", "auto").model, forms)
        found.append(logits)
        if forms == ["compact"]:
            assert line.count("compact of 4 bits") == 4 and "head compact of 8 bits" in line
    assert torch.equal(*found)
