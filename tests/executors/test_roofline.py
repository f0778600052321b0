"""executor=roofline: a clock that moves by arithmetic alone, tokens that end where the workload says, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.arithmetic import Machine, StepModel, Work, decode_step_s, prefill_s
from core.batch import BatchBuilder, Run, sampling_batch
from core.blocks import BlockPool
from core.config import compose
from core.executors.roofline import RooflineExecutor, made_up_token
from core.frontends.replay import ReplayFrontend
from core.results import write_result
from core.sources import SmolLM2, Tiny
from core.start import start
from core.state import Sequence
from core.types import CacheConfig, ConfigError, Limits, Move, Request, SamplingParams
from core.workloads.synthetic import Synthetic

BASE = [
    "executor=roofline",
    "model=llama2-7b",
    "cache.memory_fraction=0.95",
    "max_num_seqs=512",
    "max_num_batched_tokens=2048",
]
H100 = {"memory_gb": 80.0, "bandwidth_bytes_per_s": 3.35e12, "flop_per_s": 989e12, "link_bytes_per_s": 64e9}


def engine_of(*overrides: str) -> Any:
    return start(compose([*BASE, *overrides]), say=lambda line: None).engine


def replay(folder: Path, *overrides: str, **workload: Any) -> dict[str, Any]:
    started = start(compose([*BASE, *overrides]), say=lambda line: None)
    record = ReplayFrontend(Synthetic(**workload), progress=False).run(started)
    started.engine.close()
    write_result(record, folder)
    return record


def executor_of(machine: Machine, model: Any = None, block_size: int = 16) -> RooflineExecutor:
    executor = RooflineExecutor(model=model or SmolLM2(), machine=machine)
    executor.load()
    executor.prepare(None, CacheConfig(block_size=block_size))  # type: ignore[arg-type]
    return executor


def run_of(
    row: int, start: int, end: int, known: int, *, n: int = 1, recorded: int | None = None, seed: int = 5
) -> Run:
    params = SamplingParams(max_tokens=8, n=n)
    request = Request(
        id=row, prompt_token_ids=tuple(range(known)), params=params, arrival_s=0.0, recorded_output_tokens=recorded
    )
    seq = Sequence(request, params, seed, BlockPool(0, 16), id=row)
    seq.row, seq.table = row, list(range(8))
    return Run(seq, start, end)


def test_it_serves_with_torch_and_transformers_blocked() -> None:
    """The import of torch is made to fail, in a fresh process: nothing on the way may need it."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'safetensors'): sys.modules[name] = None\n"
        "from core.serve import main\n"
        "sys.exit(main(['executor=roofline', 'model=llama2-7b', 'frontend=replay', 'frontend.progress=false',"
        " 'workload.num_requests=3', 'hydra.run.dir=.', 'hydra.output_subdir=null', 'hydra/job_logging=disabled']))\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={"PYTHONPATH": root, "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((Path(folder) / "result.json").read_text())["requests"]["finished"] == 3


def test_two_runs_with_one_seed_give_byte_identical_files_but_for_host_time(tmp_path: Path) -> None:
    lengths = {"kind": "lognormal", "median": 200, "sigma": 0.8, "max": 2000}
    options: dict[str, Any] = {
        "num_requests": 60,
        "prompt_tokens": lengths,
        "output_tokens": {"kind": "uniform", "low": 1, "high": 300},
        "arrivals": {"kind": "gamma", "rate_per_s": 150.0, "cv": 2.0},
    }
    small = ["cache.num_blocks=300", "max_model_len=4000", "scheduler.watermark=0"]
    texts = []
    for run in ("a", "b"):
        record = replay(tmp_path / run, *small, **options)
        assert sum(record["preemptions"].values()) > 0, "the run must be one in which something happens"
        del record["stage_seconds"]  # the one key that holds host time
        texts.append(write_result(record, tmp_path / run).read_bytes())
    assert texts[0] == texts[1]


def test_a_decode_step_takes_what_the_bare_arithmetic_says_when_bandwidth_decides() -> None:
    """8 sequences of 640 tokens on an H100: every phase is bound by bytes, so phases add up to bytes / bandwidth."""
    model = compose([*BASE]).model
    from core.config import instantiate

    shape = instantiate(model, "model").shape()
    machine = Machine(name="h100", **H100)
    work = Work()
    for _ in range(8):
        work.add(639, 640, sampled=True)
    unread = shape.embedding_parameters * shape.dtype_bytes  # of the embedding a step reads single rows
    expected = decode_step_s(shape, machine, 8, 640) - unread / machine.bandwidth_bytes_per_s
    assert StepModel(shape, machine).seconds(work) == pytest.approx(expected, rel=1e-12)


