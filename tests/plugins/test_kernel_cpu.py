"""The CPU kernel against a slow reference, in each instruction set that runs here; and what happens where it cannot be built."""

from __future__ import annotations

import math
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch

from core.executors.torch import TorchExecutor
from core.kernel import AttentionCase, AttentionKernel
from core.sources import Tiny
from core.types import Refusal
from plugins.kernels import cpu_build
from plugins.kernels.cpu import CpuAttention, CpuKernel
from plugins.kernels.torch import TorchKernel
from tests.driver import Driver
from tests.reference import Case

DECODE = [(1, 1), (1, 17), (1, 5), (1, 33), (1, 600)]
PREFILL = [(5, 5), (17, 17), (3, 20), (70, 130)]
MIXED = [(1, 9), (6, 6), (1, 1), (4, 30), (1, 16), (1, 300)]
SMALL = [(1, 9), (6, 6), (1, 1), (4, 30), (1, 16)]

try:
    LINE = cpu_build.load()
except cpu_build.Unavailable as error:
    pytest.skip(f"kernel=cpu is not available: {error}", allow_module_level=True)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    torch.ops.quire_cpu.use_instructions("auto")


def check(case: Case, tolerance: float = 1e-5) -> torch.Tensor:
    out = case.run(CpuAttention())
    real = len(out) - case.padding
    torch.testing.assert_close(out[:real], case.expected(), atol=tolerance, rtol=tolerance)
    return out


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("filler", [math.nan, 1e30])
def test_phases_and_poison(instructions, lengths, filler):
    check(Case(lengths, block_size=16, num_heads=9, num_kv_heads=3, head_dim=64, filler=filler))


def test_two_engines_of_a_process_do_not_meet():
    """Two threads that attend at once, with sequences in different numbers of parts: each merges its own when they are done."""
    cases = [Case([(1, length)] * 3, block_size=16, num_heads=9, num_kv_heads=3, head_dim=64) for length in (600, 2000)]
    alone = [case.run(CpuAttention()).clone() for case in cases]

    def again(case: Case, expected: torch.Tensor) -> bool:
        return all(torch.equal(case.run(CpuAttention()), expected) for _ in range(60))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(again, cases, alone))


@pytest.mark.parametrize("block_size", [1, 3, 16, 24])
@pytest.mark.parametrize("head_dim", [16, 20, 64, 72, 80, 96, 128, 256])
def test_block_and_head_sizes(instructions, block_size, head_dim):
    check(Case(SMALL, block_size=block_size, num_heads=3, num_kv_heads=1, head_dim=head_dim))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (2, 1), (4, 1), (5, 1), (6, 1), (7, 1), (28, 4), (20, 1), (3, 3)]
)
def test_group_sizes(instructions, num_heads, num_kv_heads):
    check(Case(SMALL, block_size=3, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16))


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_lengths_around_a_block_edge(instructions, block_size, delta):
    lengths = [(new, blocks * block_size + delta) for blocks in (1, 2) for new in (1, 2, blocks * block_size + delta)]
    check(Case(lengths, block_size=block_size, num_heads=4, num_kv_heads=2, head_dim=16))


@pytest.mark.parametrize("keys", [31, 32, 33, 63, 64, 65, 255, 256, 257, 512, 513])
def test_lengths_around_tile_and_part_edges(instructions, keys):
    check(Case([(1, keys), (2, keys), (min(keys, 43), keys)], block_size=16, num_heads=3, num_kv_heads=1, head_dim=16))


@pytest.mark.parametrize("window", [1, 2, 4, 7, 16, 300, 1000])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_windows_and_soft_caps(instructions, window, soft_cap):
    lengths = DECODE if window == 300 else SMALL
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    check(Case(lengths, block_size=3, window=window, soft_cap=soft_cap, **shape))


