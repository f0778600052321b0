"""Models described by their config alone, for what needs no weights: the simulator and the ledger. No torch, no transformers.

A *described* model answers to ``name`` and ``shape(dtype) -> core.arithmetic.Shape``, as every source in core/sources.py
does too; ``load`` of one without weights is refused with a line that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from core.arithmetic import DTYPE_BYTES, Shape
from core.types import ConfigError, ModelInfo

ALIASES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
}
"""Our fields, and what the configs of transformers call them."""
TWO_MATRIX_MLP = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "gpt_bigcode")
"""Families whose feed-forward part has no gate."""
STRANGE = {
    "kv_lora_rank": "its attention keeps a compressed KV (kv_lora_rank), which 2 L n_kv d b does not describe",
    "num_local_experts": "it has experts, of which a step reads some: that is not priced yet",
    "num_experts": "it has experts, of which a step reads some: that is not priced yet",
    "n_routed_experts": "it has experts, of which a step reads some: that is not priced yet",
    "is_encoder_decoder": "it is an encoder-decoder model",
    "text_config": "it is a multimodal model",
}
EOS = 257
"""The byte tokenizer's, which stands in for the model's own: answers are made up."""


@attrs.frozen(eq=False, kw_only=True)
class Described:
    """A model of which only the config is here: ``executor=roofline`` and the ledger read it, nothing can run it."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype: str = "bfloat16"
    tied: bool = False
    num_parameters: int | None = None  # as published; None: counted from the shapes
    cards: int = 1  # it is split over so many

    def __attrs_post_init__(self) -> None:
        self.shape()  # bad values show when the option is built

    def shape(self, dtype: str = "auto") -> Shape:
        """The shapes, in ``dtype`` or (``auto``) the published type."""
        values = attrs.asdict(self, recurse=False)
        values["stated_parameters"] = values.pop("num_parameters")
        return Shape(**{**values, "dtype": self.dtype if dtype == "auto" else dtype})

    def load(self, device: str, dtype: str) -> Any:
        raise ConfigError(
            f"model={self.name} is a description without weights: use executor=roofline, or model=path with a folder"
        )


def shape_from_config(raw: Mapping[str, Any], name: str, dtype: str = "auto", cards: int = 1) -> Shape:
    """The shapes in a transformers config.json. ConfigError names what is missing or what the arithmetic cannot describe."""
    kind = raw.get("model_type", "no model_type")
    for key, reason in STRANGE.items():
        if raw.get(key) and raw[key] != 1:
            raise ConfigError(f"model {name} ({kind}) cannot be described: {reason}")
    found = {field: _first(raw, names) for field, names in ALIASES.items()}
    for field in ("num_layers", "hidden_size", "num_heads", "max_position"):
        if found[field] is None:
            raise ConfigError(f"model {name} ({kind}): its config has none of {', '.join(ALIASES[field])}")
    own = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if raw.get("multi_query"):
        found["num_kv_heads"] = 1
    if not isinstance(raw.get("vocab_size"), int):
        raise ConfigError(f"model {name} ({kind}): its config has no vocab_size")
    try:
        return Shape(
            name=name,
            num_layers=found["num_layers"],
            hidden_size=found["hidden_size"],
            intermediate_size=found["intermediate_size"] or 4 * found["hidden_size"],
            num_heads=found["num_heads"],
            num_kv_heads=found["num_kv_heads"] or found["num_heads"],
            head_dim=raw.get("head_dim") or found["hidden_size"] // found["num_heads"],
            vocab_size=raw["vocab_size"],
            max_position=found["max_position"],
            dtype=own if dtype == "auto" else dtype,
            tied=bool(raw.get("tie_word_embeddings", True)),
            mlp_matrices=2 if kind in TWO_MATRIX_MLP else 3,
            cards=cards,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model {name} ({kind}): {error}") from error


def shape_from_folder(folder: Path, name: str, dtype: str = "auto") -> Shape:
    """The shapes of a model folder, or of a config.json by itself."""
    file = folder if folder.suffix == ".json" else folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file, so the model cannot be described") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return shape_from_config(raw, name, dtype)


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((raw[name] for name in names if raw.get(name) is not None), None)


def model_info(shape: Shape, device: str) -> ModelInfo:
    """What the engine needs to know, for a model that is only described."""
    return ModelInfo(
        name=shape.name,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_position=shape.max_position,
        num_parameters=shape.num_parameters,
        dtype=shape.dtype,
        kv_bytes_per_token=shape.kv_bytes_per_token(),
        eos_token_ids=frozenset({min(EOS, shape.vocab_size - 1)}),
        device=device,
    )


def check_dtype(dtype: str) -> None:
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={dtype}: give auto or one of {', '.join(DTYPE_BYTES)}")
