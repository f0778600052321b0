"""The parts of ``benchmarks/gpu.py`` that run a model: random weights of SmolLM2's shape and of a 7B model's, through the
torch executor, and through the engine built by hand (no Hydra on that machine).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

from benchmarks.gpu_attention import DEVICE, DRY, decode_batch
from core.blocks import BlockPool
from core.cost import CostModel
from core.edge import Edge
from core.engine import Engine
from core.executors.calibration import sampling_of
from core.executors.cuda import DeviceStep
from core.executors.torch import TorchExecutor
from core.metrics import Metrics
from core.model import LoadedModel, finish
from core.plugins import Chosen, EngineHooks
from core.text import ByteTokenizer
from core.types import Batch, CacheConfig, EngineInfo, Limits, SamplingParams
from plugins.allocators.paged import PagedAllocator
from plugins.kernels.triton import TritonKernel
from plugins.preemption.recompute import Recompute
from plugins.schedulers.chunked import ChunkedScheduler

SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
SEVEN_B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
SEVEN_B |= {"num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "vocab_size": 300, "tie_word_embeddings": True}


@attrs.frozen(eq=False)
class Random:
    """A Llama of a given shape with random weights, made on the device itself."""

    shape: dict[str, Any]

    def load(self, device: str, dtype: str) -> LoadedModel:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(max_position_embeddings=8192, **self.shape)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=getattr(torch, dtype))
        return finish("random", model.to(device).eval(), ByteTokenizer())


def chosen(kind: str, plugin: Any) -> Chosen:
    return Chosen(kind, type(plugin).__name__.lower(), plugin, "benchmarks", "0", type(plugin).__qualname__)


def make_engine(shape: dict[str, Any], device: torch.device, limits: Limits, graphs: bool) -> Engine:
    """As ``core.start`` does it, from objects instead of a config."""
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    executor = TorchExecutor(model=Random(shape), device=device.type, dtype=dtype, graphs=graphs)
    model = executor.load()
    plugins = {"allocator": PagedAllocator(), "scheduler": ChunkedScheduler(), "preemption": Recompute()}
    hooks = EngineHooks([chosen(kind, plugin) for kind, plugin in (plugins | {"kernel": TritonKernel()}).items()])
    executor.prepare(hooks, CacheConfig(block_size=limits.block_size))
    executor.allocate(limits)
    if DRY:  # the GPU's path, with a second run in a graph's place
        parts: Any = executor
        model_of, router, cache = parts._loaded.model, parts._router, parts._cache
        parts._step = DeviceStep(model_of, router, cache, limits, DEVICE, graphs, capture=lambda run: run)
    pool, cost = BlockPool(limits.num_blocks, limits.block_size), CostModel.of(model, 1e10, 1e14)
    engine = Engine(
        executor=executor, hooks=hooks, limits=limits, model=model, cost=cost, pool=pool,
        edge=Edge(model, limits, executor.tokenizer), metrics=Metrics(), tokenizer=executor.tokenizer, checks="cheap", seed=0,
    )  # fmt: skip
    hooks.setup(EngineInfo(limits=limits, model=model, pool=pool, cost=cost, seed=0))
    executor.warm_up()
    return engine


def limits_of(num_seqs: int, num_blocks: int) -> Limits:
    if DRY:
        return Limits(
            block_size=16, num_blocks=32, num_swap_blocks=0, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32
        )
    return Limits(
        block_size=16, num_blocks=num_blocks, num_swap_blocks=0, max_model_len=4096, max_num_seqs=num_seqs,
        max_num_batched_tokens=2048,
    )  # fmt: skip


def step_batch(num_seqs: int, context: int, vocab_size: int) -> Batch:
    batch = decode_batch(num_seqs, context, 16)
    ids = np.random.default_rng(1).integers(0, vocab_size, num_seqs, dtype=np.int32)
    return attrs.evolve(batch, token_ids=ids)


def step(left: Callable[[], float]) -> list[dict[str, Any]]:
    """Milliseconds of a decode step, sampling and the copy back included: eager, and from a graph; the same tokens."""
    rows = []
    for name, shape in {"SmolLM2": TINY if DRY else SMOLLM2, "7B": TINY if DRY else SEVEN_B}.items():
        if left() < 60 and not DRY:
            break
        engine = make_engine(shape, DEVICE, limits_of(128, 128 * 33), graphs=True)
        executor: Any = engine.executor
        device_step, line = executor._step, executor.graph_line
        for num_seqs in (1, 2) if DRY else (1, 8, 32, 128):
            batch = step_batch(num_seqs, 40 if DRY else 512, shape["vocab_size"])
            sampling = sampling_of(num_seqs, SamplingParams(temperature=0))
            row: dict[str, Any] = {"model": name, "sequences": num_seqs, "graphs": line}
            tokens = {}
            for how in ("eager", "graph"):
                if device_step is not None:
                    device_step.sizes = [] if how == "eager" else sorted(device_step.replays)
                taken = []
                for _ in range(2 if DRY else 20):
                    started = time.perf_counter()
                    tokens[how] = executor.execute(batch, (), sampling).token_ids
                    taken.append(time.perf_counter() - started)
                row[f"{how}_ms"] = float(np.median(taken[1:])) * 1e3
            row["same_tokens"] = tokens["eager"] == tokens["graph"]
            rows.append(row)
        executor.close()
        del engine, executor, device_step
        if not DRY:
            torch.cuda.empty_cache()
    return rows


def replay(left: Callable[[], float]) -> list[dict[str, Any]]:
    """Requests all at once: random prompts (64-512), lognormal outputs (mean 64, sigma 1, cut at 512). Tokens a second."""
    rows = []
    for name, shape in {"SmolLM2": TINY if DRY else SMOLLM2, "7B": TINY if DRY else SEVEN_B}.items():
        for num_seqs in (2,) if DRY else (32, 256):
            if left() < 40 and not DRY:
                return rows
            rng = np.random.default_rng(0)
            engine = make_engine(shape, DEVICE, limits_of(num_seqs, 16384), graphs=True)
            total = 0
            count = 3 if DRY else 2 * num_seqs
            for _ in range(count):
                prompt = rng.integers(
                    0, shape["vocab_size"], rng.integers(4, 9) if DRY else rng.integers(64, 513)
                ).tolist()
                output = 3 if DRY else int(np.clip(rng.lognormal(np.log(64) - 0.5, 1.0), 1, 512))
                total += output
                params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
                engine.submit(tuple(prompt), params)
            stages: dict[str, float] = {}
            steps = 0
            started = time.perf_counter()
            while engine.has_work():
                report = engine.step()
                steps += 1
                for stage, value in report.stage_seconds.items():
                    stages[stage] = stages.get(stage, 0.0) + value
            taken = time.perf_counter() - started
            engine.assert_idle()
            rows.append(
                {
                    "model": name,
                    "requests": count,
                    "at_once": num_seqs,
                    "output_tokens": total,
                    "steps": steps,
                    "seconds": taken,
                }
                | {"tokens_per_s": total / taken, "stages": {stage: round(value, 3) for stage, value in stages.items()}}
            )
            engine.executor.close()
            del engine
            if not DRY:
                torch.cuda.empty_cache()
    return rows


SECTIONS: dict[str, Callable] = {"step": step, "replay": replay}
