"""Loading and attention injection, on tiny random models of several architectures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.executors.torch import TorchExecutor
from core.fetch import model_dir
from core.model import ModelRefused, build_random, check_config, finish
from core.sources import Path, SmolLM2, Tiny
from core.text import ByteTokenizer
from core.types import ConfigError
from plugins.kernels.torch import TorchKernel
from tests.driver import Driver, Seq

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128}
SERVED = {
    "llama": (transformers.LlamaConfig, {}),
    "llama tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 24}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral window": (transformers.MistralConfig, {"sliding_window": 5}),
    "gpt_neox": (transformers.GPTNeoXConfig, {}),
    "phi": (transformers.PhiConfig, {}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 6}),
    "gpt2": (transformers.GPT2Config, GPT2_SIZES),
    "opt": (transformers.OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4}),
}
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 16, [11]]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class FromConfig:
    """A source for any config."""

    name = "test"

    def __init__(self, config, seed=0):
        self.config, self.seed = config, seed

    def load(self, device, dtype):
        check_config(self.config, {})
        model = build_random(self.config, device, dtype, self.seed)
        return finish(self.name, model, ByteTokenizer(self.config.vocab_size))


def config_of(kind: str):
    cls, changes = SERVED[kind]
    return cls(**(SIZES | changes))


def executor_of(config, seed=0, **changes):
    return TorchExecutor(model=FromConfig(config, seed), device="cpu", num_threads=1, checks="full", **changes)


def plain_generate(config, prompt, max_tokens, seed=0):
    """The same weights in transformers' own eager attention and its own cache."""
    model = build_random(config, "cpu", "float32", seed)
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("chunk", [10**9, 5])
@pytest.mark.parametrize("kind", SERVED)
def test_greedy_tokens_are_those_of_generate(kind, chunk):
    config = config_of(kind)
    driver = Driver(executor_of(config), TorchKernel(), block_size=4, num_blocks=64)
    found = driver.generate(PROMPTS, 9, chunk=chunk)
    assert found == [plain_generate(config, prompt, 9) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", SERVED)
def test_logits_are_those_of_eager(kind):
    """All prompts packed, logits for one row each, against each prompt alone in transformers' own attention."""
    config = config_of(kind)
    plain = build_random(config, "cpu", "float32", 0)
    executor = executor_of(config)
    driver = Driver(executor, TorchKernel(), block_size=4)
    seqs = [Seq(list(prompt), num_prompt=len(prompt)) for prompt in PROMPTS]
    batch, _ = driver.pack({i: len(seq.tokens) for i, seq in enumerate(seqs)}, seqs)
    with torch.inference_mode():
        logits = executor._forward(batch)
        assert logits.shape == (len(PROMPTS), config.vocab_size)
        for row, prompt in zip(logits, PROMPTS, strict=True):
            torch.testing.assert_close(row, plain(torch.tensor([prompt])).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_only_asked_rows_get_logits():
    executor = executor_of(config_of("llama"))
    driver = Driver(executor, TorchKernel())
    seqs = [Seq(list(range(3, 23))), Seq([4])]
    batch, sampling = driver.pack({0: 7, 1: 1}, seqs)  # the first is not complete
    seen = []
    head = executor._loaded.model.lm_head
    handle = head.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    output = executor.execute(batch, (), sampling)
    handle.remove()
    assert seen == [(1, 1, 64)] and len(output.token_ids) == 1
    batch, sampling = driver.pack({0: 7}, seqs[:1])
    assert list(executor.execute(batch, (), sampling).token_ids) == []


def test_two_models_in_one_process_do_not_see_each_other():
    """Two engines of the same architecture, steps interleaved, and a third model that transformers runs by itself."""
    config = config_of("llama")
    alone = [plain_generate(config, prompt, 6, seed) for seed, prompt in ((0, PROMPTS[0]), (1, PROMPTS[1]))]
    first = Driver(executor_of(config_of("llama"), 0), TorchKernel(), block_size=4)
    second = Driver(executor_of(config_of("llama"), 1), TorchKernel(), block_size=3, num_blocks=99)
    seqs = [[Seq(list(PROMPTS[0]), num_prompt=3)], [Seq(list(PROMPTS[1]), num_prompt=37)]]
    for _ in range(6):
        for driver, own in zip((first, second), seqs, strict=True):
            driver.step({0: len(own[0].tokens) - own[0].computed}, own)
        assert plain_generate(config, [5], 2) == plain_generate(config, [5], 2)
    assert [own[0].output for own in seqs] == alone
    first.executor.close()
    assert second.generate([PROMPTS[1]], 6) == alone[1:]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types(dtype):
    driver = Driver(executor_of(config_of("llama"), dtype=dtype), TorchKernel())
    assert driver.info.dtype == dtype
    assert driver.info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert all(len(tokens) == 3 for tokens in driver.generate(PROMPTS, 3))


def test_narrower_kv():
    driver = Driver(executor_of(config_of("llama")), TorchKernel(), kv_dtype="bfloat16")
    assert driver.executor.describe()["kv_dtype"] == "bfloat16"
    assert any("KV bfloat16" in line for line in driver.lines)
    assert driver.generate(PROMPTS, 3) == driver.generate(PROMPTS, 3, chunk=5)


def test_info_counts_tied_weights_once():
    tied = FromConfig(config_of("llama tied")).load("cpu", "auto").info
    untied = FromConfig(config_of("llama")).load("cpu", "auto").info
    assert untied.num_parameters - tied.num_parameters == 320 * 64
    assert (tied.num_layers, tied.num_heads, tied.num_kv_heads, tied.head_dim) == (2, 4, 2, 16)
    assert tied.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert tied.max_position == 128 and tied.eos_token_ids == {257}


# ------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "mamba": (transformers.MambaConfig, {}, "linear_attention"),
    "recurrent_gemma": (transformers.RecurrentGemmaConfig, {}, "linear_attention"),
    "rwkv": (transformers.RwkvConfig, {}, "rwkv|position_ids|attention"),
    "falcon": (transformers.FalconConfig, {}, "0 of the 2 layers"),
    "bloom": (transformers.BloomConfig, {"n_layer": 2, "n_head": 4}, "position_ids"),
    "t5": (transformers.T5Config, {}, "encoder-decoder"),
    "bert": (transformers.ViTConfig, {}, "no causal language model"),
    "gpt_oss": (transformers.GptOssConfig, {"head_dim": 16}, "sinks"),
    "dynamic rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "'dynamic'",
    ),
    "mla": (
        transformers.DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "kv_lora_rank": 32,
        },
        "different sizes",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_the_reason(kind):
    cls, changes, reason = REFUSED[kind]
    with pytest.raises(ModelRefused, match=reason):
        FromConfig(cls(**(SIZES | changes))).load("cpu", "auto")


def test_multimodal_is_refused():
    config = config_of("llama")
    config.vision_config = {"image_size": 8}
    with pytest.raises(ModelRefused, match="multimodal"):
        check_config(config, {})


def test_a_layer_that_mixes_tokens_is_found_by_trying():
    """A convolution over the packed batch leaks one sequence into the next: its logits show it."""
    model = build_random(config_of("llama"), "cpu", "auto", 0)

    def mix(module, args, out):
        return out + torch.roll(out, 1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(mix)
    with pytest.raises(ModelRefused, match="something other than causal attention"):
        finish("mixer", model, ByteTokenizer(320))


def test_a_window_that_is_not_handed_over_is_refused():
    config = config_of("llama")
    config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ModelRefused, match="layer 1 has a sliding window"):
        FromConfig(config).load("cpu", "auto")


# ------------------------------------------------------------------------------------------------ sources


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model folder with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "little"
    build_random(config_of("llama tied"), "cpu", "float32", 3).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def copied(saved, tmp_path, **changes):
    """The saved folder with changes to its config.json."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_path_loads_a_folder(saved):
    source = Path(path=str(saved))
    driver = Driver(TorchExecutor(model=source, device="cpu", num_threads=1), TorchKernel())
    assert source.name == driver.info.name == "little"
    assert driver.generate(PROMPTS[:2], 5) == [plain_generate(config_of("llama tied"), p, 5, 3) for p in PROMPTS[:2]]
    assert driver.executor.tokenizer.decode(driver.executor.tokenizer.encode("hé")) == "hé"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "nobody_knows"}, "cannot read its config"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_hidden_layers": 3}, "would have been random"),
    ],
)
def test_path_refuses_by_config(saved, tmp_path, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        Path(path=str(copied(saved, tmp_path, **changes))).load("cpu", "auto")


def test_path_refuses_missing_weights(saved, tmp_path):
    folder = copied(saved, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        Path(path=str(folder)).load("cpu", "auto")


def test_path_refuses_pickled_weights(saved, tmp_path):
    folder = copied(saved, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        Path(path=str(folder)).load("cpu", "auto")


def test_path_refuses_what_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="no such folder or file"):
        Path(path=str(tmp_path / "nothing")).load("cpu", "auto")
    with pytest.raises(ConfigError, match=r"config\.json"):
        Path(path=str(tmp_path)).load("cpu", "auto")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        Path(path=str(tmp_path)).load("cpu", "auto")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        Path(path=str(tmp_path / "model.gguf")).load("cpu", "auto")


def test_gguf_is_converted_once(saved, tmp_path, monkeypatch):
    """The folder made of a .gguf file is kept under its name, size and time, and nothing half made is left behind."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    made = []

    def convert(path, out_dir):
        made.append(path)
        return shutil.copytree(saved, out_dir)

    monkeypatch.setattr("core.fetch.convert_gguf", convert)
    file = tmp_path / "some.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    names = [Path(path=str(file)).load("cpu", "auto").info.name for _ in range(2)]
    assert names == ["some.Q4_0.gguf"] * 2 and made == [file]
    file.write_bytes(b"GGUF, another")
    Path(path=str(file)).load("cpu", "auto")
    kept = [entry.name for entry in (tmp_path / "cache" / "gguf").iterdir()]
    assert len(made) == len(kept) == 2 and all(name.startswith("some.Q4_0-") for name in kept)


def test_hub_id_offline_names_what_was_tried(monkeypatch, tmp_path):
    import huggingface_hub

    def absent(hub_id, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Path(path="someone/model").load("cpu", "auto")
    message = str(caught.value)
    assert "someone/model" in message and str(tmp_path) in message and "cannot reach the hub" in message
    assert "\n" not in message


def test_tiny_depends_on_its_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = (Tiny(seed=seed).load("cpu", "auto") for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [loaded.model.lm_head.weight for loaded in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("changes", [{"num_heads": 3}, {"hidden_size": 60}, {"vocab_size": 100}, {"num_layers": 0}])
def test_tiny_rejects_bad_numbers(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Tiny(**changes)


def test_sources_import_no_torch():
    code = "import sys; sys.modules['torch'] = None; import core.sources as s; s.Tiny(); s.Path(path='x'); s.SmolLM2()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_loading_leaves_the_process_as_it_was(saved):
    from transformers.utils import logging

    state = (
        torch.get_default_dtype(),
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        torch.is_grad_enabled(),
    )
    Path(path=str(saved)).load("cpu", "auto")
    after = (
        torch.get_default_dtype(),
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        torch.is_grad_enabled(),
    )
    assert after == state


# ------------------------------------------------------------------------------------------------ the real one

needs_smollm2 = pytest.mark.skipif(
    not model_dir().is_dir(), reason="SmolLM2 is not in the cache: run python -m core.fetch"
)


@needs_smollm2
def test_smollm2_answers_and_stops():
    executor = TorchExecutor(model=SmolLM2(), device="cpu", num_threads=2)
    driver = Driver(executor, TorchKernel(), num_blocks=8)
    assert driver.info.num_parameters == 134_515_008 and driver.info.kv_bytes_per_token == 46_080
    tokenizer = executor.tokenizer
    chat = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    output = driver.generate([tokenizer.encode(chat, add_special_tokens=False)], 8)[0]
    assert tokenizer.decode(output).startswith("The capital of France is Paris.")
    assert output[7] in driver.info.eos_token_ids


@pytest.mark.slow
@needs_smollm2
def test_smollm2_equals_generate():
    """Four prompts together, chunked, against transformers' own generate, up to near ties."""
    loaded = SmolLM2().load("cpu", "auto")
    executor = TorchExecutor(model=SmolLM2(), device="cpu", num_threads=2)
    driver = Driver(executor, TorchKernel(), num_blocks=64)
    texts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "1, 2, 3, 4,"]
    prompts = [executor.tokenizer.encode(text) for text in texts]
    found = driver.generate(prompts, 24, chunk=3)
    loaded.model.set_attn_implementation("eager")
    loaded.model.generation_config.eos_token_id = None
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        plain = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected = plain[0, len(prompt) :].tolist()
        differ = next((i for i, pair in enumerate(zip(expected, tokens, strict=True)) if pair[0] != pair[1]), None)
        if differ is not None:
            with torch.inference_mode():
                logits = loaded.model(plain[:, : len(prompt) + differ]).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] < 1e-4
