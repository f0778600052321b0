"""Loading a transformers model, and putting our attention kernels under it.

We write no model code. One name is registered with transformers' attention registry; a model set to it calls
``routed_attention`` in every attention layer, and that finds the kernel as an attribute of the calling module
(``quire_kernel``, ``quire_layer``). The registry is global to the process, the attributes are not, so engines cannot
see each other.

What an architecture does is not looked up in a list but tried: at load, a few tokens of two sequences run through the
model's own eager attention, one sequence at a time, and then packed through a probe in the kernel's place. Which
modules call, with how many heads, which scale, window and soft cap, is what the probe saw; that nothing else carries
state from token to token (recurrent layers, convolutions, position tricks, sinks) is what the equal logits show.
Anything else is refused with the reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from core.kernel import LayerInfo
from core.types import ConfigError, ModelInfo

ATTENTION_NAME = "quire_paged"
"""The one name that Quire registers with transformers."""

PROBE_LENGTHS = (3, 7)
ROPE_KINDS_ACROSS_BATCH = ("dynamic", "longrope")
LAYER_TYPES = ("full_attention", "sliding_attention")


class ModelRefused(ConfigError):
    """A model that this engine cannot serve, with the reason."""


# ------------------------------------------------------------------------------------------------ attention


def routed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,  # [1, H_kv, T, D]
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention layer of our models calls: gives [1, T, H, D]. Positions and lengths went to ``prepare``
    before.
    """
    kernel: Any = module.quire_kernel
    if isinstance(kernel, _Probe):
        return kernel.see(module, query, key, value, scaling, kwargs), None
    index = module.quire_layer
    out = kernel.forward(index, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return out[None], None


# No mask function is registered for the name, so that transformers makes no mask at all: the kernel masks by lengths. With
# one, even an empty one, it looks for packed sequences first, which waits for the device in every step.
AttentionInterface.register(ATTENTION_NAME, routed_attention)


def attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that ``find_layers`` found, by layer index."""
    found: list[Any] = [module for module in model.modules() if hasattr(module, "quire_layer")]
    return sorted(found, key=lambda module: module.quire_layer)


def connect(model: torch.nn.Module, kernel: Any) -> None:
    """Make every attention layer of ``model`` call ``kernel.forward(layer, q, k, v)``."""
    for module in attention_modules(model):
        module.quire_kernel = kernel


def packed_logits(
    model: torch.nn.Module, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Logits [R, V] of the packed tokens ``rows`` [R] int64, from T tokens: ids and positions [T] int."""
    out = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
    return out.logits[0]


# ------------------------------------------------------------------------------------------------ the probe


class _Probe:
    """Sits in the kernel's place once: records who calls and how, and answers with plain causal attention."""

    def __init__(self, lengths: tuple[int, ...]):
        self.lengths = lengths
        self.modules: list[Any] = []  # torch.nn.Module, each with an attention of its own
        self.layers: list[LayerInfo] = []

    def see(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float | None,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        if any(module is other for other in self.modules):
            raise ModelRefused("one attention module serves several layers, whose KV would overwrite each other")
        if extra.get("s_aux") is not None:
            raise ModelRefused("its attention has sinks (s_aux), which no kernel here serves yet")
        if k.shape != v.shape:
            raise ModelRefused(f"its keys and values have different sizes ({k.shape[-1]} and {v.shape[-1]} a head)")
        info = LayerInfo(
            index=len(self.layers),
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            scale=float(scaling) if scaling is not None else q.shape[3] ** -0.5,
            window=extra.get("sliding_window"),
            soft_cap=extra.get("softcap"),
        )
        self.modules.append(module)
        self.layers.append(info)
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        parts = [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        return torch.cat([_plain_attention(info, q[:, :, p], k[:, :, p], v[:, :, p]) for p in parts], dim=1)


def _plain_attention(info: LayerInfo, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention spelled out for one short sequence: q [1, H, T, D], k and v [1, H_kv, T, D] -> [1, T, H, D]."""
    group = info.num_heads // info.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(2, 3)).float() * info.scale
    if info.soft_cap is not None:
        scores = info.soft_cap * torch.tanh(scores / info.soft_cap)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if info.window is not None:
        visible = visible.triu(1 - info.window)
    scores = scores.masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def find_layers(model: PreTrainedModel) -> list[LayerInfo]:
    """Switch ``model`` to our attention and learn its layers, or refuse it (see the module docstring).

    Afterwards each attention module has ``quire_layer``; ``connect`` gives it a kernel. Costs a few forwards of ten
    tokens.
    """
    accepted = inspect.signature(model.forward).parameters
    for name in ("position_ids", "logits_to_keep"):
        if name not in accepted:
            raise ModelRefused(f"its forward takes no {name}, so that sequences cannot be packed into one batch")
    device = next(model.parameters()).device
    count = sum(PROBE_LENGTHS)
    token_ids = (torch.arange(count, device=device) * 7 + 3) % model.config.vocab_size
    positions = torch.cat([torch.arange(length, device=device) for length in PROBE_LENGTHS])
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        parts = zip(token_ids.split(PROBE_LENGTHS), positions.split(PROBE_LENGTHS), strict=True)
        expected = torch.cat([packed_logits(model, ids, place, place) for ids, place in parts])
        model.set_attn_implementation(ATTENTION_NAME)
        probe = _Probe(PROBE_LENGTHS)
        with _everywhere(model, probe):
            seen = packed_logits(model, token_ids, positions, torch.arange(count, device=device))
    _judge(model.config, probe.layers, expected, seen)
    for module, layer in zip(probe.modules, probe.layers, strict=True):
        module.quire_layer = layer.index
    return probe.layers


@contextmanager
def _everywhere(model: torch.nn.Module, probe: _Probe) -> Iterator[None]:
    modules: list[Any] = list(model.modules())
    for module in modules:
        module.quire_kernel = probe
    try:
        yield
    finally:
        for module in modules:
            del module.quire_kernel


def _judge(config: Any, layers: list[LayerInfo], expected: torch.Tensor, seen: torch.Tensor) -> None:
    """Refuse an architecture whose attention does not (all) go through our kernel, or that keeps other state."""
    kind = config.model_type
    num_layers = config.num_hidden_layers
    if len(layers) != num_layers:
        raise ModelRefused(
            f"{len(layers)} of the {num_layers} layers of a {kind} model call transformers' attention interface; the "
            "others keep their state elsewhere (recurrent layers, or attention of their own), where paging cannot reach it"
        )
    if len({(layer.num_kv_heads, layer.head_dim) for layer in layers}) > 1:
        raise ModelRefused(f"the layers of a {kind} model have KV of different shapes; one pool holds one shape")
    _judge_windows(config, layers)
    scale = max(1.0, float(expected.abs().max()))
    difference = float((expected.float() - seen.float()).abs().max()) / scale
    allowed = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.1
    if not difference <= allowed:
        raise ModelRefused(
            f"in a packed batch a {kind} model's logits differ from its own by {difference:.2g} (allowed: {allowed:g}): "
            "its layers depend on something other than causal attention over the same sequence"
        )


def _judge_windows(config: Any, layers: list[LayerInfo]) -> None:
    """A window is too long to be seen in the logits of a probe, so the config and what the layers pass must agree."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [LAYER_TYPES[getattr(config, "sliding_window", None) is not None]] * len(layers)
    for kind, layer in zip(kinds, layers, strict=False):
        if kind == "sliding_attention" and layer.window is None:
            raise ModelRefused(
                f"layer {layer.index} has a sliding window that it does not hand to the attention interface"
            )


# ------------------------------------------------------------------------------------------------ loading


def check_config(config: Any, raw: dict[str, Any]) -> None:
    """Refuse by the config alone, before the weights are read. ``raw`` is config.json as it is on disk."""
    if "auto_map" in raw:
        raise ModelRefused("its config names Python code of its own (auto_map); code from a model folder is never run")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelRefused(f"its weights are quantised ({method}); only plain safetensors weights are read")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused("it is an encoder-decoder model; only decoder-only models are served")
    if any(getattr(config, part, None) is not None for part in ("vision_config", "audio_config", "text_config")):
        raise ModelRefused("it is a multimodal model; only text models are served")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelRefused(f"transformers has no causal language model of type {config.model_type!r}")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if strange:
        raise ModelRefused(f"it has layers of type {', '.join(strange)}; only {', '.join(LAYER_TYPES)} are served")
    for kind in _rope_kinds(getattr(config, "rope_parameters", None) or {}):
        if kind in ROPE_KINDS_ACROSS_BATCH:
            raise ModelRefused(
                f"its rotary embedding is of type {kind!r}, which depends on the longest sequence of a batch and would "
                "let requests change each other's output"
            )


def _rope_kinds(parameters: dict[str, Any]) -> Iterator[str]:
    """The rope types of a config: one, or one a layer type."""
    for value in (parameters, *parameters.values()):
        if isinstance(value, dict) and "rope_type" in value:
            yield value["rope_type"]


def load_folder(folder: Path, raw: dict[str, Any], device: str, dtype: str) -> PreTrainedModel:
    """The model in a folder with config.json (given parsed as ``raw``) and safetensors weights, in evaluation mode."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ModelRefused(
            f"{folder}: transformers {transformers.__version__} cannot read its config: {error}"
        ) from error
    check_config(config, raw)
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=resolve_dtype(dtype, device, config),
                attn_implementation="eager",
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelRefused(f"{folder}: cannot load the weights: {error}") from error
    model, report = loaded
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise ModelRefused(
            f"{folder}: {len(absent)} weights of a causal language model are not in its files or have another shape "
            f"(first: {absent[0]}); they would have been random"
        )
    return model.to(device).eval()


def build_random(config: Any, device: str, dtype: str, seed: int) -> PreTrainedModel:
    """A model with random weights that depend on ``seed`` alone; torch's global generator and ``config`` stay as they were."""
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
        )
    return model.to(device, resolve_dtype(dtype, device, config)).eval()


def resolve_dtype(name: str, device: str, config: Any) -> torch.dtype:  # device: "cpu", "cuda", "cuda:1"
    """``auto``: float32 on a CPU, the model's own on a GPU. Anything else is a torch float type's name."""
    if name == "auto":
        own = getattr(config, "dtype", None)
        return own if device != "cpu" and isinstance(own, torch.dtype) else torch.float32
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype={name}: give auto, float32, bfloat16, float16 or float64")
    return dtype


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or notices from transformers; its settings are put back."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def model_info(name: str, model: PreTrainedModel, layers: list[LayerInfo], eos_ids: frozenset[int]) -> ModelInfo:
    """The facts of a loaded model. Tied weights count once; KV bytes are those of a cache in the model's own dtype."""
    config, first = model.config, layers[0]
    dtype = next(model.parameters()).dtype
    return ModelInfo(
        name=name,
        num_layers=len(layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes_per_token=2 * len(layers) * first.num_kv_heads * first.head_dim * dtype.itemsize,
        eos_token_ids=eos_ids,
        device=next(model.parameters()).device.type,
    )


@attrs.frozen(eq=False)
class LoadedModel:
    """What a source of ``core.sources`` gives: the model on its device, its tokenizer (``core.text``), its facts and
    layers.
    """

    model: PreTrainedModel
    tokenizer: Any
    info: ModelInfo
    layers: list[LayerInfo]


def finish(name: str, model: PreTrainedModel, tokenizer: Any) -> LoadedModel:
    """Learn the model's layers and facts: the last step of every load."""
    layers = find_layers(model)
    return LoadedModel(model, tokenizer, model_info(name, model, layers, frozenset(tokenizer.eos_ids)), layers)
