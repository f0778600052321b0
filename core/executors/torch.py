"""``executor=torch``: a transformers model on a CPU or a GPU, with the KV pool, the chosen kernels and the sampler.

The order of calls at start is load, prepare, (fit_blocks), allocate, measure_cost, warm_up; then execute once a step.
All of it runs in the one thread that owns the engine. The only setting of the process that is changed is torch's
thread count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
import transformers
from attrs.validators import ge, in_, instance_of, matches_re, optional

from core.batch import MAX_SCORED_TOKENS
from core.cache import KVCache, KVShape, available_memory, fit_blocks_cpu, fit_blocks_gpu
from core.executors import StartHooks
from core.executors.calibration import Calibration, best_of, measure_link, one_sequence, recorded, sampling_of
from core.executors.cuda import DeviceStep
from core.executors.router import Router
from core.executors.router import phase_of as phase_of
from core.kernel import LAYOUTS, AttentionCase, AttentionKernel, LayerInfo, Layout, Phase
from core.machines import calibrated, plain
from core.model import LoadedModel, attention_modules, connect, packed_logits
from core.sampler import Sampler
from core.types import (
    Batch,
    CacheConfig,
    ConfigError,
    Limits,
    ModelInfo,
    Move,
    PolicyError,
    SamplingBatch,
    SamplingParams,
    StepOutput,
)

ARRAYS = ("token_ids", "positions", "slot_mapping", "query_start", "kv_lens", "block_tables", "logit_tokens")
PHASES: tuple[Phase, ...] = ("decode", "prefill", "mixed")


@attrs.define(eq=False, kw_only=True)
class TorchExecutor:
    """See the module docstring and ``core.executors.Executor``."""

    model: Any  # a source of core.sources
    device: str = attrs.field(default="auto", validator=matches_re(r"auto|cpu|cuda(:\d+)?"))
    dtype: str = "auto"  # auto: float32 on a CPU, the model's on a GPU
    num_threads: int | None = attrs.field(
        default=None, validator=optional([instance_of(int), ge(1)])
    )  # None: all we may use
    seed: int = 0  # of the tokens used to warm up and measure; sampling has its own
    checks: str = attrs.field(default="cheap", validator=in_(["cheap", "full"]))
    graphs: bool = attrs.field(default=True, validator=instance_of(bool))  # CUDA graphs of decode steps, on a GPU

    tokenizer: Any = attrs.field(default=None, init=False)  # after load()
    fit_line: str = attrs.field(default="", init=False)  # what fit_blocks decided, and why
    graph_line: str = attrs.field(default="", init=False)  # which decode steps are graphs, on a GPU
    _loaded: LoadedModel | None = attrs.field(default=None, init=False)
    _device: torch.device = attrs.field(default=torch.device("cpu"), init=False)
    _router: Router | None = attrs.field(default=None, init=False)
    _cases: dict[str, str] = attrs.field(factory=dict, init=False)  # case in words -> kernel name
    _linears: str = attrs.field(default="linears: torch.nn.Linear, unchanged", init=False)
    _layout: Layout = attrs.field(default="block_major", init=False)
    _shape: KVShape | None = attrs.field(default=None, init=False)
    _cache: KVCache | None = attrs.field(default=None, init=False)
    _limits: Limits | None = attrs.field(default=None, init=False)
    _sampler: Sampler = attrs.field(factory=Sampler, init=False)
    _step: DeviceStep | None = attrs.field(default=None, init=False)  # on a GPU

    # -------------------------------------------------------------------------------------------- start

    def load(self) -> ModelInfo:
        """Read the weights and the tokenizer, and learn the layers. Raises ``ConfigError`` for a model that cannot be
        served.
        """
        self._device = pick_device(self.device)
        torch.set_num_threads(self.num_threads or len(os.sched_getaffinity(0)))
        self._loaded = self.model.load(str(self._device), self.dtype)
        self.tokenizer = self._loaded.tokenizer
        self._sampler = Sampler(self._loaded.info.eos_token_ids)
        return self._loaded.info

    def prepare(self, hooks: StartHooks, cache: CacheConfig) -> list[str]:
        """Linears, then a kernel for each case that can occur, then a storage order that all of them read."""
        loaded = self._need_model()
        model, line = hooks.prepare_model(loaded.model)
        if len(attention_modules(model)) != len(loaded.layers):
            raise PolicyError(
                "prepare_model lost attention layers: keep the modules that have a `quire_layer` attribute"
            )
        self._loaded = loaded = attrs.evolve(loaded, model=model)
        self._linears = line or self._linears
        kv_dtype = cache.kv_dtype or loaded.info.dtype
        table: dict[Phase, list[AttentionKernel]] = {}
        for phase in PHASES:
            chosen: dict[AttentionCase, AttentionKernel] = {}
            for layer in loaded.layers:
                case = self._case(phase, layer, kv_dtype, cache.block_size)
                if case not in chosen:
                    chosen[case] = hooks.select_kernel(case)
                    self._cases[_in_words(case)] = chosen[case].name
                table.setdefault(phase, []).append(chosen[case])
        self._router = Router(table, checked=self.checks == "full")
        self._layout = common_layout(self._router.kernels)
        first = loaded.layers[0]
        storage = getattr(torch, kv_dtype, None)
        if not isinstance(storage, torch.dtype):
            raise ConfigError(f"cache.kv_dtype={kv_dtype}: torch has no such type")
        self._shape = KVShape(
            num_layers=len(loaded.layers), num_kv_heads=first.num_kv_heads, head_dim=first.head_dim, dtype=storage
        )
        connect(model, self._router)
        kernels = [f"kernel: passed over {reason}" for reason in getattr(hooks, "passed_over", ())]
        kernels += [f"kernel: {name} for {case}" for case, name in self._cases.items()]
        return [self._linears, *kernels, f"KV layout: {self._layout} {LAYOUTS[self._layout]}"]

    def _case(self, phase: Phase, layer: LayerInfo, kv_dtype: str, block_size: int) -> AttentionCase:
        return AttentionCase(
            phase=phase,
            dtype=self._need_model().info.dtype,
            kv_dtype=kv_dtype,
            head_dim=layer.head_dim,
            group_size=layer.num_heads // layer.num_kv_heads,
            window=layer.window,
            soft_cap=layer.soft_cap,
            block_size=block_size,
            device=self._device.type,
        )

    def fit_blocks(self, cache: CacheConfig, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Blocks for the pool by the memory there is; ``fit_line`` says how it came to that. Raises ``ConfigError``."""
        assert self._shape is not None, "prepare() comes first"
        token_bytes = self._shape.token_bytes
        if self._device.type == "cpu":
            count, self.fit_line = fit_blocks_cpu(cache, token_bytes, available_memory(), max_model_len, max_num_seqs)
            return count
        peak = self._profile(cache.block_size, max_num_seqs, min(max_num_batched_tokens, max_model_len))
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        count, self.fit_line = fit_blocks_gpu(cache, token_bytes, total, total - free, peak, max_model_len)
        return count

    def _profile(self, block_size: int, max_num_seqs: int, num_tokens: int) -> int:
        """GPU bytes that the largest batch needs beside weights and pool, from one run on a pool made for it."""
        blocks = -(-num_tokens // block_size)
        self._bind(blocks, 0, block_size)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        rows = np.arange(min(max_num_seqs + MAX_SCORED_TOKENS, num_tokens))
        with torch.inference_mode():
            logits = self._forward(one_sequence(num_tokens, block_size, self._vocab_size(), self.seed, rows))
            self._sampler.sample(logits, sampling_of(len(rows), SamplingParams(top_p=0.9)))
        peak = torch.cuda.max_memory_allocated(self._device) - before
        del logits
        self._cache = None
        return peak

    def allocate(self, limits: Limits) -> None:
        """The pools, for good. ``checks=full`` fills them with NaN, so that reading an unwritten slot shows."""
        self._bind(limits.num_blocks, limits.num_swap_blocks, limits.block_size)
        self._limits = limits
        if self._device.type == "cuda":
            assert self._router is not None and self._cache is not None
            graphs = self.graphs and self.checks != "full"  # full checks look at every output, which a graph cannot
            self._step = DeviceStep(self._need_model().model, self._router, self._cache, limits, self._device, graphs)

    def _bind(self, num_blocks: int, num_swap_blocks: int, block_size: int) -> None:
        assert self._shape is not None and self._router is not None, "prepare() comes first"
        self._cache = KVCache(
            self._shape,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            block_size=block_size,
            layout=self._layout,
            device=self._device,
            poison=self.checks == "full",
        )
        k_views, v_views = self._cache.layer_views()
        for kernel in self._router.kernels:
            kernel.bind(k_views, v_views, self._need_model().layers)

    def measure_cost(self) -> tuple[float, float]:
        """(link bytes/s for swap, prefill FLOP/s); taken from the cache folder where this set-up was measured before.

        Writes to the first blocks of the pool: for the start only, while nothing lives there.
        """
        info = self._need_model().info
        if (measured := calibrated(info.name, info.dtype, self.describe())) is not None:
            return measured
        key = {
            "model": [info.name, info.num_parameters, info.num_layers],
            "dtype": [info.dtype, str(self._shape.dtype if self._shape else "")],
            "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "kernels": self._cases,
            "linears": plain(self._linears),
            "layout": self._layout,
            "block_size": self._need_limits().block_size,
            "torch": torch.__version__,
        }
        found = recorded(key, self._measure)
        return found.link_bytes_per_s, found.prefill_flop_per_s

    def _measure(self) -> Calibration:
        limits, shape = self._need_limits(), self._shape
        assert shape is not None
        return Calibration(
            link_bytes_per_s=measure_link(shape, limits.block_size, self._layout, self._device),
            prefill_flop_per_s=self._measure_prefill(
                min(128, limits.num_blocks * limits.block_size, limits.max_model_len)
            ),
        )

    def _measure_prefill(self, num_tokens: int) -> float:
        """2 * parameters * tokens / seconds of one prompt: the fastest of five, after one to warm up."""
        batch = one_sequence(num_tokens, self._need_limits().block_size, self._vocab_size(), self.seed)
        seconds = best_of(5, lambda: self._run(batch), self._device)
        return 2 * self._need_model().info.num_parameters * num_tokens / seconds

    def warm_up(self) -> None:
        """One prefill and one decode step of a sequence in the first blocks, drawn once: the first step pays for
        nothing new.
        """
        limits = self._need_limits()
        for num_tokens in (min(16, limits.num_blocks * limits.block_size), 1):
            logits = self._run(one_sequence(num_tokens, limits.block_size, self._vocab_size(), self.seed))
            self._sampler.sample(logits, sampling_of(1, SamplingParams(top_k=2)))
        if self._step is not None:
            self.graph_line = self._step.warm_up()
        if self.checks == "full" and self._cache is not None:
            self._cache.poison()

    # -------------------------------------------------------------------------------------------- a step

    def execute(self, batch: Batch, moves: Sequence[Move], sampling: SamplingBatch) -> StepOutput:
        """Moves in order, forward, sample. A row whose logits are not finite is in ``errors``; the others are not
        touched by it.
        """
        assert self._cache is not None, "allocate() comes first"
        if self._step is not None and not self._sampler.edits_any(sampling):
            return self._step.execute(batch, moves, sampling)
        started = time.perf_counter()
        with torch.inference_mode():
            if moves:
                self._cache.run_moves(moves)
            moved = time.perf_counter()
            logits = self._forward(batch)
            computed = time.perf_counter()
            token_ids, logprobs, errors = self._sampler.sample(logits, sampling)
            scores = self._sampler.score(logits, sampling) if sampling.scores else ()
        ended = time.perf_counter()
        seconds = {"move": moved - started, "forward": computed - moved, "sample": ended - computed}
        return StepOutput(token_ids=token_ids, seconds=seconds, logprobs=logprobs, errors=errors, scores=scores)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's ``logit_tokens``."""
        assert self._router is not None
        tensors = {name: torch.from_numpy(getattr(batch, name)).to(self._device, non_blocking=True) for name in ARRAYS}
        self._router.begin(batch, tensors)
        rows = tensors["logit_tokens"].long()
        return packed_logits(self._need_model().model, tensors["token_ids"].long(), tensors["positions"].long(), rows)

    def _run(self, batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            return self._forward(batch)

    def now(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.monotonic()

    def wait_until(self, t: float) -> None:
        """Sleep until ``now() >= t``."""
        while (left := t - time.monotonic()) > 0:
            time.sleep(left)

    # -------------------------------------------------------------------------------------------- about itself

    def describe(self) -> dict[str, Any]:
        """Device, types, threads, kernels, layout and versions, in words: for the banner and the manifest."""
        info = self._need_model().info
        gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None
        return {
            "executor": "torch",
            "model": info.name,
            "device": self._device.type if gpu is None else f"cuda ({gpu})",
            "dtype": info.dtype,
            "kv_dtype": str(self._shape.dtype).removeprefix("torch.") if self._shape else None,
            "threads": torch.get_num_threads(),
            "kernels": dict(self._cases),
            "linears": self._linears,
            "layout": self._layout,
            "kv_pool": self.fit_line or None,
            "graphs": self.graph_line or None,
            "checks": self.checks,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def close(self) -> None:
        """Drop the model, the pools and the kernels."""
        self._loaded = self._router = self._cache = self._limits = self._step = None

    def _need_model(self) -> LoadedModel:
        assert self._loaded is not None, "load() comes first, and nothing after close()"
        return self._loaded

    def _need_limits(self) -> Limits:
        assert self._limits is not None, "allocate() comes first"
        return self._limits

    def _vocab_size(self) -> int:
        return self._need_model().info.vocab_size


def pick_device(name: str) -> torch.device:
    """``auto``: the first GPU, else the CPU. Raises ``ConfigError`` for a GPU that is not there."""
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError(f"device={name}: torch finds {count} GPUs here; give device=cpu or device=auto")
    return torch.device("cuda", index)


def _in_words(case: AttentionCase) -> str:
    parts = [
        case.phase,
        case.dtype,
        f"head_dim {case.head_dim}",
        f"group {case.group_size}",
        f"block {case.block_size}",
    ]
    if case.kv_dtype != case.dtype:
        parts.append(f"KV {case.kv_dtype}")
    if case.window is not None:
        parts.append(f"window {case.window}")
    if case.soft_cap is not None:
        parts.append(f"soft cap {case.soft_cap:g}")
    return ", ".join([*parts, case.device])


def common_layout(kernels: Sequence[AttentionKernel]) -> Layout:
    """The first storage order, by the first kernel's preference, that every kernel reads. Raises ``ConfigError``."""
    for layout in kernels[0].layouts:
        if all(layout in kernel.layouts for kernel in kernels):
            return layout
    wants = "; ".join(f"{kernel.name} reads {', '.join(kernel.layouts)}" for kernel in kernels)
    raise ConfigError(f"the chosen kernels have no KV layout in common: {wants}")
