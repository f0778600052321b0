"""The torch kernel against a slow reference: odd sizes, permuted tables, poisoned pools, cached prefixes, padding."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from core.kernel import AttentionCase, AttentionKernel
from core.types import Refusal
from plugins.kernels.torch import TorchAttention, TorchKernel, similar_lengths
from tests.reference import Case

# absolute, against the reference in float32 on the same (rounded) inputs; values are averages of unit normals
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DECODE = [(1, 1), (1, 17), (1, 5), (1, 33)]
PREFILL = [(5, 5), (17, 17), (3, 20), (16, 32)]
MIXED = [(1, 9), (6, 6), (1, 1), (4, 30), (1, 16)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(case: Case, tolerance: float) -> torch.Tensor:
    out = case.run(TorchAttention())
    real = len(out) - case.padding
    torch.testing.assert_close(out[:real].float(), case.expected(), atol=tolerance, rtol=tolerance)
    return out


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("filler", [math.nan, 1e30, 0.0])
def test_phases_types_and_poison(lengths, dtype, filler):
    if filler == 1e30 and dtype == torch.float16:
        filler = 6e4
    check(
        Case(lengths, block_size=16, num_heads=6, num_kv_heads=2, head_dim=64, dtype=dtype, filler=filler),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("block_size", [1, 3, 16, 24])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 96, 128])
def test_block_and_head_sizes(block_size, head_dim):
    check(Case(MIXED, block_size=block_size, num_heads=3, num_kv_heads=1, head_dim=head_dim), 1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (6, 1), (7, 1), (28, 4), (20, 1), (3, 3)])
def test_group_sizes(num_heads, num_kv_heads):
    check(Case(MIXED, block_size=3, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16), 1e-5)


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_lengths_around_a_block_edge(block_size, delta):
    lengths = [(new, blocks * block_size + delta) for blocks in (1, 2) for new in (1, 2, blocks * block_size + delta)]
    check(Case(lengths, block_size=block_size, num_heads=4, num_kv_heads=2, head_dim=16), 1e-5)


@pytest.mark.parametrize("window", [1, 2, 4, 7, 16, 1000])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_windows_and_soft_caps(window, soft_cap):
    for lengths in (DECODE, PREFILL, MIXED):
        check(
            Case(lengths, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16, window=window, soft_cap=soft_cap),
            1e-5,
        )


def test_soft_cap_without_window():
    check(Case(MIXED, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16, soft_cap=0.5), 1e-5)


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_output_is_bitwise_the_same_whatever_the_unused_slots_hold(lengths):
    outs = [
        Case(lengths, block_size=16, num_heads=6, num_kv_heads=2, head_dim=64, filler=filler).run(TorchAttention())
        for filler in (0.0, math.nan, 1e30, -math.inf)
    ]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_writes_its_slots_and_nothing_else(layout, lengths):
    """Padding rows (slot -1, NaN in k and v) write nothing; every other slot of the pool keeps its bits."""
    case = Case(lengths, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16, layout=layout, padding=3, filler=123.0)
    before = case.pool.clone()
    out = check(case, 1e-5)
    assert not out.isnan().any()
    slots = case.batch.slot_mapping[: len(out) - 3].astype(np.int64)
    after_k, after_v = case.k_cache[1].clone(), case.v_cache[1].clone()
    assert torch.equal(after_k[slots // 3, slots % 3], case.k[:-3])
    assert torch.equal(after_v[slots // 3, slots % 3], case.v[:-3])
    # put back what was there: then the whole pool, other layers included, must be as before
    pool_k = (before if layout == "block_major" else before.permute(2, 0, 1, 3, 4, 5))[:, 1]
    case.k_cache[1][slots // 3, slots % 3] = pool_k[:, 0][slots // 3, slots % 3]
    case.v_cache[1][slots // 3, slots % 3] = pool_k[:, 1][slots // 3, slots % 3]
    assert torch.equal(case.pool, before)


def test_strided_inputs():
    """Models hand over transposed views: the same numbers in another order in memory."""
    case = Case(MIXED, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16)
    for name in ("q", "k", "v"):
        tensor = getattr(case, name)
        setattr(case, name, tensor.transpose(0, 1).contiguous().transpose(0, 1))
    check(case, 1e-5)


def test_prefill_in_chunks_equals_whole():
    """Chunks write, later chunks read: the same rows as one prefill, with NaN in everything not yet written."""
    whole = Case([(20, 20)], block_size=4, num_heads=4, num_kv_heads=2, head_dim=16)
    expected = whole.run(TorchAttention())
    for chunk in (1, 3, 8, 19):
        case = Case([(20, 20)], block_size=4, num_heads=4, num_kv_heads=2, head_dim=16)
        kernel = TorchAttention()
        edges = [*range(0, 20, chunk), 20]
        for start, end in pairwise(edges):
            part = Case([(end - start, end)], block_size=4, num_heads=4, num_kv_heads=2, head_dim=16)
            part.tables = [case.tables[0][: -(-end // 4)]]
            part.batch = part._pack()
            kernel.bind(case.k_cache, case.v_cache, case.infos)
            kernel.prepare(part.batch, part.tensors())
            out = kernel.forward(0, case.q[start:end], case.k[start:end], case.v[start:end])
            torch.testing.assert_close(out, expected[start:end], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16])
def test_a_narrower_cache_is_what_every_query_reads(kv_dtype):
    """Fresh keys are read back from the cache too, so that chunking does not change what a query sees."""
    case = Case(MIXED, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16)
    case.pool = case.pool.to(kv_dtype)
    case.k_cache, case.v_cache = ([case.pool[:, i, half] for i in range(2)] for half in (0, 1))
    out = case.run(TorchAttention())
    case.k, case.v = case.k.to(kv_dtype), case.v.to(kv_dtype)
    case.past = [past.to(kv_dtype) for past in case.past]
    torch.testing.assert_close(out, case.expected(), atol=1e-5, rtol=1e-5)


def test_sequences_with_nothing_to_compute_are_left_out():
    case = Case([(1, 4), (1, 7)], block_size=3, num_heads=2, num_kv_heads=1, head_dim=16, padding=1)
    batch = case.batch
    object.__setattr__(batch, "query_start", np.append(batch.query_start, batch.query_start[-1] + 1).astype(np.int32))
    object.__setattr__(batch, "kv_lens", np.append(batch.kv_lens, 0).astype(np.int32))
    object.__setattr__(batch, "block_tables", np.vstack([batch.block_tables, batch.block_tables[:1]]))
    out = check(case, 1e-5)
    assert (out[-1] == 0).all()


def test_block_indices_are_widened_before_they_are_multiplied():
    """A slot whose element offset exceeds 2**31: int32 arithmetic would wrap."""
    kernel = TorchAttention()
    kernel.block_rows = 2 * 30 * 16
    tables = np.array([[3_000_000]], dtype=np.int32)
    rows = kernel._rows(tables, np.array([[5]]), block_size=16)
    assert rows.dtype == np.int64 and rows.tolist() == [[3_000_000 * 960 + 5]]


def test_groups_waste_at_most_half():
    lens = np.array([1, 2, 3, 500, 900, 1000, 4, 450])
    groups = similar_lengths(np.arange(8), lens)
    assert sorted(np.concatenate(groups).tolist()) == list(range(8))
    assert all(2 * lens[group].min() >= lens[group].max() for group in groups)


def case_of(**changes) -> AttentionCase:
    fields = {
        "phase": "decode",
        "dtype": "float32",
        "kv_dtype": "float32",
        "head_dim": 64,
        "group_size": 3,
        "window": None,
        "soft_cap": None,
        "block_size": 16,
        "device": "cpu",
    }
    return AttentionCase(**(fields | changes))


def test_select_kernel_gives_one_kernel_for_all_cases():
    plugin = TorchKernel()
    kernel = plugin.select_kernel(case_of())
    assert isinstance(kernel, AttentionKernel)
    assert plugin.select_kernel(case_of(phase="mixed", window=7, soft_cap=30.0, dtype="bfloat16")) is kernel


@pytest.mark.parametrize("field", ["dtype", "kv_dtype"])
def test_select_kernel_refuses_what_it_cannot_read(field):
    answer = TorchKernel().select_kernel(case_of(**{field: "float8_e4m3fn"}))
    assert isinstance(answer, Refusal) and f"{field}=float8_e4m3fn" in answer.reason


def test_two_plugins_have_two_kernels():
    assert TorchKernel().select_kernel(case_of()) is not TorchKernel().select_kernel(case_of())
