"""Engines on the toy model, made by hand: small pools, any plugins, checks=full. Shared by the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from core.blocks import BlockPool
from core.cost import CostModel
from core.edge import Edge
from core.engine import Engine
from core.executors.toy import ToyExecutor
from core.levels import ServiceLevels
from core.metrics import Metrics
from core.plugins import Chosen, EngineHooks
from core.types import EngineInfo, Limits, Output, SamplingParams, StepReport
from plugins.allocators.paged import PagedAllocator
from plugins.allocators.prefix import PrefixAllocator
from plugins.preemption.recompute import Recompute
from plugins.schedulers.chunked import ChunkedScheduler

VOCAB = 320
STEP_CAP = 3000


def chosen(kind: str, plugin: Any) -> Chosen:
    return Chosen(
        kind, type(plugin).__name__.lower(), plugin, "tests", "0", f"{type(plugin).__module__}.{type(plugin).__name__}"
    )


@attrs.define
class Work:
    """One request of a test."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    salt: str = ""
    recorded: int | None = None
    beams: int | None = None
    length_penalty: float = 1.0
    arrives: int = 0  # step before which it is submitted
    aborts: int | None = None  # step before which it is aborted
    labels: dict[str, Any] = attrs.field(factory=dict)  # further fields of Request
    sampling: dict[str, Any] = attrs.field(factory=dict)  # further fields of SamplingParams

    def params(self) -> SamplingParams:
        fields = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.n,
            "stop": self.stop,
            "detokenize": bool(self.stop),
            "beam_width": self.beams,
            "length_penalty": self.length_penalty,
        }
        return SamplingParams(**{**fields, **self.sampling})


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    num_swap_blocks: int = 64,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int | None = None,
    allocator: Any = None,
    scheduler: Any = None,
    preemption: Any = None,
    observers: Sequence[Any] = (),
    policies: Sequence[Chosen] = (),  # of further kinds: chosen("predictor", ...)
    max_queue: int | None = None,
    levels: ServiceLevels | None = None,
    executor: ToyExecutor | None = None,
    link_bytes_per_s: float = 1e6,
    prefill_flop_per_s: float = 1e10,
    checks: str = "full",
    seed: int = 0,
) -> Engine:
    executor = executor or ToyExecutor(vocab_size=VOCAB, step_seconds=1.0)
    model = executor.load()
    limits = Limits(
        block_size=block_size,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_model_len=max_model_len or min(model.max_position, num_blocks * block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_queue=max_queue,
    )
    hooks = EngineHooks(
        [
            chosen("allocator", allocator or PagedAllocator()),
            chosen("scheduler", scheduler or ChunkedScheduler()),
            chosen("preemption", preemption or Recompute()),
            *policies,
            *(chosen("observers", o) for o in observers),
        ]
    )
    executor.allocate(limits)
    pool = BlockPool(num_blocks, block_size)
    cost = CostModel.of(model, link_bytes_per_s, prefill_flop_per_s)
    engine = Engine(
        executor=executor, hooks=hooks, limits=limits, model=model, cost=cost, pool=pool,
        edge=Edge(model, limits, executor.tokenizer, levels), metrics=Metrics(), tokenizer=executor.tokenizer, checks=checks, seed=seed,
    )  # fmt: skip
    hooks.setup(EngineInfo(limits=limits, model=model, pool=pool, cost=cost, seed=seed, swap=engine.state.swap))
    return engine


def check_cache(engine: Engine) -> None:
    """Each block that the prefix allocator could find holds what its key says, in place, and no other is kept."""
    allocator = engine.hooks.chosen[0].plugin
    if not isinstance(allocator, PrefixAllocator):
        return
    executor, found = engine.executor, {"device": set(), "host": set()}
    slots = {"device": executor._slots, "host": executor._host}
    for where, block, start, tokens in allocator.cached_blocks():
        written = [token + (start + i << 20) for i, token in enumerate(tokens)]
        assert slots[where][block].tolist() == written, f"{where} block {block} does not hold what its key says"
        assert block not in found[where], f"{where} block {block} stands for two contents"
        found[where].add(block)
    assert found["device"] == set(engine.pool.kept) and found["host"] == set(engine.state.swap.kept)
    engine.state.swap.check()


class Result:
    """What the requests of a run got, branch by branch, and what the engine did."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.text: dict[tuple[int, int], str] = {}
        self.reason: dict[tuple[int, int], str] = {}
        self.error: dict[tuple[int, int], str | None] = {}
        self.last: dict[tuple[int, int], Output] = {}
        self.reports: list[StepReport] = []

    def take(self, index: dict[int, int], report: StepReport) -> None:
        self.reports.append(report)
        for out in report.outputs:
            key = (index[out.request_id], out.branch)
            assert key not in self.reason, f"{key} got an output after it had finished"
            self.tokens.setdefault(key, []).extend(out.token_ids)
            self.text[key] = self.text.get(key, "") + out.text
            self.last[key] = out
            if out.finish_reason is not None:
                self.reason[key], self.error[key] = out.finish_reason, out.error

    def preemptions(self, kind: str) -> int:
        return sum(1 for r in self.reports for p in r.preempted if p.kind == kind)


def run(
    engine: Engine, work: Sequence[Work], step_cap: int = STEP_CAP, after_step: Callable[[Engine], None] | None = None
) -> Result:
    """Serve ``work`` to the end; every step with work must compute something, and nothing may be left afterwards."""
    result, index = Result(), {}
    pending = sorted(range(len(work)), key=lambda i: work[i].arrives)
    ids: dict[int, int] = {}
    for step in range(step_cap):
        while pending and (work[pending[0]].arrives <= step or not engine.has_work()):
            i = pending.pop(0)
            ids[i] = engine.submit(
                work[i].prompt,
                work[i].params(),
                **{"cache_salt": work[i].salt, "recorded_output_tokens": work[i].recorded, **work[i].labels},
            )
            index[ids[i]] = i
        for i, request_id in ids.items():
            if work[i].aborts == step:
                engine.abort(request_id)
        if not engine.has_work() and not pending:
            engine.assert_idle()
            return result
        report = engine.step()
        result.take(index, report)
        if after_step is not None:
            after_step(engine)
        ended = any(o.finish_reason in ("refused", "abort", "error") for o in report.outputs)
        assert report.num_tokens or ended or not engine.state.sequences, f"step {step} with work computed nothing"
    raise AssertionError(f"not idle after {step_cap} steps: {engine.stats()}")


def alone(work: Work, **options: Any) -> list[list[int]]:
    """The tokens of each branch when the request is served by itself on a big pool, without chunking."""
    engine = make_engine(num_blocks=512, max_num_batched_tokens=4096, max_num_seqs=32, max_model_len=1024, **options)
    result = run(engine, [attrs.evolve(work, arrives=0, aborts=None)])
    return [result.tokens[(0, branch)] for branch in range(work.n)]
