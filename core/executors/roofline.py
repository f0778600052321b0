"""``executor=roofline``: the same core and plugins on a virtual clock; a step takes the time that core/arithmetic.py gives it.

No torch, no weights and no KV: an answer is made-up token ids, the same for the same seed, and ends where the workload
recorded its end. The clock moves by a step's moves and phases and by nothing else, so a run depends on its config alone.
It needs no index arrays, so core hands it the runs themselves (``core.executors.TakesRuns``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from core.arithmetic import Machine, Shape, StepModel, Work, budget_bytes
from core.batch import Run
from core.executors import StartHooks
from core.machines import Measured
from core.shapes import check_dtype, model_info
from core.text import ByteTokenizer
from core.types import (
    Batch,
    CacheConfig,
    ConfigError,
    Limits,
    ModelInfo,
    Move,
    SamplingBatch,
    StepOutput,
)

_NO_SECONDS: dict[str, float] = {}  # host time is core's to measure; virtual time is in ``simulated``
_BRANCH, _PLACE = 7919, 40503  # odd and not small vocabulary sizes, so that ids spread


@attrs.define(eq=False, kw_only=True)
class RooflineExecutor:
    """See the module docstring and ``core.executors.Executor``."""

    model: Any  # a source of core.sources or core.shapes, of which only shape() is used
    machine: Any  # core.arithmetic.Machine, or core.machines.Local
    dtype: str = "auto"  # auto: the model's own, or what machine=local was measured with

    uses_kernels = False
    cost_source = "machine"
    tokenizer: ByteTokenizer | None = attrs.field(default=None, init=False)
    fit_line: str = attrs.field(default="", init=False)
    _machine: Machine = attrs.field(default=None, init=False)
    _measured: Measured | None = attrs.field(default=None, init=False)
    _shape: Shape = attrs.field(default=None, init=False)
    _steps: StepModel = attrs.field(default=None, init=False)
    _block_bytes: int = attrs.field(default=0, init=False)
    _eos: int = attrs.field(default=0, init=False)
    _now: float = attrs.field(default=0.0, init=False)
    _spent: dict[str, float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        check_dtype(self.dtype)
        if not hasattr(self.model, "shape"):
            raise ConfigError(
                f"executor=roofline: {type(self.model).__name__} has no shape(), so it cannot be described"
            )
        found = self.machine.read()  # a calibration that is missing shows before anything else is done
        self._measured = found if isinstance(found, Measured) else None
        self._machine = found.machine if isinstance(found, Measured) else found
        self._spent = dict.fromkeys(("move", "linear", "attention", "head", "cards", "overhead"), 0.0)

    # -------------------------------------------------------------------------------------------- start

    def load(self) -> ModelInfo:
        """The model's facts, from its config."""
        dtype = self._measured.setup["dtype"] if self._measured is not None and self.dtype == "auto" else self.dtype
        self._shape = self.model.shape(dtype)
        info = model_info(self._shape, f"{self._machine.name}, simulated")
        self.tokenizer = ByteTokenizer(info.vocab_size) if info.vocab_size >= 258 else None
        self._eos = next(iter(info.eos_token_ids))
        return info

    def prepare(self, hooks: StartHooks, cache: CacheConfig) -> list[str]:
        """Nothing runs, so no kernel is chosen; says what is simulated, and what it was measured with."""
        self._steps = StepModel(self._shape, self._machine, cache.kv_dtype)
        self._block_bytes = self._shape.kv_bytes_per_token(cache.kv_dtype) * cache.block_size
        cards = f" x {self._shape.cards}" if self._shape.cards > 1 else ""
        lines = [f"simulated: {self._shape.name} ({self._shape.dtype}) on {self._machine.name}{cards}, virtual clock"]
        if self._measured is not None:
            setup = self._measured.setup
            kernels = ", ".join(dict.fromkeys(setup["kernels"].values()))
            lines.append(f"calibrated with kernel {kernels}; {setup['linears']}; {setup['threads']} threads")
            if setup["model"] != self._shape.name:
                lines.append(
                    f"note: calibrated with {setup['model']}, so {self._shape.name} is extrapolated from its rates"
                )
        return lines

    def fit_blocks(self, cache: CacheConfig, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """``memory_fraction`` of the machine's memory less the weights. Nothing is profiled: activations come off the rest."""
        shape, machine = self._shape, self._machine
        budget = budget_bytes(shape, machine, cache.memory_fraction)
        count = int(budget // self._block_bytes)
        memory, weights = machine.memory_gb * shape.cards, shape.weight_bytes / 1e9
        sums = f"{cache.memory_fraction:g} x {memory:g} GB - {weights:.2f} GB of weights = {budget / 1e9:.2f} GB"
        if count < 2:
            raise ConfigError(
                f"no room for KV on {machine.name}: {sums}; a block of {cache.block_size} tokens takes "
                f"{self._block_bytes / 1e6:.2f} MB (give the model more cards, or raise cache.memory_fraction)"
            )
        tokens = count * cache.block_size
        self.fit_line = (
            f"KV pool: {sums}, {count} blocks of {cache.block_size} = {tokens} tokens, "
            f"{tokens / max_model_len:.1f} sequences of {max_model_len}"
        )
        return count

    def allocate(self, limits: Limits) -> None:
        """There is no KV to keep."""

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth over all cards, for predictions of a step (core/cost.py)."""
        return self._machine.bandwidth_bytes_per_s * self._shape.cards

    def measure_cost(self) -> tuple[float, float]:
        """Link and prefill rate of the machine, over all cards."""
        cards, machine = self._shape.cards, self._machine
        return machine.link_bytes_per_s * cards, machine.prefill_rate * cards

    def warm_up(self) -> None:
        """Nothing is slow the first time."""

    # -------------------------------------------------------------------------------------------- a step

    def execute_runs(self, runs: Sequence[Run], moves: Sequence[Move]) -> StepOutput:
        """Moves and one forward pass of ``runs``, priced; a token for each sample, in ``sampling_batch``'s order."""
        tokens = decode_kv = prefill_kv = squares = 0
        drawn: list[int] = []
        vocab, eos = self._shape.vocab_size, self._eos
        for seq, start, end in runs:
            if end - start == 1:
                tokens += 1
                decode_kv += end
            else:
                tokens += end - start
                prefill_kv += end
                squares += end * end - start * start
            if end != len(seq.tokens):
                continue
            view = seq.view
            if seq.to_fork:
                prompt, recorded = view.num_prompt_tokens, view.recorded_output_tokens
                for branch in range(view.branch, view.branch + 1 + seq.to_fork):
                    drawn.append(made_up_token(vocab, eos, seq.seed, branch, end, prompt, recorded))
            elif end + 1 - view.num_prompt_tokens == view.recorded_output_tokens:
                drawn.append(eos)
            else:  # made_up_token, spelled out: a third of the loop's time
                token = (seq.seed + view.branch * _BRANCH + end * _PLACE) % vocab
                drawn.append(token if token != eos else (token + 1) % vocab)
        self._advance(Work(tokens, len(runs), len(drawn), decode_kv, prefill_kv, squares), moves)
        return StepOutput(drawn, _NO_SECONDS)

    def execute(self, batch: Batch, moves: Sequence[Move], sampling: SamplingBatch) -> StepOutput:
        """The same from packed arrays, for callers that have no runs."""
        work = Work(rows=len(batch.logit_tokens))
        for new, end in zip(np.diff(batch.query_start).tolist(), batch.kv_lens.tolist(), strict=True):
            work.add(end - new, end, sampled=False)
        work.rows = len(batch.logit_tokens)
        self._advance(work, moves)
        vocab, eos = self._shape.vocab_size, self._eos
        places = zip(
            sampling.seeds,
            sampling.branches,
            sampling.positions,
            sampling.num_prompt_tokens,
            sampling.recorded_output_tokens,
            strict=True,
        )
        return StepOutput([made_up_token(vocab, eos, *place) for place in places], _NO_SECONDS)

    def _advance(self, work: Work, moves: Sequence[Move]) -> None:
        phases, spent = self._steps.phases(work), self._spent
        spent["linear"] += phases.linear
        spent["attention"] += phases.attention
        spent["head"] += phases.head
        spent["cards"] += phases.cards
        spent["overhead"] += phases.overhead
        self._now += phases.total
        if moves:
            seconds = self._move_seconds(moves)
            spent["move"] += seconds
            self._now += seconds

    def _move_seconds(self, moves: Sequence[Move]) -> float:
        """Swaps go over the link; a copy on the device reads and writes its block."""
        machine, cards = self._machine, self._shape.cards
        copies = sum(1 for move in moves if move.kind == "copy")
        linked = (len(moves) - copies) * self._block_bytes / (machine.link_bytes_per_s * cards)
        copied = copies * 2 * self._block_bytes / (machine.bandwidth_bytes_per_s * cards)
        return linked + copied + len(moves) * machine.move_overhead_s

    # -------------------------------------------------------------------------------------------- clock and words

    def now(self) -> float:
        return self._now

    def wait_until(self, t: float) -> None:
        self._now = max(self._now, t)

    def simulated(self) -> dict[str, float]:
        """Virtual seconds by phase since the start, for the record of a run."""
        return dict(self._spent)

    def describe(self) -> dict[str, Any]:
        """What is simulated, for the manifest."""
        measured = self._measured
        return {
            "executor": "roofline",
            "model": self._shape.name,
            "device": f"{self._machine.name} (simulated)",
            "dtype": self._shape.dtype,
            "kernels": {},
            "clock": "virtual",
            "machine": attrs.asdict(self._machine),
            "shape": attrs.asdict(self._shape),
            "calibration": None if measured is None else {"setup": dict(measured.setup), "fit": dict(measured.fit)},
            "kv_pool": self.fit_line or None,
        }

    def close(self) -> None:
        """Nothing is held."""


def made_up_token(vocab: int, eos: int, seed: int, branch: int, end: int, prompt: int, recorded: int | None) -> int:
    """The token at place ``end`` of a sequence: eos where its recorded output ends, anything but eos elsewhere."""
    if end + 1 - prompt == recorded:
        return eos
    token = (seed + branch * _BRANCH + end * _PLACE) % vocab
    return token if token != eos else (token + 1) % vocab
