"""The device side, behind one interface: ``executor=torch | toy | roofline`` run the same core and the same plugins.

Stages 7 to 9 of a step (move, forward, sample) are one call, and the executor owns the clock. Only ``torch`` imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from core.types import Batch, CacheConfig, Limits, ModelInfo, Move, SamplingBatch, StepOutput

if TYPE_CHECKING:
    from core.batch import Run
    from core.kernel import AttentionCase, AttentionKernel


class StartHooks(Protocol):
    """The start hooks as the executor calls them: chains walked, refusals collected, errors named. Made by core/plugins.py."""

    def prepare_model(self, model: Any) -> tuple[Any, str | None]:
        """The model, changed or not, and the line that says what was done."""

    def select_kernel(self, case: AttentionCase) -> AttentionKernel:
        """The first kernel that takes the case; ConfigError with every reason when none does."""


class Executor(Protocol):
    """The device side: model, KV tensors, sampler and clock. ``executor=torch | toy | roofline``. See core/executors/."""

    def load(self) -> ModelInfo:
        """Load the model (or its config) and its tokenizer; no KV memory yet."""

    def prepare(self, hooks: StartHooks, cache: CacheConfig) -> list[str]:
        """Let plugins change the model (``prepare_model``) and choose kernels (``select_kernel``); returns lines to print."""

    def fit_blocks(self, cache: CacheConfig, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """How many blocks of ``cache.block_size`` the pool should have when ``cache.num_blocks`` is null."""

    def allocate(self, limits: Limits) -> None:
        """Allocate the KV pool and the host swap pool, and bind the kernels to them."""

    def measure_cost(self) -> tuple[float, float]:
        """(link bytes per second for swap, prefill FLOP per second), measured once or read from the executor's own cache."""

    def warm_up(self) -> None:
        """Run what the first step would otherwise pay for."""

    def execute(self, batch: Batch, moves: Sequence[Move], sampling: SamplingBatch) -> StepOutput:
        """Stages move, forward and sample. Moves run first, in order."""

    def now(self) -> float:
        """Seconds on this executor's clock."""

    def wait_until(self, t: float) -> None:
        """Sleep, or move the virtual clock, until ``now() >= t``."""

    def describe(self) -> dict[str, Any]:
        """What runs where: device, dtype, kernel per case, for the start banner and the manifest."""

    def close(self) -> None:
        """Free everything. May be called twice."""


@runtime_checkable
class TakesRuns(Protocol):
    """An executor that computes nothing on a device, and so is spared the index arrays: where it has this, core calls no ``execute``."""

    def execute_runs(self, runs: Sequence[Run], moves: Sequence[Move]) -> StepOutput:
        """Stages move, forward and sample of ``runs``; a token for each sample, in the order of ``core.batch.sampling_batch``."""
