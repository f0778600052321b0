"""Pools, layouts, moves in order, and how many blocks fit."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache import (
    CPU_POOL_BYTES,
    KVCache,
    KVShape,
    available_memory,
    fit_blocks_cpu,
    fit_blocks_gpu,
    runs,
)
from core.kernel import LAYOUTS
from core.types import CacheConfig, ConfigError, Move

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, dtype=torch.float32)
NUM_BLOCKS, NUM_HOST = 6, 4
GIB = 2**30


def make(layout: str = "block_major", **changes) -> KVCache:
    fields = {"num_blocks": NUM_BLOCKS, "num_swap_blocks": NUM_HOST, "block_size": 5, "device": torch.device("cpu")}
    return KVCache(SHAPE, layout=layout, **(fields | changes))


def numbered(layout: str = "block_major") -> KVCache:
    """Each device block holds its id, each host block 100 + its id."""
    cache = make(layout)
    for block in range(NUM_BLOCKS):
        cache.blocks[block] = block
    for block in range(NUM_HOST):
        cache.host[block] = 100 + block
    return cache


def contents(cache: KVCache) -> tuple[list[float], list[float]]:
    """One number a block, after a check that the whole block holds it."""
    for space in (cache.blocks, cache.host):
        assert all((block == block.flatten()[0]).all() for block in space)
    return [float(block.flatten()[0]) for block in cache.blocks], [float(block.flatten()[0]) for block in cache.host]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_views_are_windows_on_the_pool(layout):
    cache = make(layout, zero=True)
    k_views, v_views = cache.layer_views()
    assert [tuple(view.shape) for view in (*k_views, *v_views)] == [(NUM_BLOCKS, 5, 3, 4)] * 4
    for number, view in enumerate((*k_views, *v_views), start=1):
        view[number] = number
    assert sorted(cache.pool.unique().tolist()) == [0, 1, 2, 3, 4]
    assert float(cache.blocks[3, 0, 1, 0, 0, 0]) == 3  # layer 0, V


def test_block_major_blocks_are_contiguous():
    cache = make("block_major")
    assert cache.blocks[2].is_contiguous()
    assert cache.block_bytes == cache.blocks[2].numel() * 4 == SHAPE.token_bytes * 5 == 2 * 2 * 3 * 4 * 4 * 5


MOVES = st.lists(
    st.one_of(
        st.builds(Move, st.just("copy"), st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1)),
        st.builds(Move, st.just("swap_out"), st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_HOST - 1)),
        st.builds(Move, st.just("swap_in"), st.integers(0, NUM_HOST - 1), st.integers(0, NUM_BLOCKS - 1)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None)
@given(moves=MOVES)
def test_moves_give_what_one_after_the_other_gives(layout, moves):
    device, host = list(map(float, range(NUM_BLOCKS))), [100.0 + i for i in range(NUM_HOST)]
    spaces = {"copy": (device, device), "swap_out": (device, host), "swap_in": (host, device)}
    for kind, source, destination in moves:
        read, write = spaces[kind]
        write[destination] = read[source]
    cache = numbered(layout)
    cache.run_moves(moves)
    assert contents(cache) == (device, host)


@given(moves=MOVES)
def test_runs_lose_nothing(moves):
    spelled = [Move(kind, s + i, d + i) for kind, s, d, count in runs(moves) for i in range(count)]
    assert spelled == moves


def test_runs_join_neighbours_but_never_a_block_that_is_both_read_and_written():
    assert list(runs([Move("swap_out", 1, 0), Move("swap_out", 2, 1), Move("swap_out", 3, 2)])) == [
        ("swap_out", 1, 0, 3)
    ]
    assert list(runs([Move("copy", 0, 1), Move("copy", 1, 2)])) == [("copy", 0, 1, 1), ("copy", 1, 2, 1)]
    assert list(runs([Move("copy", 0, 3), Move("copy", 1, 4)])) == [("copy", 0, 3, 2)]
    assert list(runs([Move("copy", 2, 1), Move("copy", 3, 2)])) == [("copy", 2, 1, 1), ("copy", 3, 2, 1)]
    assert list(runs([Move("swap_out", 1, 0), Move("swap_in", 2, 1)])) == [("swap_out", 1, 0, 1), ("swap_in", 2, 1, 1)]


@pytest.mark.parametrize(
    "move",
    [Move("copy", 0, NUM_BLOCKS), Move("copy", -1, 0), Move("swap_out", 0, NUM_HOST), Move("swap_in", NUM_HOST, 0)],
)
def test_a_move_outside_the_pools_is_an_error(move):
    with pytest.raises(IndexError, match=move.kind):
        numbered().run_moves([move])


def test_no_swap_pool():
    cache = make(num_swap_blocks=0)
    cache.run_moves([Move("copy", 0, 1)])
    with pytest.raises(IndexError):
        cache.run_moves([Move("swap_out", 0, 0)])


def test_poison_and_close():
    cache = make(poison=True)
    assert cache.pool.isnan().all() and cache.host.isnan().all()
    cache.close()
    cache.close()
    assert cache.pool.numel() == cache.host.numel() == 0


def resident(pool: torch.Tensor) -> list[bool]:
    """Whether each page of a pool is in memory, by the kernel's account (bit 63 of /proc/self/pagemap)."""
    first, last = pool.data_ptr() // 4096, (pool.data_ptr() + pool.nbytes - 1) // 4096
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(first * 8)
        return [bool(word >> 63) for (word,) in struct.iter_unpack("<Q", pages.read((last - first + 1) * 8))]


