"""The torch executor: start, a step with its moves and errors, costs, clock, and what it says of itself."""

from __future__ import annotations

import json
import math
import time

import attrs
import numpy as np
import pytest
import torch

from core.executors import Executor, calibration
from core.executors.torch import TorchExecutor, common_layout, phase_of, pick_device
from core.fetch import cache_dir
from core.kernel import AttentionCase
from core.sources import Tiny
from core.types import CacheConfig, ConfigError, Move, PolicyError, Refusal, SamplingParams
from plugins.kernels.linears_torch import TorchLinears
from plugins.kernels.torch import TorchAttention, TorchKernel
from tests.driver import GREEDY, Driver, Hooks, Seq

PROMPTS = [[1, 2, 3], list(range(40)), [7] * 17]


@pytest.fixture(autouse=True)
def own_cache_and_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "quire"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(checks: str = "full", **changes) -> TorchExecutor:
    return TorchExecutor(**({"model": Tiny(), "device": "cpu", "num_threads": 1, "checks": checks} | changes))


def drive(*kernels, checks: str = "full", **changes) -> Driver:
    return Driver(make(checks), *(kernels or [TorchKernel()]), **changes)


def test_is_an_executor():
    methods = [name for name in vars(Executor) if not name.startswith("_")]
    assert all(callable(getattr(TorchExecutor, name)) for name in methods)


@pytest.mark.parametrize("block_size", [1, 3, 16, 24])
def test_same_tokens_for_any_block_and_chunk(block_size):
    expected = drive().generate(PROMPTS, 12)
    for chunk in (10**9, 1, 5):
        assert drive(block_size=block_size, num_blocks=256).generate(PROMPTS, 12, chunk=chunk) == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert drive(block_size=block_size, num_blocks=256).generate([prompt], 12) == [tokens]


def test_seeded_sampling_does_not_depend_on_company_or_chunks():
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=42)
    alone = drive().generate([PROMPTS[1]], 12, params=[params])[0]
    others = [SamplingParams(seed=7), params, GREEDY]
    assert drive().generate(PROMPTS, 12, params=others)[1] == alone
    assert drive().generate(PROMPTS[::-1], 12, chunk=3, params=others)[1] == alone


def test_swap_and_copy_keep_the_output():
    """After a prefill: the blocks go to the host, others overwrite them, they come back elsewhere, one is copied on write."""
    driver = drive(block_size=4, num_blocks=32, num_swap_blocks=10)
    expected = driver.generate([PROMPTS[1]], 6)[0]
    seqs = [Seq(list(PROMPTS[1]), num_prompt=40), Seq([3] * 40, num_prompt=40)]
    driver.step({0: 40}, seqs)
    old = list(seqs[0].blocks)
    out = [Move("swap_out", block, host) for host, block in enumerate(old)]
    driver.free += old
    seqs[0].blocks = []
    output = driver.step({1: 40}, seqs, moves=out)  # takes the freed blocks
    assert output.seconds["move"] > 0
    assert set(seqs[1].blocks) & set(old)
    new = [driver.free.pop() for _ in old]
    back = [Move("swap_in", host, block) for host, block in enumerate(new)]
    copy = driver.free.pop()
    seqs[0].blocks = [*new[:-1], copy]
    driver.step({0: 1}, seqs, moves=[*back, Move("copy", new[-1], copy)])
    while len(seqs[0].output) < 6:
        driver.step({0: 1}, seqs)
    assert seqs[0].output == expected


EXTREMES = [
    SamplingParams(temperature=0, logit_bias={97: -100, 98: 100}),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1e-6, seed=1),
    SamplingParams(temperature=1, top_k=5, seed=2),
    SamplingParams(temperature=2, seed=3),
    SamplingParams(temperature=2, seed=4, top_p=0.01, min_p=0.5),
    SamplingParams(temperature=1e-6, seed=5, allowed_token_ids=(100, 101), repetition_penalty=100),
]
"""Greedy, nearly greedy, wide, narrow, forbidden: side by side in one batch."""


