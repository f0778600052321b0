"""A llama-like decoder's step without transformers' Python: the same layers called directly, with merged projections.

Takes the place of a ``LlamaForCausalLM``, ``MistralForCausalLM`` or ``Qwen2ForCausalLM`` in float32 on a CPU, after its
logits were found equal to the original's to 1e-5. q, k and v are one product, gate and up another; norm, rotation and
activation are one operator each and residuals are added by the products; only rows that are sampled pass the last
layer's MLP, the norm and the head. Buffers are kept from step to step. Where every weight is a packed one and one kernel
that can (``core.kernel.AttendsInOne``) serves the step, all layers are one call without the interpreter's lock: a server's
Python runs beside them, where between hundreds of calls it would hold up all threads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from core.kernel import AttendsInOne
from core.model import connect, packed_logits
from plugins.kernels.linears import Chooser, Linear, PackedLinear

KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
TOLERANCE = 1e-5


class TorchOperators:
    """The small operations in torch; ``out`` of the same meaning as in ``CpuOperators``."""

    @staticmethod
    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
        return torch.mul(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps), weight, out=out)

    @staticmethod
    def silu_mul(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.mul(F.silu(gate), up, out=out)

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> None:
        dim = cos.shape[1]
        part = x[:, : heads * dim].view(len(x), heads, dim)
        low, high = part.chunk(2, dim=-1)
        part.copy_(part * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None])


class CpuOperators:
    """The same in one C++ operator each (``cpu_ops.cpp``)."""

    def __init__(self) -> None:
        ops = torch.ops.quire_cpu
        self._norm, self._silu_mul, self.rotate = ops.norm.default, ops.silu_mul.default, ops.rotate.default

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
        """out = x / rms(x) * weight, [T, hidden]."""
        self._norm(x, weight, eps, out)
        return out

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out [T, F] = silu(x[:, :F]) * x[:, F:]."""
        self._silu_mul(x, out)
        return out


class Apart:
    """Linear modules that read the same input, each by itself: the form before one is chosen."""

    def __init__(self, modules: tuple[torch.nn.Linear, ...]):
        self.modules, self.nbytes = modules, sum(module.weight.nbytes for module in modules)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.linear(x, module.weight, module.bias) for module in self.modules], dim=-1)

    def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
        total += self(x, total)


class Joint:
    """Linear modules that read the same input, as one; their own weights are given up once it is packed."""

    def __init__(self, name: str, *modules: torch.nn.Linear, keep: bool = False):
        self.name, self.modules, self.keep = name, modules, keep
        self.width = sum(module.out_features for module in modules)
        self.linear: Linear = Apart(modules)

    def pack(self, chooser: Chooser) -> None:
        """Take the fastest form, and drop every other copy of the weight (but a tied embedding's)."""
        weights = [module.weight.detach() for module in self.modules]
        bias = None
        if any(module.bias is not None for module in self.modules):
            bias = torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in self.modules])
        self.linear = chooser.make(weights[0] if len(weights) == 1 else torch.cat(weights), bias, self.name)
        if not self.keep:
            for module in self.modules:
                module.weight = None  # type: ignore[assignment]


