"""The parts of ``benchmarks/gpu.py`` that run attention and copies by themselves: right answers, then speed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from core.cache import KVCache, KVShape
from core.kernel import SCALED, LayerInfo
from core.types import Batch, Move
from plugins.kernels import triton as launcher
from plugins.kernels.triton import TritonAttention, choose_sizes
from tests.reference import Case

DRY = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if DRY else "cuda")
SHAPES = {"SmolLM2": (3, 3, 64), "8B": (8, 4, 128)}  # key heads, heads a key head, head_dim of decode attention
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def kernel_of(dtype: str = "bfloat16", sizes: Callable = choose_sizes) -> TritonAttention:
    if DRY:
        return TritonAttention(dtype, lambda *a, **k: sizes(*a, **k)._replace(tile=16, piece=32, pieces=4))
    return TritonAttention(dtype, sizes)


COPY: dict[str, float] = {}  # what bandwidth() measured


def settle() -> None:
    if not DRY:
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], times: int = 5) -> float:
    """Median seconds of ``run``, which is captured in a graph where there is one, after one run to warm up."""
    run()
    settle()
    if not DRY:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        run()
    taken = []
    for _ in range(1 if DRY else times):
        settle()
        started = time.perf_counter()
        run()
        settle()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


# ------------------------------------------------------------------------------------------------ right


def on_device(case: Case, kernel: TritonAttention) -> torch.Tensor:
    """Run a reference case on this device: its pool, tables and inputs are moved there."""
    pool = case.pool.to(DEVICE)
    case.k_cache, case.v_cache = ([pool[:, i, half] for i in range(2)] for half in (0, 1))
    kernel.bind(case.k_cache, case.v_cache, case.infos)
    kernel.prepare(case.batch, {name: tensor.to(DEVICE) for name, tensor in case.tensors().items()})
    return kernel.forward(1, case.q.to(DEVICE), case.k.to(DEVICE), case.v.to(DEVICE)).cpu()


def right(left: Callable[[], float]) -> dict[str, Any]:
    """Each case on permuted tables over a pool of NaN; lengths that cross tiles, pieces and blocks."""
    long = (1, 90) if DRY else (1, 1500)
    lengths = {
        "decode": [(1, 1), (1, 17), (1, 64), (1, 257), long],
        "prefill": [(5, 5), (70, 70), (33, 150)],
        "mixed": [(1, 9), (40, 300), (1, 1), long],
    }
    base = {"block_size": 16, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "dtype": torch.bfloat16}
    changes: list[dict[str, Any]] = [
        {},
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
        {"dtype": torch.float16, "head_dim": 80, "num_heads": 3, "block_size": 1},
        {"dtype": torch.float32},
        {"window": 40, "soft_cap": 20.0, "head_dim": 256, "num_heads": 2, "num_kv_heads": 1},
        {"num_heads": 7, "num_kv_heads": 1, "block_size": 24, "head_dim": 96},
        {"dtype": torch.float32, "head_dim": 72, "window": 300, "block_size": 5},
    ]
    found: dict[str, Any] = {"cases": 0, "wrong": [], "worst": {}}
    for change in changes:
        for phase, these in lengths.items():
            if left() < 150 and not DRY:
                return found | {"stopped": "out of time"}
            fields = base | change
            if DRY:
                fields |= {"num_heads": fields["num_heads"] // fields["num_kv_heads"], "num_kv_heads": 1}
                these = [one for one in these if one[1] < 91][:2]
            case = Case(these, **fields, padding=2)
            out = on_device(case, kernel_of(str(fields["dtype"]).removeprefix("torch.")))[:-2].float()
            error = float((out - case.expected()).abs().max())
            name = f"{phase} " + " ".join(f"{key}={value}" for key, value in change.items())
            found["cases"] += 1
            found["worst"][str(fields["dtype"])] = max(error, found["worst"].get(str(fields["dtype"]), 0.0))
            if not error <= TOLERANCE[fields["dtype"]]:
                found["wrong"].append({"case": name, "error": error})
    for kv_dtype in SCALED:
        found[kv_dtype] = scaled_error(kv_dtype)
        found["cases"] += 1
        if not found[kv_dtype]["relative_error"] < (0.02 if kv_dtype == "int8" else 0.06):
            found["wrong"].append({"case": kv_dtype, "error": found[kv_dtype]})
    if found["wrong"]:
        raise AssertionError(json.dumps(found))
    return found


def scaled_error(kv_dtype: str) -> dict[str, float]:
    """Prefill, then decode over the scaled cache, against the exact answer: normal K and V, then K with a large dim."""
    given = {}
    for name, outlier in (("relative_error", 1.0), ("relative_error_outlier_10x", 10.0)):
        case = Case([(40, 40)], block_size=16, num_heads=3, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
        case.k[..., 3] *= outlier
        cache = pool_of(KVShape(num_layers=2, num_kv_heads=1, head_dim=64, dtype=getattr(torch, kv_dtype)), 8, 16)
        kernel = kernel_of()
        kernel.bind(*cache.layer_views(), case.infos)
        kernel.prepare(case.batch, {key: tensor.to(DEVICE) for key, tensor in case.tensors().items()})
        out = kernel.forward(1, case.q.to(DEVICE), case.k.to(DEVICE), case.v.to(DEVICE)).cpu().float()
        exact = case.expected()
        given[name] = float((out - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())
    return given


# ------------------------------------------------------------------------------------------------ speed of attention


def bandwidth(left: Callable[[], float]) -> dict[str, float]:
    """Bytes a second of a large copy (read and written both count) and of a sum."""
    one = torch.ones(2**16 if DRY else 2**30, dtype=torch.float32, device=DEVICE)
    other = torch.empty_like(one)
    copied = seconds_of(lambda: other.copy_(one))
    read = seconds_of(lambda: one.sum())
    COPY["bytes_per_s"] = 2 * one.nbytes / copied
    return {"copy": COPY["bytes_per_s"], "read": one.nbytes / read}


def pool_of(shape: KVShape, num_blocks: int, block_size: int) -> KVCache:
    return KVCache(
        shape,
        num_blocks=num_blocks,
        num_swap_blocks=0,
        block_size=block_size,
        layout="block_major",
        device=DEVICE,
        zero=True,
    )


def decode_batch(num_seqs: int, context: int, block_size: int) -> Batch:
    """One new token for each sequence, blocks scattered over the pool."""
    width = -(-context // block_size)
    tables = np.random.default_rng(0).permutation(num_seqs * width).reshape(num_seqs, width).astype(np.int32)
    arange = np.arange(num_seqs, dtype=np.int32)
    return Batch(
        token_ids=arange * 0 + 1,
        positions=arange * 0 + context - 1,
        slot_mapping=(tables[:, (context - 1) // block_size] * block_size + (context - 1) % block_size).astype(
            np.int32
        ),
        query_start=np.arange(num_seqs + 1, dtype=np.int32),
        kv_lens=arange * 0 + context,
        block_tables=tables,
        logit_tokens=arange,
        sequence_ids=tuple(range(num_seqs)),
        block_size=block_size,
        max_query_len=1,
        max_kv_len=context,
    )


def arrays_of(batch: Batch) -> dict[str, torch.Tensor]:
    names = ("token_ids", "positions", "slot_mapping", "query_start", "kv_lens", "block_tables", "logit_tokens")
    return {name: torch.from_numpy(getattr(batch, name)).to(DEVICE) for name in names}


def decode_seconds(
    shape: str,
    num_seqs: int,
    context: int,
    block_size: int = 16,
    kv_dtype: str = "bfloat16",
    sizes: Callable = choose_sizes,
) -> tuple[float, int]:
    """(seconds a layer, bytes of K and V a layer). As many layers as exceed the L2 cache several times take turns."""
    kv_heads, group, dim = SHAPES[shape]
    itemsize = getattr(torch, kv_dtype).itemsize
    num_bytes = 2 * num_seqs * context * kv_heads * (dim * itemsize + (4 if kv_dtype in SCALED else 0))
    layers = 1 if DRY else max(1, min(64, math.ceil(400e6 / num_bytes)))
    blocks = num_seqs * -(-context // block_size)
    cache = pool_of(
        KVShape(num_layers=layers, num_kv_heads=kv_heads, head_dim=dim, dtype=getattr(torch, kv_dtype)),
        blocks,
        block_size,
    )
    infos = [
        LayerInfo(index=i, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
        for i in range(layers)
    ]
    kernel, batch = kernel_of(sizes=sizes), decode_batch(num_seqs, context, block_size)
    kernel.bind(*cache.layer_views(), infos)
    arrays = arrays_of(batch)
    kernel.prepare(batch, arrays)
    q = torch.randn(num_seqs, kv_heads * group, dim, device=DEVICE).bfloat16()
    k, v = (torch.randn(num_seqs, kv_heads, dim, device=DEVICE).bfloat16() for _ in range(2))

    def run() -> None:
        for layer in range(layers):
            kernel.forward(layer, q, k, v)

    return seconds_of(run) / layers, num_bytes


def attention(left: Callable[[], float]) -> list[dict[str, Any]]:
    """Decode attention: batch x context, then block sizes and cache types at one point."""
    copy = COPY["bytes_per_s"]
    points = [
        (32, 4096),
        (1, 4096),
        (256, 512),
        (128, 1024),
        (8, 32768),
        (1, 128),
        (32, 128),
        (256, 128),
        (1, 32768),
        (8, 1024),
    ]
    points += [(256, 4096), (32, 32768)]
    jobs = [(shape, *point, 16, "bfloat16") for point in points for shape in SHAPES]
    jobs += [(shape, 32, 4096, 16, kv_dtype) for kv_dtype in SCALED for shape in SHAPES]
    jobs += [("SmolLM2", 32, 4096, size, "bfloat16") for size in (1, 64, 256)]
    if DRY:
        jobs = [("SmolLM2", 2, 40, 16, "bfloat16"), ("8B", 1, 70, 16, "int8")]
    rows = []
    for shape, num_seqs, context, block_size, kv_dtype in jobs:
        if left() < 100 and not DRY:
            break
        kv_heads, _, dim = SHAPES[shape]
        if 4 * num_seqs * context * kv_heads * dim > 20e9:
            continue
        taken, num_bytes = decode_seconds(shape, num_seqs, context, block_size, kv_dtype)
        rows.append(
            {"shape": shape, "sequences": num_seqs, "context": context, "block": block_size, "kv": kv_dtype}
            | {"us": taken * 1e6, "share_of_copy": num_bytes / taken / copy}
        )
    return rows


def sizes(left: Callable[[], float]) -> list[dict[str, Any]]:
    """What other sizes would give at 32 x 4096: the rules of ``choose_sizes`` against their neighbours."""
    rows = []
    variants: list[dict[str, Any]] = [
        {},
        {"programs": 2},
        {"programs": 6},
        {"programs": 8},
        {"stages": 3},
        {"stages": 6},
    ]
    variants += [{"tile": 32}, {"tile": 128, "stages": 3}, {"warps": 2}, {"warps": 8}, {"piece": 512}, {"piece": 1024}]
    usual = launcher.PROGRAMS_PER_UNIT
    for shape in SHAPES:
        for variant in variants[:2] if DRY else variants:
            if left() < 15 and not DRY:
                return rows
            changed = {key: value for key, value in variant.items() if key != "programs"}
            launcher.PROGRAMS_PER_UNIT = variant.get("programs", usual)

            def choose(*a: Any, changed: dict[str, Any] = changed, **k: Any) -> Any:
                return choose_sizes(*a, **k)._replace(**changed)

            try:
                taken, num_bytes = decode_seconds(shape, *((1, 20) if DRY else (32, 4096)), sizes=choose)
                share = num_bytes / taken / COPY["bytes_per_s"]
                rows.append({"shape": shape, **variant, "us": taken * 1e6, "share_of_copy": share})
            except Exception as error:  # a size that does not fit this card is a finding, not an end
                rows.append({"shape": shape, **variant, "error": str(error)[:200]})
            finally:
                launcher.PROGRAMS_PER_UNIT = usual
    return rows


def chunks(left: Callable[[], float]) -> list[dict[str, Any]]:
    """Prefill of one sequence: TFLOP/s of ours (paged) and of torch's attention (contiguous)."""
    rows = []
    for shape, (kv_heads, group, dim) in SHAPES.items():
        for count in (20,) if DRY else (512, 4096):
            info = LayerInfo(index=0, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
            q = torch.randn(count, kv_heads * group, dim, device=DEVICE).bfloat16()
            k, v = (torch.randn(count, kv_heads, dim, device=DEVICE).bfloat16() for _ in range(2))
            batch = Case([(count, count)], block_size=16, num_heads=1, num_kv_heads=1, head_dim=4).batch
            cache = pool_of(
                KVShape(num_layers=1, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16),
                -(-count // 16) + 3,
                16,
            )
            kernel = kernel_of()
            kernel.bind(*cache.layer_views(), [info])
            kernel.prepare(batch, arrays_of(batch))

            def plain(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
                turned = (one.transpose(0, 1)[None] for one in (q, k, v))
                return torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)

            flop = 2 * count * (count + 1) * kv_heads * group * dim
            ours = seconds_of(lambda kernel=kernel, q=q, k=k, v=v: kernel.forward(0, q, k, v))
            theirs = seconds_of(plain)
            rows.append(
                {"shape": shape, "tokens": count, "tflops": flop / ours / 1e12, "torch_tflops": flop / theirs / 1e12}
            )
    return rows


def swap(left: Callable[[], float]) -> list[dict[str, Any]]:
    """Scattered blocks out and in: one copy a block, and one launch."""
    rows = []
    for name, shape in {
        "SmolLM2": KVShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16),
        "8B": KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16),
    }.items():
        count = 2 if DRY else max(16, int(256e6 // (shape.token_bytes * 16)))
        cache = KVCache(
            shape,
            num_blocks=count,
            num_swap_blocks=count,
            block_size=16,
            layout="block_major",
            device=DEVICE,
            zero=True,
        )
        kernel = kernel_of()
        kernel.device = DEVICE
        order = np.random.default_rng(0).permutation(count).tolist()
        for kind in ("swap_out", "swap_in", "copy"):
            moves = [Move(kind, source, target) for target, source in enumerate(order)]
            if kind == "copy":
                moves = [Move(kind, source, count // 2 + source) for source in range(count // 2)]
            for how, copier in (("calls", None), ("launch", kernel)):
                settle()
                taken = []
                for _ in range(1 if DRY else 4):
                    started = time.perf_counter()
                    cache.run_moves(moves, copier)
                    settle()
                    taken.append(time.perf_counter() - started)
                rows.append(
                    {
                        "shape": name,
                        "kind": kind,
                        "how": how,
                        "gb_per_s": len(moves) * cache.block_bytes / min(taken) / 1e9,
                    }
                )
    return rows


SECTIONS: dict[str, Callable] = {
    "right": right,
    "bandwidth": bandwidth,
    "attention": attention,
    "sizes": sizes,
    "chunks": chunks,
    "swap": swap,
}
