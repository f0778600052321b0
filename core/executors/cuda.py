"""A step on a GPU: one copy of the inputs to the device, the forward pass (a CUDA graph where the step is decode), sampling
there, and one copy back, which is the only wait.

Decode steps are padded to one of a few sizes and replayed from a graph: launching the few hundred small kernels of a small
model one by one costs more than they take. A padding row has slot -1 and length 0: nothing is written for it and nothing
read. Inputs lie at fixed addresses, which graphs and eager steps share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import numpy as np
import torch

from core.cache import KVCache
from core.executors.router import Router
from core.executors.sampling import DeviceSampler
from core.kernel import CopiesBlocks
from core.model import packed_logits
from core.types import Batch, Limits, Move, SamplingBatch, StepOutput

MOST_ROWS = 256
"""Largest batch that is captured. Above, a step takes long enough to hide its launches."""

COPIER_BYTES = 2**20
"""Blocks up to this size are moved by the kernel's ``copy_blocks``, all in one launch; larger ones by the copy engine, one
call of a few microseconds each, which leaves the multiprocessors free.
"""

PER_TOKEN = ("token_ids", "positions", "slot_mapping")
PER_SEQUENCE = ("query_start", "kv_lens", "logit_tokens")
ALIGNED = 16  # int32s: an address that a compiled kernel may rely on

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what to run, gives what runs it again."""


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture, up to ``most`` sequences: at most 7 rows of padding, or a quarter of the batch if that is more."""
    most = min(most, MOST_ROWS)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, MOST_ROWS + 1, 32)]
    return sorted({size for size in steps if size < most} | {most})


def padded(batch: Batch, rows: int) -> Batch:
    """A decode batch with padding rows up to ``rows`` sequences: slot -1, length 0, one token each; logits of every row.

    Its block table keeps the batch's rows only: those of padding rows are never read.
    """
    extra = rows - batch.num_sequences
    zeros = np.zeros(extra, np.int32)
    return attrs.evolve(
        batch,
        token_ids=np.concatenate([batch.token_ids, zeros]),
        positions=np.concatenate([batch.positions, zeros]),
        slot_mapping=np.concatenate([batch.slot_mapping, zeros - 1]),
        query_start=np.arange(rows + 1, dtype=np.int32),
        kv_lens=np.concatenate([batch.kv_lens, zeros]),
        logit_tokens=np.arange(rows, dtype=np.int32),
    )


def nothing(limits: Limits) -> Batch:
    """A decode batch of no sequence: padding alone leaves no trace in the cache. Lengths may be up to ``max_model_len``."""
    none = np.zeros(0, np.int32)
    return Batch(
        token_ids=none,
        positions=none,
        slot_mapping=none,
        query_start=np.zeros(1, np.int32),
        kv_lens=none,
        block_tables=np.zeros((0, 1), np.int32),
        logit_tokens=none,
        sequence_ids=(),
        block_size=limits.block_size,
        max_query_len=1,
        max_kv_len=limits.max_model_len,
    )


class Inputs:
    """A batch's arrays on the device, always at the same addresses, sent as one copy from pinned memory.

    Each array has its fixed place; the block table comes last, packed, and is spread to rows of a fixed width on the device
    (``wide``), which a captured graph needs.
    """

    def __init__(self, limits: Limits, device: torch.device):
        seqs = limits.max_num_seqs
        tokens = max(limits.max_num_batched_tokens, seqs)
        self.width = -(-limits.max_model_len // limits.block_size)
        self.starts: dict[str, int] = {}
        end = 0
        for name in (*PER_TOKEN, *PER_SEQUENCE, "block_tables"):
            self.starts[name] = end
            count = tokens if name in PER_TOKEN else seqs + 1 if name in PER_SEQUENCE else seqs * self.width
            end += -(-count // ALIGNED) * ALIGNED
        self.host = torch.zeros(end, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.staging = self.host.numpy()
        self.device = torch.zeros(end, dtype=torch.int32, device=device)
        self.tables = torch.zeros((seqs, self.width), dtype=torch.int32, device=device)

    def send(self, batch: Batch, wide: bool) -> dict[str, torch.Tensor]:
        """Queue the copy and give the device views, by the names of ``Batch``. The copy before must have ended."""
        views = {}
        for name, start in self.starts.items():
            array = getattr(batch, name)
            self.staging[start : start + array.size] = array.reshape(-1)
            views[name] = self.device[start : start + array.size].view(array.shape)
        end = self.starts["block_tables"] + batch.block_tables.size
        self.device[:end].copy_(self.host[:end], non_blocking=True)
        if wide:
            rows, width = batch.block_tables.shape
            self.tables[:rows, :width].copy_(views["block_tables"])
            views["block_tables"] = self.tables[: batch.num_sequences]
        return views


def capture_cuda(run: Callable[[], None]) -> Callable[[], None]:
    """Run twice outside, so that everything is compiled and every buffer is there, then capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class DeviceStep:
    """Executes steps of one engine on one device; on a CPU only in tests, where ``capture`` stands in for a graph."""

    def __init__(
        self,
        model: Any,
        router: Router,
        cache: KVCache,
        limits: Limits,
        device: torch.device,
        graphs: bool,
        capture: Capture = capture_cuda,
    ):
        self.model, self.router, self.cache, self.limits, self.device = model, router, cache, limits, device
        self.capture, self.inputs, self.sampler = capture, Inputs(limits, device), DeviceSampler(device)
        decode = router.table["decode"]
        others = sorted({kernel.name for kernel in decode if not kernel.graph_safe})
        self.why_not = "executor.graphs or checks" if not graphs else "kernel " + ", ".join(others) if others else ""
        self.sizes: list[int] = []
        self.replays: dict[int, Callable[[], None]] = {}
        self.logits: torch.Tensor | None = None  # [largest size, V], what every graph writes to
        self.copier = next((kernel for kernel in router.kernels if isinstance(kernel, CopiesBlocks)), None)
        if cache.block_bytes > COPIER_BYTES:
            self.copier = None

    def warm_up(self) -> str:
        """Capture a graph for each size, largest first, and say which there are; why not, where there are none."""
        if self.why_not:
            return f"CUDA graphs: none ({self.why_not})"
        started = time.perf_counter()
        sizes = graph_sizes(self.limits.max_num_seqs)
        try:
            with torch.inference_mode(), self._here():
                for size in reversed(sizes):
                    self._capture(size)
        except RuntimeError as error:  # what torch raises for an operation that cannot be captured, or without memory
            self.replays.clear()
            return f"CUDA graphs: none (capture failed: {str(error).splitlines()[0]})"
        self.sizes = sizes
        seconds = time.perf_counter() - started
        return f"CUDA graphs: decode steps of {', '.join(map(str, sizes))} sequences, captured in {seconds:.1f} s"

    def _capture(self, size: int) -> None:
        batch = padded(nothing(self.limits), size)
        views = self.inputs.send(batch, wide=True)

        def run() -> None:
            logits = self._forward(batch, views)
            if self.logits is None:
                self.logits = torch.empty_like(logits)
            self.logits[:size].copy_(logits)

        run()
        self.replays[size] = self.capture(run)

    def _here(self) -> Any:
        """Kernels launch on the current device, which need not be ours."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _forward(self, batch: Batch, views: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits [R, V] of the batch's ``logit_tokens``."""
        self.router.begin(batch, views)
        ids, positions, rows = (views[name].long() for name in ("token_ids", "positions", "logit_tokens"))
        return packed_logits(self.model, ids, positions, rows)

    def execute(self, batch: Batch, moves: Sequence[Move], sampling: SamplingBatch) -> StepOutput:
        """Moves in order, forward, sample. Waits once, for the tokens; ``seconds`` are the device's own."""
        with torch.inference_mode(), self._here():
            marks = [self._mark()]
            if moves:
                self.cache.run_moves(moves, self.copier)
            marks.append(self._mark())
            logits, rows = self._logits(batch, sampling.rows)
            marks.append(self._mark())
            pending = self.sampler.start(logits, rows, sampling)
            marks.append(self._mark())
            if self.device.type == "cuda":
                marks[-1].synchronize()
        token_ids, logprobs, errors = pending()
        seconds = dict(zip(("move", "forward", "sample"), map(self._between, marks, marks[1:]), strict=False))
        return StepOutput(token_ids=token_ids, seconds=seconds, logprobs=logprobs, errors=errors)

    def _logits(self, batch: Batch, rows: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        """Logits and, for each sample, its row of them: a graph computes those of every sequence."""
        count = batch.num_sequences
        if self.sizes and batch.max_query_len == 1 and count == batch.num_tokens <= self.sizes[-1]:
            size = next(size for size in self.sizes if size >= count)
            self.inputs.send(padded(batch, size), wide=True)
            self.replays[size]()
            assert self.logits is not None
            return self.logits[:size], batch.logit_tokens[np.asarray(rows, np.int64)].tolist()
        return self._forward(batch, self.inputs.send(batch, wide=False)), rows

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        """Seconds between two marks."""
        return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000
