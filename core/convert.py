"""GGUF to a folder that transformers loads in a second: safetensors, configs and tokenizer files.

Covers dense llama-architecture files with a byte-level BPE vocabulary. Everything else is an ``UnsupportedGguf`` with
the reason: a tensor or a setting that is not understood is never dropped, since a model that runs but computes
something else is worse than a refusal. The caller may then try ``from_pretrained(folder, gguf_file=...)``.

Weights keep what the file stores: float16 and bfloat16 stay as they are, quantised blocks become float32 (a 4-bit value
times a float16 scale plus a float16 offset has more bits than float16 or bfloat16 hold). No torch, no transformers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from core.gguf_file import FetchError, GgufError, GgufFile, UnsupportedGguf

__all__ = ["FetchError", "GgufError", "UnsupportedGguf", "convert_gguf", "gguf_architecture"]

_MAX_SIZE = 2**31 - 1
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HALF = {GGMLQuantizationType.F16: ("F16", "float16"), GGMLQuantizationType.BF16: ("BF16", "bfloat16")}
_DIGITS_FIRST = ("smollm", "starcoder", "refact")  # pre-tokenizers that cut every digit off before the GPT-2 rule
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def gguf_architecture(path: str | Path) -> str:
    """``general.architecture`` of a GGUF file, for example "llama". Raises ``GgufError`` for a damaged file."""
    return _text(GgufFile(path), "general.architecture")


def convert_gguf(path: str | Path, out_dir: str | Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write a llama-architecture GGUF file as a transformers model folder, and return the folder.

    ``out_dir`` is created where missing; nothing is written before the whole file has been checked. Memory in use is
    about one tensor. ``progress(done_bytes, total_bytes)`` is called after each tensor. Raises ``GgufError`` for a
    damaged file, ``UnsupportedGguf`` for one that is not covered, ``OSError`` when the disk refuses.
    """
    source = GgufFile(path)
    config = _model_config(source)
    layout = _layout(source, config)
    tokenizer = _tokenizer(source, config["vocab_size"])
    tokenizer_config = _tokenizer_config(source, tokenizer)
    ids = _special_ids(source, config["vocab_size"])
    config |= {key: value for key, value in ids.items() if key != "unk_token_id"}
    generation: dict[str, Any] = {
        key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in ids
    }
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(source, layout, config, folder / "model.safetensors", progress)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", config)
    return folder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Metadata, checked.


def _text(source: GgufFile, key: str) -> str:
    value = source.metadata.get(key)
    if not isinstance(value, str):
        raise GgufError(f"{source.path}: {key} is missing or not a text")
    return value


def _size(source: GgufFile, key: str, default: int | None = None, lowest: int = 1) -> int:
    value = source.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= _MAX_SIZE:
        raise GgufError(f"{source.path}: {key} is {value!r}, expected a whole number from {lowest}")
    return value


def _real(source: GgufFile, key: str, default: float | None = None) -> float:
    value = source.metadata.get(key, default)
    if not isinstance(value, (int, float)) or not 0 < value < 3.4e38:  # in float32
        raise GgufError(f"{source.path}: {key} is {value!r}, expected a positive number")
    # The file holds a float32; its shortest spelling is what the model's authors wrote (1e-05, not 9.99999974e-06).
    return float(str(np.float32(value)))


def _model_config(source: GgufFile) -> dict[str, Any]:
    """config.json of the model. Refuses every setting that would change the arithmetic and is not carried over."""
    if (architecture := _text(source, "general.architecture")) != "llama":
        raise UnsupportedGguf(f"{source.path} is a {architecture!r} model; this converter covers 'llama'")
    for key in ("llama.expert_count", "llama.attention.sliding_window", "llama.attention.clamp_kqv"):
        if source.metadata.get(key):
            raise UnsupportedGguf(f"{source.path} sets {key}, which this converter does not carry over")
    hidden, heads = _size(source, "llama.embedding_length"), _size(source, "llama.attention.head_count")
    kv_heads = _size(source, "llama.attention.head_count_kv", heads)
    head_dim = _size(source, "llama.attention.key_length", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise GgufError(f"{source.path}: {heads} heads, {kv_heads} KV heads of {head_dim} values do not fit together")
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if _size(source, key, head_dim) != head_dim:
            raise UnsupportedGguf(f"{source.path}: {key} differs from the head size {head_dim}")
    theta = _real(source, "llama.rope.freq_base", 10_000.0)
    tied = "output.weight" not in source.tensors
    kinds = {info.kind for info in source.tensors.values() if len(info.shape) == 2}
    kind = next(iter(kinds)) if len(kinds) == 1 else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": _HALF[kind][1] if kind in _HALF else "float32",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _size(source, "llama.feed_forward_length"),
        "max_position_embeddings": _size(source, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _size(source, "llama.block_count"),
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": _real(source, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": theta, **_rope_scaling(source, theta, head_dim)},
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": source.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in source.tensors else 0,
    }


