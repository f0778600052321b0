"""The contract between core and plugins: every hook, in the order of a step. ``docs/hooks.md`` is generated from this file.

Rules that hold for all of them:

* A hook is called once at start or once a step, with the whole step as its argument; never per sequence, block, layer or token.
* A policy reads (``View``, ``SequenceView``) and returns a decision; only core acts, and core checks each decision.
* No hook reads a clock: the time is ``view.now``. No hook calls the device.
* An exception in a deciding hook stops the engine with a ``PolicyError`` that names the plugin; it is never passed over.

A policy is an attrs class (``eq=False``, since pluggy compares plugins by equality) whose fields are its options::

    @attrs.define(eq=False)
    class Mine:
        watermark: float = attrs.field(default=0.01, validator=attrs.validators.ge(0))

        @hookimpl
        def plan_step(self, view): ...

One step, with the hooks it calls::

    intake   reset_cache (when an operator asks), predict_output, admit, release (aborts), requests_arrived
    look     plan_idle, triage, cached_tokens
    plan     plan_step
    reserve  reserve                                   <-+
    relieve  plan_idle, choose_victims, release (evictions)  -------+  until the plan fits
    pack, move, forward, sample                             (no hooks: the executor and the kernel that select_kernel chose)
    commit   external_waste, commit, fork, release (finished), sequences_preempted, sequences_finished, step_finished
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

from core.types import (
    EngineInfo,
    Eviction,
    Finished,
    IdleChoice,
    Lease,
    Plan,
    Policy,
    Preempted,
    Refusal,
    Release,
    Request,
    SequenceView,
    Shortfall,
    StepReport,
    Triage,
    View,
)

if TYPE_CHECKING:
    from core.kernel import AttentionCase, AttentionKernel

PROJECT = "quire"
"""Entry-point group and pluggy project name."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class ForkGroup(NamedTuple):
    """A parent whose prompt is computed, and the new branches that start from its blocks."""

    parent: SequenceView
    children: tuple[SequenceView, ...]


class DiscoverySpec:
    """Asked of every installed distribution, once per process. Installing makes options available, never active."""

    @hookspec
    def provide_policies(self) -> Iterable[Policy]:  # type: ignore[empty-body]
        """Give the options this distribution offers.

        Called once a process, at discovery, of every plugin module; collected. Must not import torch: ``Policy.target`` is a string.
        An exception, or a name that another distribution offers too, lists this distribution as broken (a clash stops the start,
        naming both); the others load.
        """

    @hookspec
    def provide_config_path(self) -> str:  # type: ignore[empty-body]
        """Give the package that holds this distribution's YAML files, as ``"pkg://their_package.conf"``.

        Called once a process; collected. The package has one folder a group (``allocator/mine.yaml``) and an ``__init__.py``.
        None: no YAML (the options can still be built from a YAML in the user's ``--config-dir``).
        """


class StartSpec:
    """Called once per engine, in this order, before the first step."""

    @hookspec(firstresult=True)
    def prepare_model(self, model: Any) -> tuple[Any, str] | None:
        """Give the model with layers replaced, and one line that says what was done (it is printed).

        Called once, after the weights are loaded and before kernels are chosen; at most one provider (group ``linears``). May
        change ``model`` (a ``torch.nn.Module``) in place. None: nothing to do. An exception stops the start.
        """

    @hookspec
    def select_kernel(self, case: AttentionCase) -> AttentionKernel | Refusal:  # type: ignore[empty-body]
        """Give a kernel for this case, or a ``Refusal`` with the reason.

        Called once for each case that can occur, before the KV pool is laid out. Core asks the chosen kernels one after the other
        (``kernel=auto``: in the order of its ``candidates``) and takes the first that does not refuse; when all refuse, the start
        fails with every reason. The same object may be given for several cases. Must not allocate device memory.
        """

    @hookspec
    def setup(self, engine_info: EngineInfo) -> None:
        """Learn the shapes, the block pool, the cost model and the seed.

        Called once, when the pool exists; collected. Allocators keep ``engine_info.pool``. An exception stops the start.
        """