class Layer:
    """One decoder layer's weights."""

    def __init__(self, block: Any):
        attention, mlp = block.self_attn, block.mlp
        self.attention = attention
        self.index: int = attention.quire_layer
        self.qkv = Joint("q+k+v", attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = Joint("o", attention.o_proj)
        self.gate_up = Joint("gate+up", mlp.gate_proj, mlp.up_proj)
        self.down = Joint("down", mlp.down_proj)
        self.norms = [block.input_layernorm, block.post_attention_layernorm]
        self.weights = [norm.weight.detach() for norm in self.norms]
        self.rest: list[torch.Tensor | None] = []  # arguments of quire_cpu.between, if every linear is a packed one
        self.start: list[torch.Tensor | None] = []

    @property
    def nbytes(self) -> int:
        """Of its linear layers' weights."""
        return sum(joint.linear.nbytes for joint in (self.qkv, self.output, self.gate_up, self.down))

    def fuse(self) -> bool:
        """Collect the arguments of ``quire_cpu.between``; False if some linear layer is not a packed one."""
        linears = [joint.linear for joint in (self.output, self.gate_up, self.down, self.qkv)]
        packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
        if len(packed) < len(linears):
            return False
        output, gate_up, down, qkv = ([linear.panels, linear.bias] for linear in packed)
        self.rest = [*output, self.weights[1], *gate_up, *down]
        self.start = [self.weights[0], *qkv]
        return True


class Decoder(torch.nn.Module):
    """Called as ``core.model.packed_logits`` calls a model: gives an object with ``logits`` [1, R, V].

    They lie in a buffer that the next call writes to again.
    """

    def __init__(self, model: Any, operators: Any):
        super().__init__()
        config = model.config
        self.config, self.operators = config, operators
        inner = model.model
        blocks = list(inner.layers[: config.num_hidden_layers])
        self.attentions = torch.nn.ModuleList([block.self_attn for block in blocks])  # they carry quire_layer
        self.blocks = [Layer(block) for block in blocks]
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, blocks[0].self_attn.head_dim
        self.num_heads = config.num_attention_heads
        self.eps: float = inner.norm.variance_epsilon
        self.embedding = inner.embed_tokens.weight.detach()
        self.last_norm = inner.norm.weight.detach()
        tied = model.lm_head.weight is inner.embed_tokens.weight
        self.head = Joint("head", model.lm_head, keep=tied)
        positions = torch.arange(config.max_position_embeddings)[None]
        with torch.inference_mode():
            cos, sin = inner.rotary_emb(self.embedding[:1], positions)
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()
        # of the linear layers, which a step reads
        self.weight_bytes = self.head.linear.nbytes + sum(block.nbytes for block in self.blocks)
        self.fused = False  # every layer is one operator and the attention kernel: known once the weights are packed
        self.all_weights: list[torch.Tensor | None] = []  # of all layers once they are packed, for quire_cpu.layers
        self._rooms: dict[str, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}  # the first rows of a room, as many as the last call asked for
        self._split: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None  # q, k and v of one tensor

    def pack(self, chooser: Chooser) -> None:
        """Put every weight into its fastest form, one after the other, so that few are held twice at any time."""
        for layer in self.blocks:
            for joint in (layer.qkv, layer.output, layer.gate_up, layer.down):
                joint.pack(chooser)
        self.head.pack(chooser)
        self.weight_bytes = chooser.nbytes
        self.fused = isinstance(self.operators, CpuOperators) and all(layer.fuse() for layer in self.blocks)
        self.all_weights = [weight for layer in self.blocks for weight in (*layer.start, *layer.rest)]

    def _room(self, name: str, rows: int, width: int) -> torch.Tensor:
        """[rows, width], uninitialised; the same memory in every layer and step, the same tensor for as many rows."""
        view = self._views.get(name)
        if view is None or view.shape[0] != rows:
            room = self._rooms.get(name)
            if room is None or len(room) < rows:
                room = self._rooms[name] = torch.empty(rows, width)
            view = self._views[name] = room[:rows]
        return view

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **unused: Any
    ) -> SimpleNamespace:
        """ids and positions [1, T] int64, rows [R] int64 to give logits for."""
        ids, positions, rows = input_ids[0], position_ids[0], logits_to_keep
        count, hidden = len(ids), self.embedding.shape[1]
        total = torch.index_select(self.embedding, 0, ids, out=self._room("total", count, hidden))
        cos = torch.index_select(self.cos, 0, positions, out=self._room("cos", count, self.head_dim))
        sin = torch.index_select(self.sin, 0, positions, out=self._room("sin", count, self.head_dim))
        attended = self._layers(total, cos, sin)
        if len(rows):
            total = total[rows]
            self._between(self.blocks[-1], None, total, attended[rows], cos, sin)
        logits = self._room("logits", len(rows), self.head.width)
        if len(rows):
            normed = self.operators.norm(total, self.last_norm, self.eps, self._room("normed", len(rows), hidden))
            logits = self.head.linear(normed, logits)
        return SimpleNamespace(logits=logits[None])

    def _layers(self, total: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """All layers up to the last one's attention, which is given back [T, H * D]: by one operator where that can be."""
        kernel: Any = self.attentions[0].quire_kernel
        only = getattr(kernel, "only", None)
        if self.fused and isinstance(only, AttendsInOne):
            attended = self._room("attended", len(total), self.num_heads * self.head_dim)
            if only.padded:
                attended.zero_()
            rooms = self._rooms_of(self.blocks[0], *total.shape)
            torch.ops.quire_cpu.layers.default(
                total, self.all_weights, self.eps, cos, sin, *rooms, attended, *only.layer_arguments()
            )
            return attended
        qkv = self._between(None, self.blocks[0], total, total, cos, sin)
        for layer, following in zip(self.blocks, [*self.blocks[1:], None], strict=True):
            attended = kernel.forward(layer.index, *self._parts(qkv)).view(len(total), -1)
            if following is not None:
                qkv = self._between(layer, following, total, attended, cos, sin)
        return attended

    def _rooms_of(self, layer: Layer, count: int, hidden: int) -> tuple[torch.Tensor, ...]:
        """normed, gate and up, active, and q, k and v of ``count`` tokens."""
        wide = layer.gate_up.width
        sizes = {"normed": hidden, "gate_up": wide, "active": wide // 2, "qkv": layer.qkv.width}
        return tuple(self._room(name, count, width) for name, width in sizes.items())

    def _parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q [T, H, D], k and v [T, H_kv, D] of [T, (H + 2 H_kv) D]."""
        if self._split is None or self._split[0] is not qkv:
            heads, kv_heads = self.num_heads, self.num_kv_heads
            parts = qkv.view(len(qkv), heads + 2 * kv_heads, self.head_dim)
            self._split = qkv, tuple(parts.split([heads, kv_heads, kv_heads], dim=1))
        return self._split[1]

    def _between(
        self,
        layer: Layer | None,
        following: Layer | None,
        total: torch.Tensor,
        attended: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """What lies between the attention of a layer and of the following one; either may be missing.

        total [T, hidden] += attended [T, H * D] * o, then += mlp(norm(total)); gives rotated q, k, v of norm(total).
        """
        count, hidden = total.shape
        some = layer or following
        assert some is not None
        rooms = normed, wide, active, qkv = self._rooms_of(some, count, hidden)
        turned = self.num_heads + self.num_kv_heads
        if self.fused:
            rest, start = layer.rest if layer else [], following.start if following else []
            torch.ops.quire_cpu.between.default(total, attended, rest, start, self.eps, cos, sin, turned, *rooms)
            return qkv
        if layer is not None:
            layer.output.linear.add_to(attended, total)
            self.operators.norm(total, layer.weights[1], self.eps, normed)
            active = self.operators.silu_mul(layer.gate_up.linear(normed, wide), active)
            layer.down.linear.add_to(active, total)
        if following is not None:
            self.operators.norm(total, following.weights[0], self.eps, normed)
            qkv = following.qkv.linear(normed, qkv)
            self.operators.rotate(qkv, cos, sin, turned)
        return qkv


class PlainAttention:
    """One sequence's causal attention without a cache: what both models run on when they are compared."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], k and v [T, H_kv, D] -> [T, H, D]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1).contiguous()


def refusal(model: Any) -> str:
    """Why this model is not one that ``Decoder`` knows; "" if it is."""
    if type(model).__name__ not in KNOWN:
        return f"{type(model).__name__} is not one of {', '.join(KNOWN)}"
    config = model.config
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    stem = type(model).__name__.removesuffix("ForCausalLM")
    parts = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    plain = {
        "Linear",
        "Embedding",
        "ModuleList",
        "SiLU",
        "SiLUActivation",
        stem + "ForCausalLM",
        *(stem + part for part in parts),
    }
    strange = sorted({type(module).__name__ for module in model.modules()} - plain)
    return f"it has modules that are not known: {', '.join(strange)}" if strange else ""


def difference(first: Any, second: Any, vocab_size: int) -> float:
    """The largest difference of two models' logits over a few tokens, over the largest logit."""
    ids = (torch.arange(13) * 7 + 3) % vocab_size
    rows = torch.tensor([0, 5, 12])
    found = []
    with torch.inference_mode():
        for model in (first, second):
            connect(model, PlainAttention())
            found += [packed_logits(model, ids, torch.arange(13), which).clone() for which in (rows, torch.arange(13))]
    scale = max(1.0, float(found[1].abs().max()))
    return max(float((found[i] - found[i + 2]).abs().max()) for i in range(2)) / scale