def test_every_page_of_the_pool_is_there_before_the_first_request():
    cache = make(num_blocks=20_000)
    assert all(resident(cache.pool)) and len(resident(cache.pool)) > 2000
    fresh = torch.frombuffer(mmap.mmap(-1, 2**26), dtype=torch.uint8)  # what nobody has touched is seen as such
    assert not any(resident(fresh))


def test_more_blocks_than_memory_are_refused_by_name_not_by_the_kernel(monkeypatch):
    monkeypatch.setattr("core.cache.available_memory", lambda: 10**6)
    with pytest.raises(
        ConfigError, match=r"20000 KV blocks of 5 tokens need 0.02 GB on cpu, where 0.00 GB .*cache.num_blocks"
    ):
        make(num_blocks=20_000)


def test_a_pool_that_cannot_be_had_names_its_size():
    with pytest.raises(ConfigError, match=r"KV blocks of 5 tokens need .* GB on cpu"):
        make(num_blocks=2**44)


# ------------------------------------------------------------------------------------------------ how many blocks


@pytest.mark.parametrize(
    ("available", "max_num_seqs", "swap_gb", "expected", "why"),
    [
        (64 * GIB, 64, 0.0, CPU_POOL_BYTES // 16_000, "2 GiB"),
        (64 * GIB, 2, 0.0, 2 * 7, "2 sequences of 100 tokens"),
        (1_000_000, 64, 0.0, 500_000 // 16_000, "0.5 of"),
        (1_000_000, 64, 0.0003, 200_000 // 16_000, "less 0.0003 GB of swap"),
    ],
)
def test_cpu_pool_is_the_least_of_three(available, max_num_seqs, swap_gb, expected, why):
    cache = CacheConfig(block_size=16, memory_fraction=0.5, swap_gb=swap_gb)
    seqs = max_num_seqs if max_num_seqs == 2 else 10**6
    count, line = fit_blocks_cpu(cache, 1000, available, 100, seqs)
    assert count == expected
    assert f"{count} blocks of 16 = {16 * count} tokens" in line and why in line


def test_gpu_pool():
    cache = CacheConfig(block_size=16, memory_fraction=0.9)
    count, line = fit_blocks_gpu(cache, 1000, 10**9, 3 * 10**8, 10**8, 4096)
    assert count == (900 - 300 - 100) * 10**6 // 16_000
    assert "0.30 GB in use" in line and "0.10 GB for the largest batch" in line


@pytest.mark.parametrize("available", [0, 20_000])
def test_no_room_is_an_error_with_the_numbers(available):
    with pytest.raises(ConfigError, match=r"no room for a KV pool: .* leaves [01] blocks"):
        fit_blocks_cpu(CacheConfig(swap_gb=0.0), 1000, available, 100, 4)
    with pytest.raises(ConfigError, match=r"leaves -?\d+ blocks"):
        fit_blocks_gpu(CacheConfig(), 1000, 10**6, 2 * 10**6, 0, 100)


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       9000 kB\nMemAvailable:   8000 kB\n"


@pytest.mark.parametrize(
    ("files", "kilobytes"),
    [
        ({}, 8000),
        ({"proc/self/cgroup": "0::/\n"}, 8000),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 8000),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "1024\n",
                "sys/fs/cgroup/a/memory.max": f"{3000 * 1024}\n",
                "sys/fs/cgroup/a/memory.current": f"{2000 * 1024}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {500 * 1024}\n",
            },
            1500,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/jobs\n0::/\n",
                "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": f"{700 * 1024}\n",
                "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": f"{900 * 1024}\n",
            },
            0,
        ),
    ],
    ids=["none", "root", "unlimited", "v2-parent", "v1-over"],
)
def test_available_memory_knows_control_groups(tmp_path, files, kilobytes):
    assert available_memory(system(tmp_path, {"proc/meminfo": MEMINFO} | files)) == kilobytes * 1024


def test_available_memory_here():
    assert 2**20 < available_memory() < 2**50