class StepSpec:
    """The decisions of a step. Exactly one provider for ``plan_step``, ``reserve``, ``release`` and ``choose_victims``; at most
    one for the others; all allocator hooks come from one plugin. Listed observers may wrap them (``wrapper=True``)."""

    @hookspec(firstresult=True)
    def predict_output(self, sequences: Sequence[SequenceView]) -> Sequence[int | None] | None:
        """Say for each newly arrived sequence how many output tokens its whole answer will have.

        Called once at intake with everything that arrived since the last step, before ``admit`` (group ``predictor``). Core
        keeps the answer, cut to 1..``max_tokens``, as ``SequenceView.predicted_output_tokens``, where schedulers, admission and
        preemption read it; None, and no provider, mean ``max_tokens``. A predictor that learns also implements
        ``sequences_finished``. Only one that is named for it may read ``recorded_output_tokens``, which a live request does not
        have.
        """

    @hookspec(firstresult=True)
    def triage(self, view: View) -> Triage | None:
        """Refuse waiting sequences that are not worth starting any more, or send them to the back of the queue.

        Called at look, once a step in which something waits (group ``admission``). Only waiting sequences without output may be
        named, each once. A refused one ends with ``finish_reason="refused"`` and the reason given; a demoted one is from now on
        treated as if it had arrived now (``SequenceView.demoted``), so it is still served. None: nothing changes.
        """

    @hookspec(firstresult=True)
    def plan_idle(self, view: View) -> Sequence[IdleChoice] | None:
        """Say what becomes of the KV of sessions that stall between two turns (``view.idle``): keep, swap or discard.

        Called at look, once a step while any session idles, and again when a plan is short of blocks, with
        ``view.blocks_missing`` above 0, before anything that runs is preempted. Sequences that are not named stay as they are,
        and so does one that is to be swapped without room on the host; if after the second call nothing is free, core discards
        the one that is idle longest. ``stall_s`` is the client's own guess, ``idle_since_s`` when the turn ended. Without a
        provider nothing is kept.
        """

    @hookspec(firstresult=True)
    def admit(self, sequences: Sequence[SequenceView]) -> Sequence[Refusal | None] | None:
        """Say for each newly arrived sequence whether it can ever be served: None, or a ``Refusal`` with the numbers.

        Called at intake with everything that arrived since the last step. Without a provider (or None) core refuses a sequence
        whose prompt and ``max_tokens`` need more blocks than the pool has.
        """

    @hookspec(firstresult=True)
    def cached_tokens(self, sequences: Sequence[SequenceView]) -> Sequence[int] | None:
        """Give, for each waiting sequence, how many leading tokens are in the cache now. A look, not a promise: no state changes.

        Called at look, with a bounded head of the waiting queue. What counts is ``Lease.num_cached_tokens``. None: no sharing.
        """

    @hookspec(firstresult=True)
    def plan_step(self, view: View) -> Plan:  # type: ignore[empty-body]
        """Say which tokens to compute in this step, most wanted first.

        Called once a step when there is work. Pure: no allocation, no change to anything the scheduler does not own. Chunks may
        name running or waiting sequences, each at most once, with ``num_tokens >= 1``; together at most
        ``view.max_num_batched_tokens`` tokens, and at most ``view.max_num_seqs`` sequences running afterwards. ``may_preempt``
        belongs on running sequences; set on a newcomer it preempts for its blocks and its row (so such newcomers may exceed the
        rows that are free), and the scheduler's docs must say so. An empty plan needs ``wait_until``.
        """

    @hookspec(firstresult=True)
    def reserve(self, plan: Plan, sequences: Mapping[int, SequenceView]) -> Sequence[Lease] | Shortfall:  # type: ignore[empty-body]
        """Give every chunk of the plan its blocks, aligned with ``plan.chunks``, or a ``Shortfall``: all or nothing.

        Called one or more times a step, until the plan fits. ``sequences`` maps each id to its view. On ``Shortfall`` the allocator's
        state and the pool are as before the call. Pin every prefix hit of the plan before taking a block, or one sequence's new
        block evicts another's hit. Needed are blocks for ``num_computed_tokens`` (or the hit) plus ``min(chunk.num_tokens, what is
        missing)`` tokens; a block that is written must have one owner (copy on write); a swapped sequence needs all its holes
        filled (core adds the swap-in moves).
        """

    @hookspec(firstresult=True)
    def choose_victims(self, view: View, plan: Plan, shortfall: Shortfall) -> Sequence[Eviction] | None:
        """Choose running sequences to push out so that the plan fits.

        Called when the plan does not fit and every chunk left may preempt. Unplanned sequences first, then from the plan's end,
        never one ahead of the first chunk that does not fit (``plan.chunks[shortfall.num_fitting]``) unless the eviction says
        ``ahead`` and the policy's docs say why. ``shortfall.rows_missing`` asks for rows instead of blocks. A victim's chunk
        leaves the plan, which must keep at least one. ``SequenceView.private_blocks`` says what a victim would free; evictions
        that free nothing (drop no reference) and shorten nothing are a ``PolicyError``. None: cannot help; core then preempts
        the newest running sequence, other than the plan's first, by recompute (counted ``forced``).
        """

    @hookspec(firstresult=True)
    def fork(self, groups: Sequence[ForkGroup]) -> Sequence[Sequence[Lease]] | Shortfall | None:
        """Give each child a table over its parent's blocks, one lease a child in the groups' order.

        Called at commit, after the first tokens of all branches were drawn from the parent's logits; in a beam search after any token,
        and the parent may be out of every queue or waiting with its blocks. Where sharing is impossible the
        lease copies (``moves``). On ``Shortfall``, or without a provider, the children queue as ordinary sequences.
        """

    @hookspec(firstresult=True)
    def commit(self, sequences: Sequence[SequenceView]) -> object:
        """Learn that these sequences' first ``num_computed_tokens`` tokens are now written: full blocks may be shared.

        Called once a step, after the new tokens were appended, with the sequences that were computed. The result is ignored.
        """

    @hookspec(firstresult=True)
    def external_waste(self, sequences: Sequence[SequenceView]) -> int | None:
        """Give how many free blocks none of these waiting sequences could start with: pieces that are too short. No state changes.

        Called at commit, at most once a step, with a bounded head of the waiting queue, and only when something waits while blocks are
        free. Core reports them as ``MemoryReport.external_waste``. None, or no provider: any free block will do, so there is none.
        """

    @hookspec(firstresult=True)
    def reset_cache(self) -> object:
        """Forget every cached block: no later request is served from content written before.

        Called at intake, before new requests are admitted, when ``Engine.reset_cache`` was called. Sequences that hold blocks keep
        them, but those are no longer offered to others. The result is ignored. Without a provider ``Engine.reset_cache`` refuses.
        """

    @hookspec(firstresult=True)
    def release(self, releases: Sequence[Release]) -> object:
        """Take back exactly these blocks: one reference each.

        Called at intake (aborts), relieve (evictions) and commit (finished). A sequence that ends is always passed, also without
        blocks: what is kept by its id can be forgotten.
        """


