"""Real steps of ``executor=torch``, timed: what ``python -m core.calibrate`` fits a machine to.

Batches are made as the engine makes them (core/batch.py), of sequences that exist for this only; what their KV holds does
not matter for time. Everything is measured round by round, so that a slow minute hits every point alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch

from core.arithmetic import Work
from core.batch import BatchBuilder, Run, sampling_batch
from core.blocks import BlockPool
from core.engine import Engine
from core.executors.calibration import best_of
from core.fit import Point
from core.kernel import AttendsInOne
from core.model import connect
from core.state import Sequence as EngineSequence
from core.types import Limits, Request, SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
READ_BYTES = 256 * 2**20  # more than any cache keeps
FOLLOWS_ITSELF = 32
"""Steps of at most so many tokens run twice, and the second counts: decodes follow one another, and find caches as they left them."""
Parts = Sequence[tuple[int, int]]


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of reading memory: the sum of a large tensor, the fastest of five."""
    data = torch.arange(READ_BYTES // 4, dtype=torch.float32, device=device)  # some hosts keep equal pages once
    return READ_BYTES / best_of(5, data.sum, device)


def matmul_rate(shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of plain matrix products of the model's own shapes (in, out), ``rows`` tokens: the ceiling for its linear layers."""
    pairs = [
        (torch.ones(rows, i, dtype=dtype, device=device), torch.ones(i, o, dtype=dtype, device=device))
        for i, o in shapes
    ]
    flop = sum(2 * rows * i * o for i, o in shapes)
    return flop / best_of(5, lambda: [a @ b for a, b in pairs], device)


Made = tuple[Work, Callable[[], Any], list[float]]  # what a step computes, a call that runs it, its seconds so far


class Stepper:
    """Single steps on a started engine's executor, of given compositions: ``alone`` without attention, and one token of which
    none is sampled; ``whole`` as they are.
    """

    def __init__(self, engine: Engine, alone: Sequence[Parts], whole: Sequence[Parts]):
        self.executor: Any = engine.executor
        self.limits, self.vocab = engine.limits, engine.model.vocab_size
        self._rng = np.random.default_rng(0)
        self._alone: list[Any]
        self._whole: list[Any]
        self._alone, self._whole = ([(*self.step(parts), []) for parts in kinds] for kinds in (alone, whole))
        self._alone.append((*self.step([(0, 1)], sampled=False), []))

    def step(self, parts: Parts, sampled: bool = True) -> tuple[Work, Callable[[], Any]]:
        """A step in which one sequence each computes its tokens start .. end, and a call that runs it. The blocks are scattered.

        ``sampled``: each sequence has no token behind ``end``, so that one is drawn for it.
        """
        size = self.limits.block_size
        builder = BatchBuilder(self._roomy(parts))
        free = self._rng.permutation(self.limits.num_blocks).tolist()
        pool, work, runs = BlockPool(0, size), Work(), []
        for row, (start, end) in enumerate(parts):
            tokens = tuple(self._rng.integers(0, self.vocab, end if sampled else end + 1).tolist())
            request = Request(id=row, prompt_token_ids=tokens, params=GREEDY, arrival_s=0.0)
            seq = EngineSequence(request, GREEDY, seed=0, pool=pool, id=row)
            seq.row = row
            seq.table = [free.pop() for _ in range(-(-end // size))]
            builder.set_row(row, seq.table)
            runs.append(Run(seq, start, end))
            work.add(start, end, sampled)
        batch, sampling = builder.pack(runs), sampling_batch(runs)
        return work, lambda: self.executor.execute(batch, (), sampling)

    def _roomy(self, parts: Sequence[tuple[int, int]]) -> Limits:
        size = self.limits.block_size
        longest = max(end for _, end in parts)
        return Limits(
            block_size=size,
            num_blocks=self.limits.num_blocks,
            num_swap_blocks=0,
            max_model_len=-(-longest // size) * size,
            max_num_seqs=len(parts),
            max_num_batched_tokens=sum(end - start for start, end in parts),
        )

    def round(self, counts: bool) -> None:
        """Every kind of step once, those without attention first; ``counts``: its seconds are kept.

        Both sorts run in every round: a slow minute of the machine hits them alike.
        """
        with self.without_attention():
            self._run(self._alone, counts)
        self._run(self._whole, counts)

    def points(self) -> tuple[list[Point], list[Point]]:
        """Median seconds of each kind of step: of those without attention, and of the whole ones."""
        return self._medians(self._alone), self._medians(self._whole)

    @staticmethod
    def _medians(made: Sequence[Made]) -> list[Point]:
        return [Point(work, statistics.median(seconds)) for work, _, seconds in made]

    @staticmethod
    def _run(made: Sequence[Made], counts: bool) -> None:
        for work, run, seconds in made:
            if work.tokens <= FOLLOWS_ITSELF:
                run()
            started = time.perf_counter()
            run()  # ends with the sampled tokens on the host, so the device is done
            if counts:
                seconds.append(time.perf_counter() - started)

    @contextmanager
    def without_attention(self) -> Iterator[None]:
        """Attention answers with its queries, at once: what is left of a step is its linear layers and what goes with them."""
        model, router = self.executor._need_model().model, self.executor._router
        connect(model, _NoAttention(router))
        try:
            yield
        finally:
            connect(model, router)


class _NoAttention:
    """In the router's place: nothing attends, whether layers are called one by one or all at once."""

    def __init__(self, router: Any):
        self._router = router

    @property
    def only(self) -> _Idle | None:
        kernel = self._router.only
        return _Idle(kernel) if isinstance(kernel, AttendsInOne) else None

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q


@attrs.frozen
class _Idle:
    _kernel: AttendsInOne
    padded: bool = True

    def layer_arguments(self, attend: bool = True) -> tuple[Any, ...]:
        return self._kernel.layer_arguments(attend=False)


class _Timed:
    """An executor, and the seconds its ``execute`` took."""

    def __init__(self, executor: Any):
        self._executor, self.seconds = executor, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, *args: Any) -> Any:
        started = time.perf_counter()
        output = self._executor.execute(*args)
        self.seconds += time.perf_counter() - started
        return output


def host_seconds(engine: Engine, num_running: int, num_steps: int) -> float:
    """Median seconds of an engine's decode step outside the executor, with so many sequences running."""
    executor = engine.executor
    timed = _Timed(executor)
    engine.executor = timed
    try:
        params = SamplingParams(max_tokens=num_steps + 4, temperature=0.0, ignore_eos=True, detokenize=False)
        for _ in range(num_running):
            engine.submit(range(2, 6), params)
        found = []
        while engine.has_work():
            timed.seconds, started = 0.0, time.perf_counter()
            report = engine.step()
            if report.num_sampled == num_running and not report.finished:
                found.append(time.perf_counter() - started - timed.seconds)
        return statistics.median(found)
    finally:
        engine.executor = executor
