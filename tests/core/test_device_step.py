"""The GPU's step and sampler, on the CPU: padding, inputs at fixed addresses, the sampler against the one it stands for.

Graphs themselves, with a kernel that reads everything from device memory, are tested in ``tests/plugins/triton_interpreted.py``.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from core.executors.cuda import PER_SEQUENCE, PER_TOKEN, DeviceStep, Inputs, graph_sizes, nothing, padded
from core.executors.sampling import DeviceSampler
from core.executors.torch import TorchExecutor
from core.sampler import Sampler
from core.sources import Tiny
from core.types import Limits, Move, SamplingBatch, SamplingParams
from plugins.kernels.torch import TorchKernel
from tests.driver import Driver, Seq

CPU = torch.device("cpu")
LIMITS = Limits(
    block_size=4, num_blocks=64, num_swap_blocks=4, max_model_len=40, max_num_seqs=6, max_num_batched_tokens=50
)
PROMPTS = [[1, 2, 3], list(range(40)), [7] * 17]


def drive(graphs: bool = False, **changes) -> Driver:
    """A driver whose executor takes the GPU's path."""
    executor = TorchExecutor(model=Tiny(), device="cpu", num_threads=1)
    driver = Driver(executor, TorchKernel(), **changes)
    executor._step = DeviceStep(
        executor._loaded.model, executor._router, executor._cache, driver.limits, CPU, graphs, capture=lambda run: run
    )
    return driver


def plain(**changes) -> Driver:
    return Driver(TorchExecutor(model=Tiny(), device="cpu", num_threads=1), TorchKernel(), **changes)


def test_graph_sizes_waste_little_and_end_at_the_most():
    for most in (*range(1, 70), 100, 256, 1000):
        sizes = graph_sizes(most)
        assert sizes[-1] == min(most, 256) and sizes == sorted(set(sizes))
        for count in range(1, sizes[-1] + 1):
            size = next(size for size in sizes if size >= count)
            assert size - count <= max(7, count // 4)
    assert len(graph_sizes(256)) < 25


def test_a_padded_batch_gives_the_same_rows():
    """kernel=torch on padding rows: same logits for the real ones, nothing written for the others."""
    driver = plain(block_size=4)
    seqs = [Seq([5, 6, 7], num_prompt=3), Seq([9] * 6, num_prompt=6)]
    driver.step({0: 3, 1: 6}, seqs)
    batch, _ = driver.pack({0: 1, 1: 1}, seqs)
    executor = driver.executor
    with torch.inference_mode():
        expected = executor._forward(batch)
        pool = executor._cache.pool.clone()
        more = padded(batch, 5)
        assert more.num_tokens == more.num_sequences == 5 and more.slot_mapping.tolist()[2:] == [-1] * 3
        assert more.query_start.tolist() == list(range(6)) and more.kv_lens.tolist()[2:] == [0] * 3
        out = executor._forward(more)
    torch.testing.assert_close(out[:2], expected)
    torch.testing.assert_close(executor._cache.pool, pool, equal_nan=True)
    assert out.isfinite().all()


def test_inputs_arrive_at_the_same_addresses():
    inputs = Inputs(LIMITS, CPU)
    driver = plain(block_size=4)
    first, _ = driver.pack({0: 3, 1: 9}, [Seq([1, 2, 3]), Seq(list(range(9)))])
    second, _ = driver.pack({0: 1, 1: 1}, [Seq([8]), Seq([9])])
    addresses = []
    for batch in (first, second, padded(second, 6), padded(nothing(LIMITS), 3)):
        for wide in (False, True):
            views = inputs.send(batch, wide)
            for name in (*PER_TOKEN, *PER_SEQUENCE):
                np.testing.assert_array_equal(views[name].numpy(), getattr(batch, name))
            rows, width = batch.block_tables.shape
            assert np.array_equal(views["block_tables"].numpy()[:rows, :width], batch.block_tables)
            if wide:
                assert (
                    views["block_tables"].shape == (batch.num_sequences, 10) and views["block_tables"].stride(0) == 10
                )
                addresses.append([view.data_ptr() for view in views.values()])
    assert all(each == addresses[0] for each in addresses) and all(each % 64 == 0 for each in addresses[0][:-1])


def test_the_largest_batch_fits_the_inputs():
    inputs = Inputs(LIMITS, CPU)
    tables = np.zeros((6, 10), np.int32)
    batch = padded(nothing(LIMITS), 6)
    batch = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name[0] != "_"} | {"block_tables": tables}
    )
    assert inputs.send(batch, wide=True)["block_tables"].shape == (6, 10)