class ObserverSpec:
    """Opt-in by name (``observers=[recorder]``); isolated: an exception is logged with the plugin's name, then ``observer_errors``
    decides whether it stops the engine (``raise``) or switches the observer off (``disable``)."""

    @hookspec
    def requests_arrived(self, requests: Sequence[Request]) -> None:
        """Learn of the requests that intake accepted in this step. Called once a step, only when there are any."""

    @hookspec
    def sequences_preempted(self, preempted: Sequence[Preempted]) -> None:
        """Learn what was preempted in this step and how. Called once a step, only when there is any."""

    @hookspec
    def sequences_finished(self, finished: Sequence[Finished]) -> None:
        """Learn what finished in this step, with its times. Called once a step, only when there is any."""

    @hookspec
    def step_finished(self, report: StepReport) -> None:
        """Learn what a step did. Called once a step; the report's memory part is made only when someone listens or measures."""


class EndSpec:
    """Called once, when an engine closes."""

    @hookspec
    def teardown(self) -> None:
        """Close files and free what ``setup`` took. Always called; an exception is logged and the rest still run."""


SPECS = (DiscoverySpec, StartSpec, StepSpec, ObserverSpec, EndSpec)
DECIDERS_REQUIRED = ("plan_step", "reserve", "release", "choose_victims")
DECIDERS_OPTIONAL = (
    "predict_output",
    "admit",
    "plan_idle",
    "triage",
    "cached_tokens",
    "commit",
    "fork",
    "external_waste",
    "reset_cache",
    "prepare_model",
)
ALLOCATOR_HOOKS = ("admit", "cached_tokens", "reserve", "fork", "commit", "external_waste", "reset_cache", "release")
OBSERVER_HOOKS = ("requests_arrived", "sequences_preempted", "sequences_finished", "step_finished")
