"""The Triton kernels in Triton's interpreter against the fp32 reference. Run by ``test_kernel_triton.py``, in a process
of its own whose environment says TRITON_INTERPRET=1: Triton reads that once, when it is imported.

Sizes are small (a program costs some 10 ms here): 16 keys a tile, 32 a piece, at most four pieces, four programs.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import warnings
from itertools import pairwise

import attrs
import numpy as np
import pytest
import torch

from core.cache import KVCache, KVShape
from core.executors.cuda import DeviceStep
from core.executors.torch import TorchExecutor
from core.kernel import SCALED, CopiesBlocks, scales_of
from core.sources import Tiny
from core.types import Move
from plugins.kernels import triton_attention
from plugins.kernels.torch import TorchAttention, TorchKernel
from plugins.kernels.triton import Sizes, TritonAttention, TritonKernel, choose_sizes
from tests.driver import Driver
from tests.reference import Case

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_kernel_triton.py"

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DECODE = [(1, 1), (1, 17), (1, 33), (1, 150)]
PREFILL = [(5, 5), (17, 17), (3, 20), (18, 50)]
MIXED = [(1, 9), (6, 6), (1, 1), (4, 30), (1, 70)]
PHASES = pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])


def small(*sizes) -> Sizes:
    return choose_sizes(*sizes)._replace(tile=16, piece=32, pieces=4)


def kernel_of(module=triton_attention) -> TritonAttention:
    kernel = TritonAttention(sizes=small)
    kernel.kernels = module
    return kernel


def check(case: Case, tolerance: float = 1e-5, kernel: TritonAttention | None = None) -> torch.Tensor:
    out = case.run(kernel or kernel_of())
    real = len(out) - case.padding
    torch.testing.assert_close(out[:real].float(), case.expected(), atol=tolerance, rtol=tolerance)
    return out


@PHASES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_phases_and_types_over_a_pool_of_nan(lengths, dtype):
    check(Case(lengths, block_size=16, num_heads=6, num_kv_heads=2, head_dim=64, dtype=dtype), TOLERANCE[dtype])


@PHASES
def test_output_is_bitwise_the_same_whatever_the_unused_slots_hold(lengths):
    outs = [
        Case(lengths, block_size=16, num_heads=3, num_kv_heads=1, head_dim=16, filler=filler).run(kernel_of())
        for filler in (0.0, 1e30, -math.inf)
    ]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 1), (64, 3), (72, 16), (80, 24), (96, 5), (128, 16), (256, 7), (20, 256)]
)
def test_block_and_head_sizes(head_dim, block_size):
    check(Case(MIXED, block_size=block_size, num_heads=3, num_kv_heads=1, head_dim=head_dim))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (6, 1), (7, 1), (20, 1), (12, 4), (9, 3)])
def test_group_sizes(num_heads, num_kv_heads):
    check(Case(MIXED[1:], block_size=3, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16))


@pytest.mark.parametrize("edge", [16, 32])  # of a tile, and of a piece
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_lengths_around_an_edge(edge, delta):
    lengths = [(new, count * edge + delta) for count in (1, 2) for new in (1, 2, edge + delta)]
    check(Case(lengths, block_size=16, num_heads=2, num_kv_heads=1, head_dim=16))


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (2, 5.0), (7, None), (16, 5.0), (40, None), (1000, 0.5)])
def test_windows_and_soft_caps(window, soft_cap):
    lengths = [*DECODE[1:], (18, 50), (3, 70)]
    check(Case(lengths, block_size=3, num_heads=2, num_kv_heads=1, head_dim=16, window=window, soft_cap=soft_cap))
    check(Case(DECODE[1:], block_size=3, num_heads=2, num_kv_heads=1, head_dim=16, window=window, soft_cap=soft_cap))


def test_a_soft_cap_far_below_the_scores():
    case = Case(MIXED, block_size=3, num_heads=2, num_kv_heads=1, head_dim=16, soft_cap=0.5)
    case.q *= 1000
    check(case)


@pytest.mark.parametrize("lengths", [[(1, 400)], [(1, 32), (1, 33), (1, 64), (1, 128), (1, 129), (1, 300)]])
def test_pieces_are_merged(lengths):
    check(Case(lengths, block_size=16, num_heads=3, num_kv_heads=1, head_dim=16))


def test_a_sequence_is_cut_by_its_own_length_alone():
    """Bitwise the same result alone and in company: the number of pieces depends on nothing else."""
    together = Case(DECODE, block_size=16, num_heads=3, num_kv_heads=1, head_dim=16)
    expected = together.run(kernel_of())
    alone = Case(DECODE, block_size=16, num_heads=3, num_kv_heads=1, head_dim=16)
    last = len(DECODE) - 1
    alone.lengths, alone.tables = [DECODE[-1]], [together.tables[last]]
    alone.batch = alone._pack()
    alone.q, alone.k, alone.v = alone.q[last:], alone.k[last:], alone.v[last:]
    assert torch.equal(alone.run(kernel_of())[0], expected[last])


def test_the_work_list():
    """One entry a piece of 32 keys, at most four; none for a sequence with several new tokens or none."""
    kernel = kernel_of()
    case = Case([(1, 33), (4, 40), (1, 1), (1, 999)], block_size=16, num_heads=1, num_kv_heads=1, head_dim=16)
    kernel.bind(case.k_cache, case.v_cache, case.infos)
    kernel.prepare(case.batch, case.tensors())
    work = kernel._buffers["work 0"].tolist()
    assert work[: 1 + work[0]] == [7, 0 * 4, 0 * 4 + 1, 2 * 4, 12, 13, 14, 15]


def test_the_work_list_of_many_sequences():
    lengths = [(1, 1 + 7 * i % 90) for i in range(150)]  # more than the planning kernel takes at once
    kernel = kernel_of()
    case = Case(lengths, block_size=64, num_heads=1, num_kv_heads=1, head_dim=4)
    kernel.bind(case.k_cache, case.v_cache, case.infos)
    kernel.prepare(case.batch, case.tensors())
    expected = [4 * i + piece for i, (_, keys) in enumerate(lengths) for piece in range(-(-keys // 32))]
    work = kernel._buffers["work 0"].tolist()
    assert work[: 1 + work[0]] == [len(expected), *expected]


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@PHASES
def test_writes_its_slots_and_nothing_else(layout, lengths):
    """Padding rows (slot -1, NaN in k and v) write nothing; every other slot of the pool keeps its bits."""
    case = Case(lengths, block_size=3, num_heads=2, num_kv_heads=2, head_dim=16, layout=layout, padding=3, filler=123.0)
    other = Case(
        lengths, block_size=3, num_heads=2, num_kv_heads=2, head_dim=16, layout=layout, padding=3, filler=123.0
    )
    out = check(case)
    assert not out.isnan().any()
    other.run(TorchAttention())
    assert torch.equal(case.pool, other.pool)


def test_rows_that_pad_a_graph():
    """Sequences of length 0 with slot -1 behind the real ones: no write, zeros out, the others as without them."""
    case = Case(DECODE, block_size=3, num_heads=2, num_kv_heads=1, head_dim=16, padding=2)
    batch = case.batch
    starts = np.append(batch.query_start, batch.query_start[-1] + np.arange(1, 3)).astype(np.int32)
    tables = np.vstack([batch.block_tables, np.full((2, batch.block_tables.shape[1]), 10**6, np.int32)])
    lens = np.append(batch.kv_lens, [0, 0]).astype(np.int32)
    case.batch = attrs.evolve(batch, query_start=starts, block_tables=tables, kv_lens=lens)
    out = check(case)
    assert (out[-2:] == 0).all()
    plain = Case(DECODE, block_size=3, num_heads=2, num_kv_heads=1, head_dim=16, padding=2)
    assert torch.equal(plain.run(kernel_of())[:-2], out[:-2])


def test_sequences_with_nothing_to_compute_are_left_out():
    case = Case([(1, 4), (3, 7)], block_size=3, num_heads=2, num_kv_heads=1, head_dim=16, padding=1)
    batch = case.batch
    starts = np.append(batch.query_start, batch.query_start[-1]).astype(np.int32)
    lens = np.append(batch.kv_lens, 0).astype(np.int32)
    tables = np.vstack([batch.block_tables, batch.block_tables[:1]])
    case.batch = attrs.evolve(batch, query_start=starts, kv_lens=lens, block_tables=tables)
    assert (check(case)[-1] == 0).all()


def test_strided_inputs():
    """Models hand over transposed views, also with the head dimension not innermost."""
    for axes in ((0, 1), (1, 2)):
        case = Case(MIXED, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16)
        for name in ("q", "k", "v"):
            tensor = getattr(case, name)
            setattr(case, name, tensor.transpose(*axes).contiguous().transpose(*axes))
        check(case)


def test_prefill_in_chunks_equals_whole():
    """Chunks write, later chunks read: the same rows as one prefill, with NaN in everything not yet written."""
    expected = Case([(40, 40)], block_size=4, num_heads=2, num_kv_heads=1, head_dim=16).run(kernel_of())
    for chunk in (7, 16, 39):
        case = Case([(40, 40)], block_size=4, num_heads=2, num_kv_heads=1, head_dim=16)
        kernel = kernel_of()
        kernel.bind(case.k_cache, case.v_cache, case.infos)
        for start, end in pairwise([*range(0, 40, chunk), 40]):
            part = Case([(end - start, end)], block_size=4, num_heads=2, num_kv_heads=1, head_dim=16)
            part.tables = [case.tables[0][: -(-end // 4)]]
            part.batch = part._pack()
            kernel.prepare(part.batch, part.tensors())
            out = kernel.forward(0, case.q[start:end], case.k[start:end], case.v[start:end])
            torch.testing.assert_close(out, expected[start:end], atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ narrower caches


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16])
def test_a_narrower_cache_is_what_every_query_reads(kv_dtype):
    """Fresh keys too, so that chunking does not change what a query sees. The interpreter rounds to bfloat16 downwards."""
    for lengths in (DECODE, MIXED):
        case = Case(lengths, block_size=3, num_heads=2, num_kv_heads=1, head_dim=16)
        case.pool = case.pool.to(kv_dtype)
        case.k_cache, case.v_cache = ([case.pool[:, i, half] for i in range(2)] for half in (0, 1))
        out = case.run(kernel_of())
        slots = case.batch.slot_mapping.astype(np.int64)
        for name, views in (("k", case.k_cache), ("v", case.v_cache)):
            stored = views[1][slots // 3, slots % 3].float()
            torch.testing.assert_close(stored, getattr(case, name), rtol=1e-2, atol=1e-6)
            setattr(case, name, stored)
        case.past = [past.to(kv_dtype) for past in case.past]
        torch.testing.assert_close(out, case.expected(), atol=1e-5, rtol=1e-5)


def rounded(x: torch.Tensor, kv_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] as a scaled cache stores it, by torch's own conversions: (stored, scale [...])."""
    most = SCALED[str(kv_dtype).removeprefix("torch.")]
    scale = x.float().abs().amax(-1) / most
    stored = x.float() / scale[..., None]
    return (stored.round() if kv_dtype == torch.int8 else stored).to(kv_dtype), scale