def test_a_4k_prefill_takes_129_ms_in_one_piece_and_about_that_in_chunks() -> None:
    from core.config import instantiate

    shape = instantiate(compose([*BASE]).model, "model").shape()
    machine = Machine(name="h100", **H100)
    steps = StepModel(shape, machine)
    whole, chunked = Work(), 0.0
    whole.add(0, 4096, sampled=True)
    for begin in range(0, 4096, 512):
        part = Work()
        part.add(begin, begin + 512, sampled=begin == 3584)
        chunked += steps.seconds(part)
    assert prefill_s(shape, machine, 4096) == pytest.approx(129.4e-3, rel=1e-3)
    assert steps.seconds(whole) == pytest.approx(
        prefill_s(shape, machine, 4096), rel=0.05
    )  # one row of logits, not 4096
    assert chunked == pytest.approx(steps.seconds(whole), rel=1e-3)


def test_moves_take_their_time_on_the_link_and_on_the_device() -> None:
    machine = Machine(name="m", **{**H100, "link_bytes_per_s": 1e9, "bandwidth_bytes_per_s": 1e10}, move_overhead_s=0.5)
    executor = executor_of(machine)
    block = 16 * executor.load().kv_bytes_per_token
    before = executor.now()
    executor.execute_runs([], [Move("swap_out", 0, 0), Move("swap_in", 0, 1), Move("copy", 1, 2)])
    assert executor.now() - before == pytest.approx(2 * block / 1e9 + 2 * block / 1e10 + 3 * 0.5, rel=1e-12)
    assert executor.simulated()["move"] == pytest.approx(executor.now())


def test_several_cards_share_bytes_and_flop_and_pay_for_all_reduces() -> None:
    one, four = Tiny().shape(), None
    import attrs

    four = attrs.evolve(one, cards=4)
    machine = Machine(
        name="m", **{**H100, "bandwidth_bytes_per_s": 1e6}, card_link_bytes_per_s=1e6, card_latency_s=0.25
    )
    work = Work()
    work.add(9, 10, sampled=True)
    alone, together = StepModel(one, machine).phases(work), StepModel(four, machine).phases(work)
    assert together.linear == pytest.approx(alone.linear / 4) and together.head == pytest.approx(alone.head / 4)
    reduced = 2 * one.num_layers * (2 * 3 / 4 * one.hidden_size * one.dtype_bytes / 1e6 + 0.25)
    assert (alone.cards, together.cards) == (0.0, pytest.approx(reduced))


def test_runs_and_packed_arrays_give_the_same_tokens_and_the_same_time() -> None:
    """The engine hands over runs; ``execute`` is the same from arrays. A fork, a chunk without a sample, a recorded end."""
    runs = [run_of(0, 9, 10, 10, n=3), run_of(1, 0, 6, 20), run_of(2, 19, 20, 20, recorded=1), run_of(3, 0, 5, 5)]
    limits = Limits(
        block_size=16, num_blocks=64, num_swap_blocks=0, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64
    )
    batch, sampling = BatchBuilder(limits).pack(runs), sampling_batch(runs)
    first, second = (
        executor_of(Machine(name="m", **H100, step_overhead_s=1.0, sequence_overhead_s=0.1)) for _ in range(2)
    )
    by_runs, by_arrays = first.execute_runs(runs, []), second.execute(batch, [], sampling)
    assert list(by_runs.token_ids) == list(by_arrays.token_ids) and len(by_runs.token_ids) == 3 + 1 + 1
    assert first.now() == second.now() > 1.4
    assert first.simulated() == second.simulated()


def test_an_answer_ends_with_eos_at_its_recorded_length_and_nowhere_before() -> None:
    tokens = [made_up_token(1000, 257, 12345, 0, end, 10, 20) for end in range(10, 40)]
    assert [i for i, token in enumerate(tokens, 1) if token == 257] == [20]
    assert all(0 <= token < 1000 for token in tokens)
    engine = engine_of("cache.num_blocks=64", "max_model_len=512")
    engine.submit(range(1, 9), SamplingParams(max_tokens=100, detokenize=False), recorded_output_tokens=7)
    outputs = [out for _ in iter(engine.has_work, False) for out in engine.step().outputs]
    assert (len(outputs), outputs[-1].finish_reason) == (7, "stop")
    engine.submit(
        range(1, 9), SamplingParams(max_tokens=9, ignore_eos=True, detokenize=False), recorded_output_tokens=7
    )
    outputs = [out for _ in iter(engine.has_work, False) for out in engine.step().outputs]
    assert (len(outputs), outputs[-1].finish_reason) == (9, "length")