def test_extremes_in_one_batch_get_what_they_get_alone():
    """And a temperature near 0 is greedy; a top_k of 0, -1 or more than there are tokens is none."""
    together = drive().generate([PROMPTS[1]] * len(EXTREMES), 12, params=EXTREMES)
    assert together == [drive().generate([PROMPTS[1]], 12, params=[one])[0] for one in EXTREMES]
    assert together[0] == [98] * 12 and together[2] == together[1] and set(together[6]) <= {100, 101}
    off = [SamplingParams(temperature=1, top_k=k, seed=2) for k in (0, -1, 10**6)]
    plain = SamplingParams(temperature=1, seed=2)
    wide = drive().generate([PROMPTS[1]] * 4, 12, params=[plain, *off])
    assert wide == [wide[0]] * 4 and wide[0] != together[3]


@pytest.mark.parametrize("hit", [4, 16, 36])
def test_log_probabilities_behind_a_hit_are_those_of_a_miss(hit):
    """A prompt whose first blocks another sequence computed: the same distribution as when it computes them itself."""
    driver = drive(block_size=4, num_blocks=64)
    prompt, params = list(PROMPTS[1]), SamplingParams(temperature=0, logprobs=20)
    other = Seq([*prompt[:hit], 9, 8, 7], GREEDY, hit + 3)
    cold, warm = Seq([*prompt], params, len(prompt)), Seq([*prompt], params, len(prompt))
    driver.step({0: hit + 3}, [other])
    warm.blocks, warm.computed = other.blocks[: hit // 4], hit
    seqs = [other, cold, warm]
    first = driver.step({1: len(prompt)}, seqs).logprobs[0]
    again = driver.step({2: len(prompt) - hit}, seqs).logprobs[0]
    assert [token for token, _ in first.top] == [token for token, _ in again.top]
    assert max(abs(a - b) for (_, a), (_, b) in zip(first.top, again.top, strict=True)) < 1e-4


def test_seconds_and_logprobs():
    driver = drive()
    seqs = [Seq([5, 6], SamplingParams(temperature=0, logprobs=2), 2), Seq([5], GREEDY, 1)]
    output = driver.step({0: 2, 1: 1}, seqs)
    assert set(output.seconds) == {"move", "forward", "sample"} and all(value >= 0 for value in output.seconds.values())
    assert output.logprobs[1] is None
    assert output.logprobs[0].token_id == output.token_ids[0] == output.logprobs[0].top[0][0]
    assert output.logprobs[0].logprob < 0


def test_one_bad_row_is_its_own_error():
    """NaN logits of one sequence: its error, and the other's token."""
    driver = drive()
    seqs = [Seq([5, 6], num_prompt=2), Seq([8], num_prompt=1)]
    expected = driver.generate([[8]], 1)[0]

    def spoil(module, args, out):
        out[0, 0] = math.nan

    driver.executor._loaded.model.lm_head.register_forward_hook(spoil)
    batch, sampling = driver.pack({0: 2, 1: 1}, seqs)
    output = driver.executor.execute(batch, (), sampling)
    assert list(output.errors) == [0] and "logits" in output.errors[0]
    assert output.token_ids[1] == expected[0]


class Wrong(TorchAttention):
    name = "wrong"

    def __init__(self, spoil):
        self.spoil = spoil

    def forward(self, layer, q, k, v):
        return self.spoil(super().forward(layer, q, k, v))


@attrs.define(eq=False)
class Plugin:
    """Gives one kernel for the phases it is asked to serve."""

    kernel: object
    phases: tuple[str, ...] = ("decode", "prefill", "mixed")

    def select_kernel(self, case: AttentionCase):
        return self.kernel if case.phase in self.phases else Refusal(f"not {case.phase}")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda out: out.masked_fill(torch.arange(len(out))[:, None, None] == 1, math.nan),
            "packed token 1 is not finite",
        ),
        (lambda out: out[:, :1], r"gave \(2, 1, 16\)"),
        (lambda out: out.double(), "torch.float64"),
    ],
)
def test_full_checks_name_the_kernel(spoil, message):
    driver = drive(Plugin(Wrong(spoil)))
    with pytest.raises(PolicyError, match=f"kernel wrong, layer 0.*{message}"):
        driver.generate([[5, 6]], 1)