def test_scores_far_apart_neither_overflow_nor_vanish(instructions):
    """Scores of +-1000: the largest is subtracted before anything is exponentiated."""
    case = Case(MIXED, block_size=16, num_heads=3, num_kv_heads=1, head_dim=16)
    case.q *= 300
    check(case, 1e-4)


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_output_is_bitwise_the_same_whatever_the_unused_slots_hold(instructions, lengths):
    outs = [
        Case(lengths, block_size=16, num_heads=6, num_kv_heads=2, head_dim=64, filler=filler).run(CpuAttention())
        for filler in (0.0, math.nan, 1e30, -math.inf)
    ]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_a_sequence_gets_the_same_bits_whoever_shares_its_batch_and_whatever_the_blocks_and_threads(instructions):
    shape = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    together = Case(DECODE, block_size=16, **shape)
    expected = together.run(CpuAttention())
    for threads, block_size in ((1, 16), (2, 5)):
        torch.set_num_threads(threads)
        for i, length in enumerate(DECODE):
            alone = Case([length], block_size=block_size, **shape)
            alone.q, alone.k, alone.v = together.q[i : i + 1], together.k[i : i + 1], together.v[i : i + 1]
            alone.past = [together.past[i]]
            alone._fill_past()
            assert torch.equal(alone.run(CpuAttention())[0], expected[i])


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_writes_its_slots_and_nothing_else(layout, lengths):
    """Padding rows (slot -1, NaN in k and v) write nothing; every other slot of the pool keeps its bits."""
    case = Case(lengths, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16, layout=layout, padding=3, filler=123.0)
    before = case.pool.clone()
    out = check(case)
    assert (out[-3:] == 0).all()
    slots = case.batch.slot_mapping[:-3].astype(np.int64)
    assert torch.equal(case.k_cache[1][slots // 3, slots % 3], case.k[:-3])
    assert torch.equal(case.v_cache[1][slots // 3, slots % 3], case.v[:-3])
    pool = before if layout == "block_major" else before.permute(2, 0, 1, 3, 4, 5)
    for cache, half in ((case.k_cache, 0), (case.v_cache, 1)):
        cache[1][slots // 3, slots % 3] = pool[slots // 3, 1, half, slots % 3]
    assert torch.equal(case.pool, before)


def test_strided_inputs(instructions):
    """Views into a joint projection, and views whose heads come before their tokens: the same numbers elsewhere."""
    case = Case(MIXED, block_size=3, num_heads=4, num_kv_heads=2, head_dim=16)
    joint = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], dim=1)
    case.q, case.k, case.v = (
        x.view(len(joint), -1, 16) for x in joint.split([64, 32, 32], dim=1)
    )  # fmt: skip
    check(case)
    for name in ("q", "k", "v"):
        setattr(case, name, getattr(case, name).transpose(0, 1).contiguous().transpose(0, 1))
    check(case)


def test_prefill_in_chunks_equals_whole(instructions):
    """Chunks write, later chunks read, with NaN in everything not yet written."""
    whole = Case([(90, 90)], block_size=4, num_heads=4, num_kv_heads=2, head_dim=16)
    expected = whole.run(CpuAttention())
    for chunk in (1, 8, 64, 89):
        case = Case([(90, 90)], block_size=4, num_heads=4, num_kv_heads=2, head_dim=16)
        kernel = CpuAttention()
        for start, end in pairwise([*range(0, 90, chunk), 90]):
            part = Case([(end - start, end)], block_size=4, num_heads=4, num_kv_heads=2, head_dim=16)
            part.tables = [case.tables[0][: -(-end // 4)]]
            part.batch = part._pack()
            kernel.bind(case.k_cache, case.v_cache, case.infos)
            kernel.prepare(part.batch, part.tensors())
            out = kernel.forward(0, case.q[start:end], case.k[start:end], case.v[start:end])
            torch.testing.assert_close(out, expected[start:end], atol=1e-5, rtol=1e-5)


def test_a_bfloat16_cache_is_what_every_query_reads(instructions):
    case = Case(MIXED, block_size=3, num_heads=4, num_kv_heads=2, head_dim=24)
    case.pool = case.pool.to(torch.bfloat16)
    case.k_cache, case.v_cache = ([case.pool[:, i, half] for i in range(2)] for half in (0, 1))
    out = case.run(CpuAttention())
    case.k, case.v = case.k.bfloat16(), case.v.bfloat16()  # rounded to nearest, ties to even, as torch does
    case.past = [past.bfloat16() for past in case.past]
    torch.testing.assert_close(out, case.expected(), atol=1e-5, rtol=1e-5)


def test_a_nan_key_that_is_visible_shows():
    case = Case([(1, 20), (1, 20)], block_size=16, num_heads=3, num_kv_heads=1, head_dim=16)
    case.k[1] = math.nan
    out = case.run(CpuAttention())
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_element_offsets_beyond_2_31():
    """Two blocks whose distance needs more than 32 bits; only the pages that are used become memory."""
    stride = 2**31 + 4096
    storage = torch.empty(stride + 4096)
    case = Case([(1, 6)], block_size=3, num_heads=2, num_kv_heads=1, head_dim=16)
    case.tables = [np.array([1, 0])]
    case.k_cache = [storage.as_strided((2, 3, 1, 16), (stride, 16, 16, 1)) for _ in range(2)]
    case.v_cache = [storage.as_strided((2, 3, 1, 16), (stride, 16, 16, 1), 1024) for _ in range(2)]
    case._fill_past()
    case.batch = case._pack()
    check(case)


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
    plugin = CpuKernel()
    kernel = plugin.select_kernel(case_of())
    assert isinstance(kernel, AttentionKernel)
    assert plugin.select_kernel(case_of(phase="mixed", window=7, soft_cap=30.0, kv_dtype="bfloat16")) is kernel


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "bfloat16"), ("kv_dtype", "float16"), ("device", "cuda"), ("head_dim", 2048)]
)
def test_select_kernel_refuses_what_it_cannot_read(field, value):
    answer = CpuKernel().select_kernel(case_of(**{field: value}))
    assert isinstance(answer, Refusal) and str(value) in answer.reason


def test_same_tokens_as_the_torch_kernel_through_the_executor():
    prompts = [[1, 2, 3], list(range(40)), [7] * 17]

    def tokens(plugin, **changes):
        executor = TorchExecutor(model=Tiny(), device="cpu", num_threads=2, checks="full")
        return Driver(executor, plugin, num_blocks=256, **changes).generate(prompts, 12, chunk=changes.get("chunk", 9))

    expected = tokens(TorchKernel())
    assert tokens(CpuKernel()) == expected == tokens(CpuKernel(), block_size=3)


# ------------------------------------------------------------------------------------------------ building


def select_elsewhere(tmp_path, **environment) -> str:
    """What a fresh process with this environment answers: the refusal's reason, or the line of the kernel."""
    code = (
        "from plugins.kernels.cpu import CpuKernel\nfrom core.kernel import AttentionCase\n"
        f"answer = CpuKernel().select_kernel({case_of()!r})\n"
        "print(getattr(answer, 'reason', '') or answer.instructions)"
    )
    full = {**os.environ, "QUIRE_CACHE": str(tmp_path), "QUIRE_KERNELS": "", **environment}
    full["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=full, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_a_compiler_the_reason_is_one_line(tmp_path):
    answer = select_elsewhere(tmp_path, PATH=str(tmp_path), CXX="")
    assert answer.startswith("cpu is not available: no C++ compiler on PATH") and "\n" not in answer
    assert not list(tmp_path.rglob(".partial-*"))


def test_a_library_that_was_built_before_needs_no_compiler(tmp_path):
    (tmp_path / "kernels").symlink_to(cpu_build.kernels_dir())
    assert select_elsewhere(tmp_path, PATH="", CXX="").split()[1] == "instructions"


def test_a_compiler_that_fails_is_named_and_leaves_nothing_behind(tmp_path):
    fake = tmp_path / "c++"
    fake.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo fake 1.0 && exit 0\necho 'error: out of ideas' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    answer = select_elsewhere(tmp_path, CXX=str(fake))
    assert "out of ideas" in answer and "\n" not in answer
    assert not list((tmp_path / "kernels").iterdir())


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "kernels").write_text("a file where the folder would be: also for root, who may write anywhere")
    answer = select_elsewhere(tmp_path)
    assert "cannot write to the cache folder" in answer and "\n" not in answer


def test_instructions_can_be_forced_and_a_wrong_name_is_refused(tmp_path):
    (tmp_path / "kernels").symlink_to(cpu_build.kernels_dir())
    assert select_elsewhere(tmp_path, QUIRE_CPU_INSTRUCTIONS="generic").startswith("generic instructions")
    assert "allowed are auto, avx512" in select_elsewhere(tmp_path, QUIRE_CPU_INSTRUCTIONS="sse9")


@pytest.mark.slow
def test_two_processes_that_build_at_once_both_get_it(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: select_elsewhere(tmp_path), range(2)))
    assert all("instructions" in answer for answer in answers)
    made = list((tmp_path / "kernels").iterdir())
    assert len(made) == 1 and made[0].suffix == ".so" and made[0].stat().st_mode & stat.S_IRUSR