def test_the_pool_is_what_the_weights_leave_of_the_machines_memory() -> None:
    engine = engine_of()
    budget = 0.95 * 80e9 - 2 * 6.74e9
    assert engine.limits.num_blocks == int(budget // (16 * 2 * 32 * 32 * 128 * 2)) == 7452
    assert engine.limits.num_blocks // 256 == 29  # slots of 4,096 tokens
    assert engine.cost.link_bytes_per_s == 64e9 and engine.cost.prefill_flop_per_s == pytest.approx(494.5e12)


def test_a_model_that_leaves_no_room_is_refused_with_the_sums() -> None:
    with pytest.raises(
        ConfigError, match=r"no room for KV on h100: 0.95 x 80 GB - 141.11 GB of weights = -65.11 GB.*more cards"
    ):
        engine_of("model=llama3-70b", "model.cards=1")
    assert engine_of("model=llama3-70b").limits.num_blocks > 0


def test_a_slot_of_131072_tokens_does_not_fit_an_h100_with_mha_and_three_do_with_gqa_8() -> None:
    """The longest context, reserved whole: refused with the reason under MHA, three slots under GQA-8."""
    with pytest.raises(ConfigError, match=r"max_model_len=131072: the pool has 7452 blocks of 16 = 119232 tokens"):
        engine_of("model.max_position=131072", "max_model_len=131072")
    grouped = engine_of("model=llama2-7b-gqa8", "model.max_position=131072", "max_model_len=131072")
    assert grouped.limits.num_blocks * 16 // 131072 == 3


def test_only_the_engines_hold_on_the_clock_moves_it() -> None:
    executor = executor_of(Machine(name="m", **H100))
    assert executor.now() == 0.0
    executor.wait_until(3.5)
    executor.wait_until(1.0)
    assert executor.now() == 3.5


def test_the_described_default_model_is_the_converted_one() -> None:
    """The shapes written down in core/sources.py against the folder that was converted, where it is there."""
    from core.fetch import model_dir
    from core.shapes import shape_from_folder

    if not (model_dir() / "config.json").exists():
        pytest.skip("the default model has not been fetched on this machine")
    assert shape_from_folder(model_dir(), SmolLM2().name, "bfloat16") == SmolLM2().shape()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "has experts"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "compressed KV"),
        ({"model_type": "x", "hidden_size": 8}, "none of num_hidden_layers"),
    ],
)
def test_a_config_that_cannot_be_described_is_refused_with_the_reason(
    tmp_path: Path, raw: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        engine_of("model=path", f"model.path={tmp_path / 'config.json'}")


def test_any_transformers_config_by_itself_is_a_model(tmp_path: Path) -> None:
    """GPT-2's names for the same things; its two-matrix feed-forward part and tied head: 124 M weights, less biases."""
    raw = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    (tmp_path / "gpt2.json").write_text(json.dumps(raw))
    engine = engine_of("model=path", f"model.path={tmp_path / 'gpt2.json'}")
    positions = 1024 * 768
    assert engine.model.num_parameters == pytest.approx(124.4e6 - positions, rel=2e-3)
    assert engine.limits.max_model_len == 1024


def test_random_ids_spread_over_the_vocabulary() -> None:
    ids = [made_up_token(32000, 257, seed, 0, end, 0, None) for seed in (1, 10**15) for end in range(1, 2000)]
    counts, _ = np.histogram(ids, bins=8, range=(0, 32000))
    assert counts.min() > 0.8 * counts.max()


def in_steady_state(allocator: str, begin_s: float, end_s: float) -> tuple[float, int]:
    """experiment=chat with 300 requests always in flight: mean of running sequences over time, and the peak."""
    engine = start(compose(["experiment=chat", f"allocator={allocator}"]), say=lambda line: None).engine
    params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True, detokenize=False)
    in_flight, area, span, peak = 0, 0.0, 0.0, 0
    while engine.executor.now() < end_s:
        for _ in range(300 - in_flight):
            engine.submit(range(1, 513), params)
        report = engine.step()
        in_flight = 300 - len(report.finished)
        held = report.num_running + len(report.finished)
        peak = max(peak, held)
        if report.started_s > begin_s:
            area += held * (report.ended_s - report.started_s)
            span += report.ended_s - report.started_s
    return area / span, peak


def test_naive_never_holds_more_than_29_chats_on_an_h100() -> None:
    mean, peak = in_steady_state("naive", 1.0, 4.0)
    assert peak == 29 and mean > 28


def test_paged_holds_what_arithmetic_says_of_growing_sequences_within_5_percent() -> None:
    """A sequence holds ceil((512 + i) / 16) blocks while it decodes token i of 128: 36.5 in the mean, and the pool has 7,452."""
    mean_blocks = sum(-(-(512 + i) // 16) for i in range(1, 129)) / 128
    mean, peak = in_steady_state("paged", 12.0, 32.0)
    assert mean == pytest.approx(7452 / mean_blocks, rel=0.05)  # 204; the watermark and prompts under way take the rest
    assert peak > mean + 5


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in (Path(__file__).parents[2] / "conf" / "experiment").glob("*.yaml"))
)
def test_every_experiment_composes_and_has_its_page(name: str) -> None:
    config = compose([f"experiment={name}"])
    assert config.choices["executor"] == "roofline" and config.choices["frontend"] == "replay"
    page = Path(__file__).parents[2] / "docs" / "experiments" / f"{name}.md"
    assert f"experiment={name}" in page.read_text()
