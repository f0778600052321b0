"""Packed linear layers, the small operators, and the decoder that calls them: equal to torch's and to transformers' own."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers

from core.executors.measure import _NoAttention
from core.executors.torch import TorchExecutor
from core.fetch import model_dir
from core.model import attention_modules, build_random, connect, find_layers, finish, packed_logits
from core.sources import SmolLM2, Tiny
from plugins.kernels import cpu_build, linears
from plugins.kernels.cpu import CpuAttention, CpuKernel
from plugins.kernels.decoder import CpuOperators, Decoder, PlainAttention, TorchOperators, difference
from plugins.kernels.linears import Chooser, CompactLinear, OneDnnLinear, PackedLinear, TorchLinear, available
from plugins.kernels.linears_fast import FastLinear, FastLinears
from plugins.kernels.linears_torch import TorchLinears
from plugins.kernels.torch import TorchKernel
from tests.driver import Driver, Hooks, Seq

try:
    cpu_build.load()
except cpu_build.Unavailable as error:
    pytest.skip(f"the operators are not available: {error}", allow_module_level=True)

SHAPES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 331,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


@pytest.fixture(autouse=True)
def two_threads_and_the_best_instructions():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.ops.quire_cpu.use_instructions("auto")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# ------------------------------------------------------------------------------------------------ operators


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 17, 25, 64])
@pytest.mark.parametrize(("width", "depth"), [(1, 7), (31, 64), (32, 1), (33, 20), (48, 257), (97, 64), (960, 576)])
def test_packed_products_are_right(instructions, rows, width, depth):
    weight, bias, x = random(width, depth), random(width), random(rows, depth)
    packed = PackedLinear(weight, bias)
    expected = (x.double() @ weight.double().T + bias).float()
    out = packed(x, torch.full((rows, width), math.nan))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)
    packed.add_to(x, out)
    torch.testing.assert_close(out, 2 * expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("form", [PackedLinear, CompactLinear])
def test_a_long_prompt_is_multiplied_in_parts_of_its_rows(instructions, form):
    """More rows than a second-level cache holds (of any size up to 4 MB): parts of them, none of which loses or repeats a row."""
    weight, x = random(50, 1536).bfloat16().float(), random(900, 1536)
    expected = (x.double() @ weight.double().T).float()
    out = form(weight, None)(x, torch.full((900, 50), math.nan))
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=1e-5)
    form(weight, None).add_to(x, out)
    torch.testing.assert_close(out, 2 * expected, atol=4e-4, rtol=1e-5)


def test_packed_products_take_rows_that_lie_apart_and_weights_that_are_views(instructions):
    weight, x = random(40, 64)[:, ::2][:, :32].contiguous(), random(5, 100)[:, 10:42]
    out = PackedLinear(random(80, 32)[::2], None)(x, torch.empty(5, 40))
    torch.testing.assert_close(out, F.linear(x, random(80, 32)[::2]), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(PackedLinear(weight, None)(x, out), F.linear(x, weight), atol=1e-4, rtol=1e-5)


def test_a_row_gets_the_same_bits_whatever_rows_it_comes_with(instructions):
    packed, x = PackedLinear(random(100, 576), None), random(40, 576)
    together = packed(x, torch.empty(40, 100))
    for rows in (1, 2, 7, 13):
        assert torch.equal(packed(x[3 : 3 + rows], torch.empty(rows, 100)), together[3 : 3 + rows])


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_small_operators_equal_torchs(instructions, rows):
    ours, plain = CpuOperators(), TorchOperators()
    for width in (64, 576, 50):
        x, weight = random(rows, width), random(width)
        normed = [each.norm(x, weight, 1e-5, torch.empty(rows, width)) for each in (ours, plain)]
        torch.testing.assert_close(*normed, atol=1e-6, rtol=1e-5)
        wide = random(rows, 2 * width) * 20
        active = [each.silu_mul(wide, torch.empty(rows, width)) for each in (ours, plain)]
        torch.testing.assert_close(*active, atol=1e-5, rtol=1e-5)
    for dim in (16, 64, 72):
        cos, sin, turned = random(rows, dim), random(rows, dim) + 1, [random(rows, 5 * dim) for _ in range(2)]
        for each, x in zip((ours, plain), turned, strict=True):
            each.rotate(x, cos, sin, 4)
        torch.testing.assert_close(*turned, atol=1e-6, rtol=1e-5)
        assert torch.equal(turned[0][:, 4 * dim :], random(rows, 5 * dim)[:, 4 * dim :])


def test_silu_of_extreme_values_is_finite():
    x = torch.tensor([[-1e30, -100.0, -88.0, 0.0, 88.0, 1e30, 1, 1, 1, 1, 1, 1]])
    out = CpuOperators().silu_mul(x, torch.empty(1, 6))
    torch.testing.assert_close(out, F.silu(x[:, :6]), atol=1e-30, rtol=2e-6)


@pytest.mark.parametrize("bad", ["double", "narrow"])
def test_operators_refuse_what_does_not_fit(bad):
    x = random(2, 64).double() if bad == "double" else random(2, 63)
    with pytest.raises(RuntimeError):
        PackedLinear(random(8, 64), None)(x, torch.empty(2, 8))


# ------------------------------------------------------------------------------------------------ choosing


def test_onednn_equals_torch():
    weight, bias, x = random(40, 64), random(40), random(5, 64)
    expected, out = F.linear(x, weight, bias), torch.empty(5, 40)
    for form in (OneDnnLinear, TorchLinear):
        torch.testing.assert_close(form(weight, bias)(x, out), expected, atol=1e-4, rtol=1e-5)
        total = x.new_ones(5, 40)
        form(weight, bias).add_to(x, total)
        torch.testing.assert_close(total, expected + 1, atol=1e-4, rtol=1e-5)


def test_each_shape_is_measured_once_and_a_wrong_form_is_not_taken(monkeypatch):
    class Wrong(TorchLinear):
        made = 0

        def __init__(self, weight, bias):
            super().__init__(weight, bias)
            Wrong.made += 1

        def __call__(self, x, out):
            return out.zero_()

    monkeypatch.setitem(linears.FORMS, "packed", Wrong)
    chooser = Chooser(["packed", "torch"])
    for _ in range(3):
        assert type(chooser.make(random(8, 16), None, "q")) is TorchLinear
    assert Wrong.made == 1 and chooser.line.startswith("q torch (packed inf / torch ")


def test_a_form_that_cannot_be_had_is_named(monkeypatch):
    def unavailable():
        raise cpu_build.Unavailable("no C++ compiler on PATH")

    monkeypatch.setattr(cpu_build, "load", unavailable)
    assert available(["packed", "torch"]) == (["torch"], ["packed is not available: no C++ compiler on PATH"])
    model = Tiny().load("cpu", "auto").model
    decoder, line = FastLinears().prepare_model(model)
    assert isinstance(decoder.operators, TorchOperators) and line.endswith("no C++ compiler on PATH")
    assert FastLinears(forms=["packed"]).prepare_model(Tiny().load("cpu", "auto").model) is None


# ------------------------------------------------------------------------------------------------ the decoder

CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPES, attention_bias=True, mlp_bias=True),
    "llama3 rope, tied": transformers.LlamaConfig(
        **SHAPES,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": transformers.MistralConfig(**SHAPES, sliding_window=None, head_dim=8),
    "qwen2": transformers.Qwen2Config(**SHAPES),
}


def model_of(config):
    model = build_random(config, "cpu", "float32", seed=1)
    find_layers(model)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("operators", [CpuOperators, TorchOperators])
def test_the_decoder_has_the_models_logits(name, operators):
    model = model_of(CONFIGS[name])
    decoder = Decoder(model, operators())
    assert difference(model, decoder, 331) <= 1e-5
    original = model_of(CONFIGS[name])
    with torch.no_grad():
        decoder.pack(Chooser(["packed", "onednn"]))
    assert difference(original, decoder, 331) <= 1e-5
    assert len(attention_modules(decoder)) == 2


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_layer_as_one_operator_has_the_models_logits(instructions, name, threads):
    """With 3 threads the work comes in unequal runs, and there may be more threads than cores."""
    torch.set_num_threads(threads)
    model, original = model_of(CONFIGS[name]), model_of(CONFIGS[name])
    decoder = Decoder(model, CpuOperators())
    assert not decoder.fused
    with torch.no_grad():
        decoder.pack(Chooser(["packed"]))
    assert decoder.fused and difference(original, decoder, 331) <= 1e-5


def test_one_operator_gives_the_bits_of_its_parts():
    model = model_of(CONFIGS["llama"])
    decoder = Decoder(model, CpuOperators())
    with torch.no_grad():
        decoder.pack(Chooser(["packed"]))
    found = []
    for fused in (True, False):
        decoder.fused = fused
        connect(decoder, PlainAttention())
        ids = torch.arange(40) * 7 % 331
        with torch.inference_mode():
            found.append(packed_logits(decoder, ids, torch.arange(40), torch.arange(40)).clone())
    assert torch.equal(*found)


def test_the_sum_that_measures_reading_is_the_sum(instructions):
    for count in (1, 63, 64, 65, 100_003):
        x = random(count)
        assert torch.ops.quire_cpu.read_all(x) == pytest.approx(float(x.double().sum()), abs=1e-2)


@pytest.mark.parametrize("width", [1, 63, 64, 200, 6144, 13_000])
def test_the_sum_over_rows_in_an_order_is_the_sum_of_those_rows(instructions, width):
    x, order = random(40, width), torch.randperm(40, generator=torch.Generator().manual_seed(width))[:33].int()
    assert torch.ops.quire_cpu.read_rows(x, order) == pytest.approx(float(x[order.long()].double().sum()), abs=1e-1)
    for bad in (-1, 40):
        with pytest.raises(RuntimeError, match="no row"):
            torch.ops.quire_cpu.read_rows(x, torch.tensor([0, bad], dtype=torch.int32))


def test_no_weight_is_held_twice():
    model = model_of(CONFIGS["llama"])
    model, line = FastLinears(forms=["packed"]).prepare_model(model)
    block = model.attentions[0]
    assert block.q_proj.weight is None and block.o_proj.weight is None
    assert line.startswith("linears: q+k+v packed (packed ") and "merged" in line


def test_a_decoder_whose_logits_differ_is_not_used():
    class Skewed(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

        def forward(self, x):
            return 1.01 * x

    Skewed.__name__ = "LlamaRMSNorm"
    model = model_of(CONFIGS["llama"])
    model.model.norm = Skewed(model.model.norm)
    changed, line = FastLinears().prepare_model(model)
    assert changed is model and "its logits differ by" in line
    assert isinstance(model.model.layers[0].self_attn.q_proj, FastLinear)


def test_an_unknown_architecture_keeps_its_forward_and_gets_fast_linears():
    config = transformers.Qwen3Config(**SHAPES, head_dim=8)
    model, original = model_of(config), model_of(config)
    changed, line = FastLinears().prepare_model(model)
    assert changed is model and "Qwen3ForCausalLM is not one of" in line
    assert difference(original, model, 331) <= 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_types_are_left_alone(dtype):
    assert FastLinears().prepare_model(build_random(CONFIGS["llama"], "cpu", dtype, seed=0)) is None


def test_a_wrong_form_is_refused():
    with pytest.raises(ValueError, match="forms"):
        FastLinears(forms=["fp8"])


# ------------------------------------------------------------------------------------------------ through the executor


class With(Hooks):
    def __init__(self, plugin, *kernels):
        super().__init__(*kernels)
        self.plugin = plugin

    def prepare_model(self, model):
        return self.plugin.prepare_model(model)


def driver(model, plugin, kernel, monkeypatch, checks="full") -> Driver:
    monkeypatch.setattr("tests.driver.Hooks", lambda *kernels: With(plugin, *kernels))
    return Driver(TorchExecutor(model=model, device="cpu", num_threads=2, checks=checks), kernel, num_blocks=256)


def logits_of(one: Driver, prompts: list[list[int]], chunk: int) -> dict[int, list[torch.Tensor]]:
    """The logits of every sampled row of six greedy steps, by prompt; with chunks of several prompts in one batch."""
    seqs = [Seq(list(prompt), num_prompt=len(prompt)) for prompt in prompts]
    found: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(prompts))}
    while work := {i: min(chunk, len(s.tokens) - s.computed) for i, s in enumerate(seqs) if len(s.output) < 6}:
        batch, _ = one.pack(work, seqs)
        rows = iter(one.executor._run(batch).clone())
        for i, count in work.items():
            seqs[i].computed += count
            if seqs[i].computed == len(seqs[i].tokens):
                found[i].append(next(rows))
                seqs[i].tokens.append(int(found[i][-1].argmax()))
    return found


PROMPTS = [[1, 2, 3], list(range(40)), [7] * 17, [9]]


def test_logits_equal_the_torch_kernel_with_torch_linears(monkeypatch):
    expected = logits_of(driver(Tiny(), TorchLinears(), TorchKernel(), monkeypatch), PROMPTS, 9)
    found = logits_of(driver(Tiny(), FastLinears(), CpuKernel(), monkeypatch), PROMPTS, 9)
    for i in expected:
        torch.testing.assert_close(torch.stack(found[i]), torch.stack(expected[i]), atol=1e-4, rtol=1e-4)


def made(config) -> SimpleNamespace:
    """A source of a random model of this config."""
    tokenizer = Tiny().load("cpu", "auto").tokenizer
    return SimpleNamespace(
        name="made", load=lambda *_: finish("made", build_random(config, "cpu", "float32", 1), tokenizer)
    )


LONG = {**SHAPES, "max_position_embeddings": 1024}
FULL = transformers.LlamaConfig(**LONG)  # its layers share a work list
WINDOWED = transformers.MistralConfig(**LONG, sliding_window=100, head_dim=8)
MIXED_WINDOWS = transformers.Qwen2Config(  # 600 keys are three parts in one layer, two in the other
    **LONG,
    use_sliding_window=True,
    sliding_window=290,
    layer_types=["full_attention", "sliding_attention"],
)


@pytest.mark.parametrize("config", [*CONFIGS.values(), FULL, WINDOWED, MIXED_WINDOWS])
def test_all_layers_in_one_operator_give_the_bits_of_one_after_the_other(monkeypatch, config):
    """Prompts, chunks and decodes, sequences in several parts, layers with windows of their own; checks=full calls each layer."""
    calls = []
    arguments = CpuAttention.layer_arguments
    monkeypatch.setattr(CpuAttention, "layer_arguments", lambda self: calls.append(1) or arguments(self))
    prompts = [*PROMPTS, [5, 6] * (300 if config.max_position_embeddings > 600 else 100)]
    found = []
    for checks in ("full", "cheap"):
        fast = driver(made(config), FastLinears(forms=["packed"]), CpuKernel(), monkeypatch, checks)
        found.append([logits_of(fast, prompts, chunk) for chunk in (10**9, 150, 9)])
        assert bool(calls) == (checks == "cheap")
    for full, cheap in zip(*found, strict=True):
        assert all(torch.equal(a, b) for i in full for a, b in zip(full[i], cheap[i], strict=True))


def test_a_step_measured_without_attention_touches_no_cache(monkeypatch):
    fast = driver(Tiny(), FastLinears(forms=["packed"]), CpuKernel(), monkeypatch, "cheap")
    executor = fast.executor
    executor._cache.poison()
    model = executor._need_model().model
    connect(model, _NoAttention(executor._router))
    model._room("attended", 3, model.num_heads * model.head_dim).fill_(
        math.nan
    )  # what an earlier step left is not used
    seq = Seq([1, 2, 3], num_prompt=3)
    batch, _ = fast.pack({0: 3}, [seq])
    assert executor._run(batch).isfinite().all() and executor._cache.pool.isnan().all()


def test_a_request_gets_the_same_bits_alone_and_in_company(monkeypatch):
    """Packed products, small operators and the CPU kernel sum each row in an order of its own: decode steps are exact."""
    together = logits_of(driver(Tiny(), FastLinears(forms=["packed"]), CpuKernel(), monkeypatch), PROMPTS, 10**9)
    for i, prompt in enumerate(PROMPTS):
        alone = logits_of(driver(Tiny(), FastLinears(forms=["packed"]), CpuKernel(), monkeypatch), [prompt], 10**9)[0]
        assert all(torch.equal(a, b) for a, b in zip(alone, together[i], strict=True))


@pytest.mark.skipif(not model_dir().is_dir(), reason="SmolLM2 is not in the cache: run python -m core.fetch")
def test_smollm2_logits_and_tokens_by_the_rule(monkeypatch):
    """Logits to 1e-4 of the largest; tokens equal up to where the best two are closer than that."""
    prompts = [[504, 3575, 282, 4649, 314], [6403, 4161, 253, 655], [1604, 1303]]
    expected = logits_of(driver(SmolLM2(), TorchLinears(), TorchKernel(), monkeypatch), prompts, 10**9)
    found = logits_of(driver(SmolLM2(), FastLinears(), CpuKernel(), monkeypatch), prompts, 10**9)
    for i in expected:
        for ours, theirs in zip(found[i], expected[i], strict=True):
            assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
            if ours.argmax() != theirs.argmax():
                best = theirs.topk(2).values
                assert best[0] - best[1] < 1e-4 * best[0].abs()
                break


def test_the_executor_says_what_was_chosen(monkeypatch):
    one = driver(Tiny(), FastLinears(), CpuKernel(), monkeypatch)
    assert any("q+k+v" in line for line in one.lines) and "q+k+v" in one.executor.describe()["linears"]