def scaled_case(lengths, kv_dtype: torch.dtype, layout: str = "block_major", **changes) -> Case:
    """A case over a scaled pool of NaN, its past rounded and stored; ``expected`` is about the rounded K and V."""
    fields = {"block_size": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 20} | changes
    case = Case(lengths, **fields)
    shape = KVShape(num_layers=2, num_kv_heads=fields["num_kv_heads"], head_dim=fields["head_dim"], dtype=kv_dtype)
    cache = KVCache(
        shape, num_blocks=len(case.k_cache[0]), num_swap_blocks=0, block_size=case.block_size, layout=layout,
        device=torch.device("cpu"), poison=True,
    )  # fmt: skip
    case.cache, case.exact = cache, case.expected()
    case.k_cache, case.v_cache = cache.layer_views()
    for i, (table, past) in enumerate(zip(case.tables, case.past, strict=True)):
        stored, scale = rounded(past, kv_dtype)
        for place in range(past.shape[1]):
            block, offset = table[place // case.block_size], place % case.block_size
            for half, views in enumerate((case.k_cache, case.v_cache)):
                for view in views:
                    view.view(torch.int8)[block, offset] = stored[half, place].view(torch.int8)
                    scales_of(view)[block, offset] = scale[half, place]
        case.past[i] = stored.float() * scale[..., None]
    return case


@PHASES
@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_scaled_cache(lengths, layout, kv_dtype):
    """The right answer for the rounded K and V, stored as torch rounds them, and how far that is from the exact one."""
    case = scaled_case(lengths, kv_dtype, layout)
    out = case.run(kernel_of())
    exact = case.exact
    stored = [rounded(one, kv_dtype) for one in (case.k, case.v)]
    slots = case.batch.slot_mapping.astype(np.int64)
    for view, (values, scale) in zip((case.k_cache[1], case.v_cache[1]), stored, strict=True):
        torch.testing.assert_close(scales_of(view)[slots // 3, slots % 3], scale)
        apart = (view[slots // 3, slots % 3].float() - values.float()).abs()
        # a value halfway between two may go either way: the divisions differ in their last bit
        assert apart.count_nonzero() <= 0.02 * apart.numel() and (apart <= values.float().abs() / 8 + 1).all()
        assert scales_of(view).isnan().any()  # the rest of the pool is as it was
    case.k, case.v = (
        view[slots // 3, slots % 3].float() * scales_of(view)[slots // 3, slots % 3][..., None]
        for view in (case.k_cache[1], case.v_cache[1])
    )
    torch.testing.assert_close(out, case.expected(), atol=1e-5, rtol=1e-5)
    error = (out - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    print(f"{kv_dtype}: {error:.4f} of the output's size")
    assert error < (0.012 if kv_dtype == torch.int8 else 0.05)


def test_every_e4m3_value_is_decoded():
    """All 254 finite bytes as V of one-token sequences: what comes out is what torch says they are."""
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    keep = torch.cat([values[:127], values[128:255]])
    rows = torch.cat([keep, keep[:2]]).view(16, 1, 16)
    case = scaled_case([(1, 2)] * 16, torch.float8_e4m3fn, num_heads=1, num_kv_heads=1, head_dim=16)
    case.v[:] = 0
    for i, table in enumerate(case.tables):
        case.v_cache[1].view(torch.int8)[table[0], 0] = rows[i].view(torch.int8)
        scales_of(case.v_cache[1])[table[0], 0] = 1.0
        scales_of(case.k_cache[1])[table[0], 0] = 0.0  # equal scores for both tokens
    case.k[:] = 0
    torch.testing.assert_close(case.run(kernel_of()), rows.float() / 2)


def test_a_nan_stays_a_nan_in_a_scaled_cache():
    case = scaled_case([(1, 5), (3, 4), (1, 7)], torch.int8)
    case.k[0, 0, 3] = case.v[2, 1, 0] = math.nan
    out = case.run(kernel_of())
    assert out[0, :2].isnan().all() and out[2:4, 2:].isnan().all()
    assert not out[0, 2:].isnan().any() and not out[1:4, :2].isnan().any() and not out[4].isnan().any()


# ------------------------------------------------------------------------------------------------ offsets, moves


def test_offsets_over_two_to_the_31():
    """A slot 2.6e9 elements into the pool, in memory that is reserved and, but for a few pages, never touched."""
    stride, block = 2**20, 2500
    pool = torch.empty((block + 1) * stride, dtype=torch.int8)
    half = stride // 2
    views = [pool[start:].as_strided((block, 3, 1, 16), (stride, 16, 16, 1)) for start in (0, half)]
    views = [one.as_strided((block + 1, 3, 1, 16), (stride, 16, 16, 1), one.storage_offset()) for one in views]
    for lengths in ([(1, 2)], [(2, 3)]):
        case = Case(lengths, block_size=3, num_heads=1, num_kv_heads=1, head_dim=16)
        plain = scaled_case(lengths, torch.int8, num_heads=1, num_kv_heads=1, head_dim=16)
        expected = plain.run(kernel_of())
        source = plain.tables[0][0]
        for view, full in zip(views, (plain.k_cache[1], plain.v_cache[1]), strict=True):
            view[block] = full[source]
            scales_of(view)[block] = scales_of(full)[source]
        case.tables = [np.array([block])]
        case.batch = case._pack()
        case.k_cache, case.v_cache = [views[0]] * 2, [views[1]] * 2
        assert torch.equal(case.run(kernel_of()), expected)


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_moves_in_one_launch_are_as_one_after_the_other(layout, dtype):
    rng = np.random.default_rng(3)
    moves = []
    for _ in range(12):
        kind = ["copy", "swap_out", "swap_in"][rng.integers(3)]
        moves.append(Move(kind, int(rng.integers(4)), int(rng.integers(4))))
    moves += [
        Move("copy", 0, 1),
        Move("copy", 1, 2),
        Move("copy", 3, 1),
        Move("swap_out", 1, 0),
        Move("swap_out", 2, 0),
    ]
    caches = []
    kernel = kernel_of()
    kernel.device = torch.device("cpu")
    assert isinstance(kernel, CopiesBlocks)
    for copier in (None, kernel):
        shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=20, dtype=dtype)
        cache = KVCache(
            shape, num_blocks=4, num_swap_blocks=4, block_size=5, layout=layout, device=torch.device("cpu"), zero=True
        )
        for i in range(4):
            cache.blocks[i], cache.host[i] = i, 100 + i
        cache.run_moves(moves, copier)
        caches.append(cache)
    assert torch.equal(caches[0].pool, caches[1].pool) and torch.equal(caches[0].host, caches[1].host)


# ------------------------------------------------------------------------------------------------ planted faults

FAULTS = {
    "tail mask": ("seen = positions < end\n", "seen = positions < end + 1\n"),
    "head group": ("q_heads = head * GROUP + rows\n", "q_heads = (head + rows) % (KV_HEADS * GROUP)\n"),
    "softmax rescale": ("total = total * shrink + ", "total = total + "),
    "output rescale": ("acc = acc * shrink[:, None] + ", "acc = acc + "),
    "block index": ("table + positions // S", "table + positions // S // 2 * 2"),
    "causal mask": ("positions[None, :] <= place[:, None]", "positions[None, :] <= place[:, None] + 1"),
    "merge weights": ("acc * weights[:, None]", "acc"),
    "narrow offset": (
        "rows = block * block_stride + offset * token_stride + head * head_stride\n    x",
        "rows = (block * block_stride).to(tl.int32) + offset * token_stride + head * head_stride\n    x",
    ),
    "slot of -1": ("if slot < 0:\n        return", "if slot < -1:\n        return"),
}


def everything(kernel: TritonAttention) -> None:
    for lengths in (DECODE[1:], [*PREFILL[2:], (1, 70)]):
        case = Case(lengths, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16, padding=1, filler=7.0)
        other = Case(lengths, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16, padding=1, filler=7.0)
        check(case, kernel=kernel)
        other.run(TorchAttention())
        torch.testing.assert_close(case.pool, other.pool, equal_nan=True)


def planted(name: str, tmp_path):
    """The kernels with one line wrong."""
    right, wrong = FAULTS[name]
    with open(triton_attention.__file__, encoding="utf-8") as file:
        source = file.read()
    assert right in source, f"the line of fault {name!r} is not in the kernels any more"
    path = tmp_path / "planted.py"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kernels_without_a_fault_pass():
    everything(kernel_of())


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, tmp_path, monkeypatch):
    """In a child process: a wrong address may also end it."""
    kernel = kernel_of(planted(name, tmp_path))

    def attempt() -> None:
        if name == "narrow offset":
            monkeypatch.setitem(globals(), "kernel_of", lambda: kernel)
            test_offsets_over_two_to_the_31()
        else:
            everything(kernel)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            attempt()
            status = 0
        except BaseException as error:
            print(f"{name}: {type(error).__name__}", flush=True)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] != 0, f"the fault {name!r} changed no result"


# ------------------------------------------------------------------------------------------------ in a captured step


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_decode_steps_from_graphs_give_the_same_tokens(kv_dtype, monkeypatch, tmp_path):
    """What would be captured is run again with the arrays in place and a batch object that knows nothing of them."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    prompts = [[1, 2, 3], [7] * 11, [4]]
    tokens = []
    for graphs in (True, False):
        executor = TorchExecutor(model=Tiny(), device="cpu", num_threads=1)
        kernel = TritonKernel()
        driver = Driver(executor, kernel, block_size=8, num_blocks=32, kv_dtype=kv_dtype)
        kernel._kernel._sizes = small
        driver.limits = attrs.evolve(driver.limits, max_num_seqs=4)
        if graphs:
            executor._step = DeviceStep(
                executor._loaded.model, executor._router, executor._cache, driver.limits, torch.device("cpu"), True,
                capture=lambda run: run,
            )  # fmt: skip
            pool = executor._cache.pool.clone()
            assert executor._step.warm_up().startswith("CUDA graphs: decode steps of 1, 2, 4 sequences")
            assert torch.equal(executor._cache.pool.view(torch.int8), pool.view(torch.int8))
        tokens.append(driver.generate(prompts, 3))
        if graphs:
            monkeypatch.setattr(executor._step, "replays", {})
            with pytest.raises(KeyError):  # decode steps did come from there
                driver.generate([[1]], 2)
    assert tokens[0] == tokens[1]
    if kv_dtype is None:
        reference = Driver(TorchExecutor(model=Tiny(), device="cpu", num_threads=1), TorchKernel(), block_size=8)
        assert tokens[0] == reference.generate(prompts, 3)