def test_each_phase_gets_its_kernel():
    """A decode-only kernel before the general one: both are bound, each gets the steps of its phase."""
    seen = []
    decoder = Wrong(lambda out: seen.append(len(out)) or out)
    driver = drive(Plugin(decoder, ("decode",)), TorchKernel())
    expected = drive().generate(PROMPTS, 4)
    assert driver.generate(PROMPTS, 4) == expected
    assert seen == [3, 3] * 3  # two layers, three steps of three sequences
    kernels = driver.executor.describe()["kernels"]
    assert sorted(kernels.values()) == ["torch", "torch", "wrong"]


def test_phases():
    driver = drive(num_blocks=99)
    lengths = {"decode": [1, 1], "prefill": [2, 5], "mixed": [1, 4]}
    for phase, (first, second) in lengths.items():
        seqs = [Seq([1] * first), Seq([1] * second)]
        assert phase_of(driver.pack({0: first, 1: second}, seqs)[0]) == phase


def test_no_kernel_and_no_common_layout():
    executor = make()
    executor.load()
    with pytest.raises(ConfigError, match="not decode"):
        executor.prepare(Hooks(Plugin(TorchAttention(), ())), CacheConfig())
    first, second = TorchAttention(), TorchAttention()
    second.layouts = ("layer_major",)
    assert common_layout([first, second]) == "layer_major"
    first.layouts = ("block_major",)
    with pytest.raises(ConfigError, match="no KV layout in common: torch reads block_major; torch reads layer_major"):
        common_layout([first, second])


@pytest.mark.parametrize("layout", ["block_major", "layer_major"])
def test_layouts_give_the_same_tokens(layout):
    kernel = TorchAttention()
    kernel.layouts = (layout,)
    driver = drive(Plugin(kernel))
    assert driver.executor.describe()["layout"] == layout
    assert driver.generate(PROMPTS, 6) == drive().generate(PROMPTS, 6)


def test_linears_are_named_and_may_not_lose_attention():
    class Loses(Hooks):
        def prepare_model(self, model):
            return torch.nn.Linear(1, 1), "lost"

    executor = make()
    executor.load()
    with pytest.raises(PolicyError, match="lost attention layers"):
        executor.prepare(Loses(TorchKernel()), CacheConfig())
    model = object()
    assert TorchLinears().prepare_model(model) == (model, "linears: torch.nn.Linear, unchanged")


def test_fit_blocks_explains_itself():
    executor = make()
    executor.load()
    executor.prepare(Hooks(TorchKernel()), CacheConfig())
    count = executor.fit_blocks(CacheConfig(swap_gb=0), 128, 4, 128)
    assert count == 4 * 8
    assert executor.describe()["kv_pool"] == executor.fit_line
    assert "32 blocks of 16 = 512 tokens" in executor.fit_line and "4 sequences of 128 tokens" in executor.fit_line


@pytest.fixture
def alone(monkeypatch):
    """As if no other process ran: other tests do."""
    monkeypatch.setattr(calibration.Company, "share", lambda self: 0.0)


def test_costs_measured_in_company_are_used_but_not_kept(monkeypatch, caplog):
    monkeypatch.setattr(calibration.Company, "share", lambda self: 0.4)
    found = [calibration.Calibration(link_bytes_per_s=n, prefill_flop_per_s=3.0) for n in (2.0, 5.0)]
    assert [calibration.recorded({"a": 1}, lambda n=n: n) for n in found] == found
    assert "other processes used 40 % of the processors: not kept" in caplog.text


def test_costs_are_measured_once(monkeypatch, alone):
    executor = drive().executor
    first = executor.measure_cost()
    assert all(value > 0 for value in first)
    kept = list((cache_dir() / "cost").iterdir())
    assert len(kept) == 1 and json.loads(kept[0].read_text())["key"]["threads"] == 1

    def never(*args):
        raise AssertionError("measured again")

    monkeypatch.setattr(TorchExecutor, "_measure", never)
    assert executor.measure_cost() == first
    other = drive().executor
    assert other.measure_cost() == first
    with pytest.raises(AssertionError, match="measured again"):
        drive(block_size=8).executor.measure_cost()
    other._linears = "linears: of another kind"
    with pytest.raises(AssertionError, match="measured again"):
        other.measure_cost()


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"measured": {"link_bytes_per_s": -1.0, "prefill_flop_per_s": 1.0}}']
)
def test_a_damaged_cost_file_is_measured_again(content, caplog, alone):
    key = {"a": 1}
    found = calibration.Calibration(link_bytes_per_s=2.0, prefill_flop_per_s=3.0)
    assert calibration.recorded(key, lambda: found) == found
    path = next((cache_dir() / "cost").iterdir())
    path.write_text(content)
    other = attrs.evolve(found, link_bytes_per_s=5.0)
    assert calibration.recorded(key, lambda: other) == other
    assert "measuring again" in caplog.text
    assert calibration.recorded(key, lambda: found) == other