@pytest.mark.parametrize("chunk", [10**9, 5])
def test_the_same_tokens_as_the_cpu_path(chunk):
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.9, seed=3), SamplingParams(seed=4)]
    assert drive().generate(PROMPTS, 8, chunk, params) == plain().generate(PROMPTS, 8, chunk, params)


def test_moves_seconds_and_a_step_without_samples():
    driver = drive(block_size=4)
    seqs = [Seq(list(range(9)), num_prompt=9)]
    output = driver.step({0: 4}, seqs)
    assert output.token_ids == [] and set(output.seconds) == {"move", "forward", "sample"}
    copy = driver.free.pop()
    move = Move("copy", seqs[0].blocks[0], copy)
    seqs[0].blocks[0] = copy
    output = driver.step({0: 5}, seqs, moves=[move])
    assert all(value >= 0 for value in output.seconds.values())
    assert seqs[0].output == plain(block_size=4).generate([list(range(9))], 1)[0]


def test_why_there_are_no_graphs():
    assert drive(graphs=True).executor._step.warm_up() == "CUDA graphs: none (kernel torch)"
    assert drive(graphs=False).executor._step.warm_up() == "CUDA graphs: none (executor.graphs or checks)"


def test_a_failed_capture_is_said_and_harms_nothing(monkeypatch):
    driver = drive(graphs=True)
    step = driver.executor._step
    step.why_not = ""

    def capture(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    step.capture = capture
    assert step.warm_up() == "CUDA graphs: none (capture failed: operation not permitted when stream is capturing)"
    assert driver.generate(PROMPTS, 4) == plain().generate(PROMPTS, 4)


# ------------------------------------------------------------------------------------------------ sampler


def sampling_of(params: list[SamplingParams], rows: list[int]) -> SamplingBatch:
    count = len(params)
    return SamplingBatch(
        rows=rows, params=params, seeds=[one.seed or 0 for one in params], branches=[i % 3 for i in range(count)],
        positions=[5 + i for i in range(count)], histories=[()] * count, num_prompt_tokens=[0] * count,
        recorded_output_tokens=[None] * count,
    )  # fmt: skip


@pytest.mark.parametrize("vocab_size", [1, 7, 300, 3000])
@pytest.mark.parametrize("ties", [False, True])
def test_the_device_sampler_draws_what_the_sampler_draws(vocab_size, ties):
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.normal(0, 2, (12, vocab_size))).float()
    if ties:
        logits = logits.round()
    params, rows = [], []
    for i in range(150):
        params.append(
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
                top_k=int(rng.choice([0, -1, 1, 2, 5, 50, 10_000])),
                top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5, 1e-6])),
                seed=i,
                logprobs=[None, None, 0, 3][rng.integers(4)],
            )
        )
        rows.append(int(rng.integers(12)))
    sampling = sampling_of(params, rows)
    expected = Sampler().sample(logits, sampling)
    tokens, logprobs, errors = DeviceSampler(CPU).start(logits, rows, sampling)()
    assert tokens == expected[0] and errors == expected[2] == {}
    for one, other in zip(logprobs, expected[1], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.token_id, len(one.top)) == (other.token_id, len(other.top))
            assert math.isclose(one.logprob, other.logprob, abs_tol=1e-12)
            np.testing.assert_allclose([p for _, p in one.top], [p for _, p in other.top], atol=1e-12)


def test_rows_without_usable_logits_are_errors_of_their_own():
    logits = torch.zeros(4, 9)
    logits[1, 3], logits[2, 4], logits[3] = math.nan, math.inf, -math.inf
    params = [SamplingParams(temperature=i % 2, seed=i, logprobs=1) for i in range(4)]
    sampling = sampling_of(params, [0, 1, 2, 3])
    tokens, logprobs, errors = DeviceSampler(CPU).start(logits, [0, 1, 2, 3], sampling)()
    assert (tokens, set(errors)) == ([0, -1, -1, -1], {1, 2, 3}) and "the largest is nan" in errors[1]
    assert logprobs[0].token_id == 0 and logprobs[1:] == [None] * 3
    assert errors == Sampler().sample(logits, sampling)[2]


def test_nothing_to_sample():
    assert DeviceSampler(CPU).start(torch.zeros(0, 5), [], sampling_of([], []))() == ([], None, {})