def _rope_scaling(source: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The rope kind. Llama 3 files carry only the resulting divisors, [head_dim / 2]; the numbers are found back."""
    kind = source.metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _real(source, "llama.rope.scaling.factor")}
    if kind != "none":
        raise UnsupportedGguf(f"{source.path}: rope scaling {kind!r} is not carried over")
    if "rope_freqs.weight" not in source.tensors:
        return {"rope_type": "default"}
    stored = source.array("rope_freqs.weight")
    low, high, original = 1.0, 4.0, 8192
    factor = float(stored.max())
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise UnsupportedGguf(f"{source.path}: its rope_freqs are not those of Llama 3 and are not carried over")
    scaling = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **scaling}


# Weights.


def _expected(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Every tensor of the model: name in the file, name in transformers, shape, heads to unpermute (0 = none)."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "attn_q": (heads * dim, hidden),
        "attn_k": (kv_heads * dim, hidden),
        "attn_v": (kv_heads * dim, hidden),
        "attn_output": (hidden, heads * dim),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for name, target in _OUTER.items():
        if name != "output.weight" or not config["tie_word_embeddings"]:
            yield name, target, (hidden,) if "norm" in name else (config["vocab_size"], hidden), 0
    for layer in range(config["num_hidden_layers"]):
        for part, target in _LAYER.items():
            permuted = {"attn_q": heads, "attn_k": kv_heads}.get(part, 0)
            shape = shapes.get(part, (hidden,))
            yield f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{target}.weight", shape, permuted


def _layout(source: GgufFile, config: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """The tensors to write, all present with the right shape; nothing in the file is left over."""
    layout = []
    for entry in _expected(config):  # stops at the first missing one, however many layers the header claims
        name, _, shape, _ = entry
        if name not in source.tensors:
            raise GgufError(f"{source.path}: tensor {name} is missing")
        if source.tensors[name].shape != shape:
            raise GgufError(f"{source.path}: tensor {name} is {source.tensors[name].shape}, expected {shape}")
        layout.append(entry)
    left = source.tensors.keys() - {name for name, *_ in layout} - {"rope_freqs.weight"}
    if left:
        raise UnsupportedGguf(f"{source.path} has {len(left)} more tensors than a llama model, such as {min(left)}")
    return layout


def _write_weights(
    source: GgufFile,
    layout: list[tuple[str, str, tuple[int, ...], int]],
    config: dict[str, Any],
    path: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    """One safetensors file, written tensor by tensor: its header needs only shapes, so memory stays at one tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, target, shape, _ in layout:
        dtype = _HALF.get(source.tensors[name].kind, ("F32", ""))[0]
        start, end = end, end + math.prod(shape) * (4 if dtype == "F32" else 2)
        header[target] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, target, _, heads in layout:
            values = source.array(name)
            if heads:
                values = _unpermute(values, heads)
            stream.write(np.ascontiguousarray(values).data)
            if progress:
                progress(header[target]["data_offsets"][1], end)
        stream.flush()
        os.fsync(stream.fileno())  # the manifest checks sizes only; a power cut must not leave zeros behind it


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * dim, hidden]: rope pairs side by side (llama.cpp) -> half a head apart (transformers)."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


# Tokenizer.