def test_costs_without_a_place_to_keep_them(monkeypatch, tmp_path, caplog, alone):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    found = calibration.Calibration(link_bytes_per_s=2.0, prefill_flop_per_s=3.0)
    assert calibration.recorded({}, lambda: found) == found
    assert "cannot keep" in caplog.text


def test_warm_up_and_costs_leave_no_trace():
    """With checks=full the pool is NaN again, so the next request cannot live on what warm-up wrote."""
    driver = drive()
    driver.executor.measure_cost()
    driver.executor.warm_up()
    assert driver.executor._cache.pool.isnan().all()
    assert driver.generate(PROMPTS, 5) == drive().generate(PROMPTS, 5)


def test_a_pool_smaller_than_the_warm_up_prompt():
    driver = drive(block_size=2, num_blocks=3)
    driver.executor.warm_up()
    driver.executor.measure_cost()


def test_clock():
    executor = make()
    start = executor.now()
    executor.wait_until(start + 0.02)
    assert 0.02 <= executor.now() - start < 2
    executor.wait_until(start)
    assert abs(executor.now() - time.monotonic()) < 1


def test_describe():
    driver = drive()
    said = driver.executor.describe()
    assert (said["device"], said["dtype"], said["kv_dtype"], said["threads"]) == ("cpu", "float32", "float32", 1)
    assert said["torch"] == torch.__version__
    assert list(said["kernels"]) == [
        f"{phase}, float32, head_dim 16, group 2, block 16, cpu" for phase in ("decode", "prefill", "mixed")
    ]
    json.dumps(said)


@pytest.mark.parametrize(
    "changes", [{"device": "tpu"}, {"num_threads": 0}, {"checks": "some"}, {"num_threads": "2"}, {"device": "cuda:x"}]
)
def test_bad_fields_are_refused(changes):
    with pytest.raises((ValueError, TypeError), match=next(iter(changes))):
        make(**changes)


@pytest.mark.parametrize(("field", "value"), [("dtype", "float8"), ("dtype", "nn"), ("device", "cuda:99")])
def test_bad_choices_are_refused_at_load(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        make(**{field: value}).load()


def test_kv_dtype_must_be_read_by_a_kernel():
    with pytest.raises(ConfigError, match="kv_dtype=int8"):
        drive(kv_dtype="int8")


def test_auto_device():
    assert pick_device("auto").type in ("cpu", "cuda")
    assert pick_device("cpu") == torch.device("cpu")


def test_threads_default_to_what_the_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    make(num_threads=None).load()
    assert torch.get_num_threads() == 3


def test_close_twice_frees_the_model():
    driver = drive()
    driver.executor.close()
    driver.executor.close()
    assert driver.executor._loaded is driver.executor._cache is None


def test_steps_leave_no_graph_and_no_state():
    driver = drive()
    before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_rng_state().sum()
    driver.generate(PROMPTS, 3)
    assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_rng_state().sum()) == before


def test_packed_positions_may_be_anything_int32():
    """Index arrays arrive as int32 views into larger buffers, as the engine packs them."""
    driver = drive()
    seqs = [Seq([5, 6, 7], num_prompt=3)]
    batch, sampling = driver.pack({0: 3}, seqs)
    expected = driver.executor.execute(batch, (), sampling).token_ids
    padded = {
        name: np.concatenate([getattr(batch, name), [99]]).astype(np.int32)[:-1] for name in ("token_ids", "positions")
    }
    assert driver.executor.execute(attrs.evolve(batch, **padded), (), sampling).token_ids == expected