def _special_ids(source: GgufFile, vocab_size: int) -> dict[str, Any]:
    """bos, eos (a list where the end of a turn has its own id), pad and unk ids that the file names."""
    ids: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("pad", "padding"), ("unk", "unknown")):
        if (full := f"tokenizer.ggml.{key}_token_id") in source.metadata:
            ids[f"{name}_token_id"] = _size(source, full, lowest=0)
            if ids[f"{name}_token_id"] >= vocab_size:
                raise GgufError(f"{source.path}: {full} is {ids[f'{name}_token_id']}, the vocabulary has {vocab_size}")
    eot = ids.pop("eot_token_id", None)
    if eot is not None and eot != ids.get("eos_token_id", eot):
        ids["eos_token_id"] = [ids["eos_token_id"], eot]
    return ids


def _tokenizer(source: GgufFile, vocab_size: int) -> Any:
    """A ``tokenizers.Tokenizer`` from the vocabulary and the merges in the metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    if (kind := _text(source, "tokenizer.ggml.model")) != "gpt2":
        raise UnsupportedGguf(f"{source.path}: tokenizer kind {kind!r} is not converted (gpt2 is)")
    tokens, merges = source.metadata.get("tokenizer.ggml.tokens"), source.metadata.get("tokenizer.ggml.merges")
    types = source.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(types, np.ndarray):
        raise GgufError(f"{source.path}: the tokenizer's tokens, merges or token types are missing")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens) or len(tokens) > vocab_size:
        raise GgufError(
            f"{source.path}: {len(tokens)} tokens ({len(vocab)} distinct), {len(types)} types, {vocab_size} embeddings"
        )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    pre_tokenizer, whole_words = _pre_tokenizer(source)
    try:
        tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=whole_words))
    except Exception as error:  # the library raises a bare Exception for a merge that is not in the vocabulary
        raise GgufError(f"{source.path}: the tokenizer's merges do not fit its vocabulary: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    for index in np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED)):
        special = bool(types[index] == _CONTROL)  # user-defined ones (<tool_call>) are matched whole, but are text
        tokenizer.add_tokens([AddedToken(tokens[index], special=special, normalized=False)])
    if (post := _post_processor(source, tokens)) is not None:
        tokenizer.post_processor = post
    return tokenizer


def _pre_tokenizer(source: GgufFile) -> tuple[Any, bool]:
    """How text is cut before the merges, and whether a whole word in the vocabulary skips them."""
    from tokenizers import Regex, pre_tokenizers

    kind = source.metadata.get("tokenizer.ggml.pre")
    if kind in _DIGITS_FIRST:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        return pre_tokenizers.Sequence(parts), False
    if kind == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False), False
    if kind == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), True
    raise UnsupportedGguf(f"{source.path}: the pre-tokenizer {kind!r} is not converted")


def _adds_bos(source: GgufFile) -> bool:
    return bool(
        source.metadata.get("tokenizer.ggml.add_bos_token", source.metadata.get("tokenizer.ggml.pre") == "llama-bpe")
    )


def _post_processor(source: GgufFile, tokens: list[str]) -> Any | None:
    from tokenizers import processors

    if source.metadata.get("tokenizer.ggml.add_eos_token"):
        raise UnsupportedGguf(f"{source.path} ends every prompt with EOS, so it is not a text generator")
    if not _adds_bos(source):
        return None
    bos = _size(source, "tokenizer.ggml.bos_token_id", lowest=0)
    if bos >= len(tokens):
        raise GgufError(f"{source.path}: bos_token_id is {bos}, the tokenizer has {len(tokens)} tokens")
    name = tokens[bos]
    try:
        return processors.TemplateProcessing(single=f"{name} $A", pair=f"{name} $A $B", special_tokens=[(name, bos)])
    except ValueError as error:  # a name with spaces, or none
        raise GgufError(f"{source.path}: the token {name!r} cannot begin a text: {error}") from error


def _tokenizer_config(source: GgufFile, tokenizer: Any) -> dict[str, Any]:
    """tokenizer_config.json. The generic class name keeps transformers from rebuilding the pre-tokenizer."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(source),
        "clean_up_tokenization_spaces": False,
        "model_max_length": _size(source, "llama.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = source.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and (token := tokenizer.id_to_token(token_id)) is not None:
            config[f"{name}_token"] = token
    if isinstance(template := source.metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config
