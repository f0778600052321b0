"""The step loop. It asks the plugins, checks what they answer, acts, and reports; it holds no policy.

``Engine.step`` reads like the table in docs/design.md: intake, look, plan, reserve and relieve (core/relief.py), pack (core/batch.py),
move, forward and sample (the executor), commit (core/commit.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from core.accounting import external_waste, memory_report
from core.batch import MAX_SCORED_TOKENS, BatchBuilder, Run, sampling_batch, to_score
from core.blocks import BlockPool
from core.checks import check_leases, check_plan
from core.commit import Committer
from core.cost import CostModel
from core.executors import Executor, TakesRuns
from core.relief import Relief
from core.reports import check_record
from core.scratch import Step
from core.sessions import Sessions
from core.state import Sequence, State, Status
from core.types import (
    NO_CHANGE,
    Lease,
    Limits,
    ModelInfo,
    Move,
    Outputs,
    Plan,
    Request,
    RequestError,
    SamplingParams,
    StepOutput,
    StepReport,
)
from core.waiting import Mailbox, admit, predict, refused, triage

if TYPE_CHECKING:
    from core.edge import Edge
    from core.metrics import Metrics

_new_run = tuple.__new__  # half the time of the class's own call, of which a step makes one for each sequence


class Engine:
    """One model, one pool, one set of plugins. ``submit`` and ``abort`` may be called from any thread, ``step`` from one."""

    def __init__(
        self,
        *,
        executor: Executor,
        hooks: Any,
        limits: Limits,
        model: ModelInfo,
        cost: CostModel,
        pool: BlockPool,
        edge: Edge,
        metrics: Metrics,
        tokenizer: Any = None,
        checks: str = "cheap",
        seed: int = 0,
    ):
        self.executor, self.hooks, self.limits, self.model = executor, hooks, limits, model
        self.cost, self.pool, self.tokenizer = cost, pool, tokenizer
        self.edge, self.metrics = edge, metrics
        self.full_checks = checks == "full"
        self.state = State(limits, pool, cost)
        self.state.set_finds_prefixes(hooks.has("cached_tokens"))
        self.failure: BaseException | None = None
        self._builder = BatchBuilder(limits)
        self.sessions = Sessions(self.state, hooks)
        self._committer = Committer(
            self.state,
            hooks,
            model=model,
            builder=self._builder,
            tokenizer=tokenizer,
            next_id=self._next_id,
            sessions=self.sessions,
        )
        self._relief = Relief(self.state, hooks, self._fail, self.sessions)
        self._moves: list[Move] = []  # decided, not yet run
        self._commands = Mailbox(self.state, limits.max_queue)
        self._ids = itertools.count()
        self._seeds = random.Random(seed)
        self._num_steps = 0
        self._latest_s = float("-inf")
        self._closed = False
        self._takes_runs = executor if isinstance(executor, TakesRuns) else None

    def _next_id(self) -> int:
        return next(self._ids)

    def _now(self) -> float:
        """The executor's clock, held where it was when it goes back: no time of a request is before an earlier one of it."""
        self._latest_s = now = max(self._latest_s, self.executor.now())
        return now

    # ------------------------------------------------------------------------------------------- from any thread

    def submit(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams | None = None,
        *,
        arrival_s: float | None = None,
        **labels: Any,
    ) -> int:
        """Queue a request; gives its id. ``labels`` are the other fields of ``Request`` (priority, client_id, cache_salt, ...).

        Targets that the request does not name itself (``deadline_s``, ``tpot_s``) are those of its ``service_class``.
        ``QueueFull`` when ``max_queue`` requests wait; ``RequestError`` at once for what can be told from the request alone. What
        only the allocator can tell (it needs more blocks than there are) comes as an ``Output`` with ``finish_reason="refused"``.
        """
        arrival_s = self._now() if arrival_s is None else arrival_s
        request = self.edge.request(self._next_id, prompt_token_ids, params, arrival_s, labels)
        self._commands.put_request(request)
        return request.id

    def abort(self, request_id: int) -> None:
        """End a request at the next step. An unknown or finished id, or a second call, is harmless."""
        self._commands.put("abort", request_id)

    def end_sessions(self) -> None:
        """Forget, at the next step, the KV that is kept for sessions between two turns."""
        self._commands.put("end_sessions", None)

    def reset_cache(self) -> None:
        """Forget all cached prompt blocks at the next step, and what sessions keep: requests submitted after this call find none
        of what was there.

        Sequences that run keep their blocks to their end, and those are no longer offered to others. ``RequestError`` when the
        allocator caches nothing.
        """
        if not self.hooks.has("reset_cache"):
            raise RequestError(
                f"{self.hooks.providers('reserve')[0].option} keeps no cache of prompts: nothing to reset"
            )
        self._commands.put("reset_cache", None)

    def has_work(self) -> bool:
        return bool(self._commands or self.state.sequences)

    def has_started(self, request_id: int, unknown: bool = True) -> bool:
        """Whether a step has computed anything of a request; ``unknown`` of one that is not (or no longer) in the queue."""
        seq = self.state.sequences.get(request_id)  # branch 0 has the request's id
        return unknown if seq is None else seq.first_scheduled_s is not None

    def stats(self) -> dict[str, int]:
        """Gauges, cheap enough to read at any time from any thread."""
        state = self.state
        return {
            "running": len(state.running),
            "waiting": len(state.waiting),
            "num_blocks": self.pool.num_blocks,
            "free_blocks": self.pool.num_free,
            "swap_blocks": state.swap.num_blocks,
            "free_swap_blocks": state.swap.num_free,
            "idle_sessions": len(state.idle),
            "steps": self._num_steps,
        }

    # ------------------------------------------------------------------------------------------- the step

    def step(self) -> StepReport:
        """One step: at least one token is computed if anything can be; raises when a plugin or the executor is at fault."""
        if self.failure is not None:
            raise self.failure
        try:
            return self._step()
        except BaseException as error:
            self.failure = error
            raise

    def _step(self) -> StepReport:
        commands = self._commands.take()
        step = Step(self._num_steps, self._now(), self._moves)
        self._intake(step, commands)
        self._look(step)
        plan, short_of_rows = self._plan(step)
        plan, leases = self._relief.reserve(step, plan, short_of_rows)
        runs = self._apply(step, plan, leases)
        if runs:
            output = self._execute(step, runs)
            step.add_device_seconds(output.seconds)
            self._moves = step.late_moves
            self._committer.commit(step, runs, output, self._now())
        return self._report(step, plan, runs)

    def _execute(self, step: Step, runs: list[Run]) -> StepOutput:
        """Stages 6 to 9. An executor without a device is spared the index arrays."""
        if self._takes_runs is not None:
            step.mark("pack")
            return self._takes_runs.execute_runs(runs, step.moves)
        batch, sampling = self._builder.pack(runs), sampling_batch(runs)
        step.mark("pack")
        output = self.executor.execute(batch, step.moves, sampling)
        if len(output.token_ids) != len(sampling):
            raise RuntimeError(f"the executor gave {len(output.token_ids)} tokens for {len(sampling)} samples")
        return output

    def _intake(self, step: Step, commands: list[tuple[str, Any]]) -> None:
        if any(kind == "reset_cache" for kind, _ in commands):
            self.sessions.reset(step)
            self.hooks.reset_cache()
        new = [self._new_sequence(request, step) for kind, request in commands if kind == "add"]
        if new:
            predict(self.hooks, new)
            refusals = admit(new, self.hooks, self.limits)
            for seq, refusal in zip(new, refusals, strict=True):
                if refusal is None:
                    self.sessions.resume(step, seq)
                    self.state.add(seq)
                else:
                    step.outputs += refused(seq, refusal)
                    step.refused.append(seq.request)
            self._commands.arrived(len(new))
            accepted = [seq.request for seq, refusal in zip(new, refusals, strict=True) if refusal is None]
            if accepted and self.hooks.has_observers("requests_arrived"):
                self.hooks.observe("requests_arrived", requests=accepted)
        aborted = {request_id for kind, request_id in commands if kind == "abort"}
        ids = [i for request_id in aborted for i in sorted(self.state.requests.get(request_id, ()))]
        if ids:
            self._committer.end(step, [(self.state.sequences[i], "abort") for i in ids], self._now())
        if any(kind == "end_sessions" for kind, _ in commands):
            self.sessions.drop_all(step)
        step.mark("intake")

    def _new_sequence(self, request: Request, step: Step) -> Sequence:
        params = request.params
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        seq = Sequence(request, params, seed, self.pool, id=request.id)
        seq.first_seen_s = step.started_s
        self._committer.open_text(seq)
        return seq

    def _fail(self, step: Step, seq: Sequence, message: str) -> None:
        self._committer.end(step, [(seq, "error")], self._now(), message)

    def _turn_away(self, step: Step, refused: list[tuple[Sequence, str]]) -> None:
        for seq, reason in refused:
            self._committer.end(step, [(seq, "refused")], self._now(), reason)

    def _look(self, step: Step) -> None:
        state = self.state
        state.look(step.started_s, self._num_steps)
        state.cached_tokens.clear()
        if state.idle:
            self.sessions.tend(step)
        if state.waiting and self.hooks.has("cached_tokens"):
            head = state.waiting[: self.limits.max_num_seqs]
            counts = self.hooks.cached_tokens(sequences=head)
            if counts is not None:
                if len(counts) != len(head):
                    raise self.hooks.policy_error(
                        "cached_tokens", f"gave {len(counts)} counts for {len(head)} sequences"
                    )
                state.cached_tokens.update((v.id, n) for v, n in zip(head, counts, strict=True) if n)
        if state.waiting and self.hooks.has("triage"):
            triage(step, state, self.hooks, self._turn_away)
        step.mark("look")

    def _plan(self, step: Step) -> tuple[Plan, bool]:
        if not self.state.sequences:
            return Plan(), False
        plan = self.hooks.plan_step(view=self.state.view)
        short_of_rows = check_plan(plan, self.state, self.hooks)
        step.mark("plan")
        return plan, short_of_rows

    def _apply(self, step: Step, plan: Plan, leases: Seq[Lease]) -> list[Run]:
        """Core acts: tables change, sequences start to run, moves are queued; gives what each sequence computes."""
        state, runs, num_tokens = self.state, [], 0
        sequences, running = state.sequences, state.running_ids
        score_room = MAX_SCORED_TOKENS
        for (id, n, _), lease in zip(plan.chunks, leases, strict=True):
            seq = sequences[id]
            if lease is not NO_CHANGE:
                self._change_table(step, seq, lease)
            if id not in running:
                self._admit_to_batch(step, seq, lease)
            start = seq.view.num_computed_tokens
            end = start + n
            if end > len(seq.tokens):
                end = len(seq.tokens)
            run = _new_run(Run, (seq, start, end))
            if seq.scores is not None and to_score(run):
                end = min(end, start + max(1, score_room))
                run = _new_run(Run, (seq, start, end))
                score_room -= len(to_score(run))
            num_tokens += end - start
            runs.append(run)
        step.num_tokens = num_tokens
        check_leases(runs, state, self.hooks, full=self.full_checks)
        step.mark("reserve")
        return runs

    def _change_table(self, step: Step, seq: Sequence, lease: Lease) -> None:
        table, builder = seq.table, self._builder
        step.moves.extend(lease.moves)
        for index, block in lease.blocks:
            if not 0 <= index <= len(table) or not 0 <= block < self.limits.num_blocks:
                raise self.hooks.policy_error(
                    "reserve",
                    f"leased block {block} at table index {index} to sequence {seq.id}, whose table has {len(table)} entries "
                    f"(the pool has {self.limits.num_blocks} blocks)",
                )
            if index == len(table):
                table.append(block)
            else:
                table[index] = block
            host = seq.host_blocks.pop(index, None)
            if host is not None:
                step.swap_in(host, block)
                self.state.swap.give((host,))
            if seq.row >= 0:
                builder.set_block(seq.row, index, block)
        seq.set_tokens_at_end(self.limits.block_size)

    def _admit_to_batch(self, step: Step, seq: Sequence, lease: Lease) -> None:
        view = seq.view
        if lease.num_cached_tokens:
            if view.num_computed_tokens or not 0 < lease.num_cached_tokens < view.num_tokens:
                raise self.hooks.policy_error(
                    "reserve",
                    f"says {lease.num_cached_tokens} tokens of sequence {seq.id} are cached: it has {view.num_tokens} tokens, "
                    f"{view.num_computed_tokens} computed, and at least one must be left to compute",
                )
            if seq.scores is not None and min(lease.num_cached_tokens, view.num_prompt_tokens - 1) > len(seq.scores):
                raise self.hooks.policy_error("reserve", f"gave sequence {seq.id} cached tokens across cache_salt")
            seq.set_computed(lease.num_cached_tokens)
        if seq.first_scheduled_s is None:
            step.query_tokens += view.num_tokens
            step.hit_tokens += lease.num_cached_tokens
            seq.first_scheduled_s = step.started_s
            seq.num_cached_tokens = view.num_computed_tokens  # found by the allocator, or kept for its session
            step.num_started += 1
        self.state.move(seq, Status.RUNNING)
        self._builder.set_row(seq.row, seq.table)

    def _report(self, step: Step, plan: Plan, runs: list[Run]) -> StepReport:
        state = self.state
        if self.full_checks:
            state.check_owners()
            for finished in step.finished:
                check_record(finished)
        self._num_steps += 1
        if step.num_started:
            self._commands.started(step.num_started, step.started_s)
        step.mark("commit")
        report = StepReport(
            step=step.number,
            started_s=step.started_s,
            ended_s=self._now(),
            plan=plan,
            outputs=Outputs(step.outputs),
            preempted=tuple(step.preempted),
            finished=tuple(step.finished),
            num_tokens=step.num_tokens,
            num_sampled=step.num_sampled,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            stage_seconds=step.seconds,
            memory=step.memory or memory_report(state, 0, external_waste(state, self.hooks)),
            wait_until=plan.wait_until,
            prefix_query_tokens=step.query_tokens,
            prefix_hit_tokens=step.hit_tokens,
            num_forked=step.num_forked,
            refused=tuple(step.refused),
        )
        self.metrics.update(report)
        if step.preempted and self.hooks.has_observers("sequences_preempted"):
            self.hooks.observe("sequences_preempted", preempted=report.preempted)
        if step.finished and self.hooks.has_observers("sequences_finished"):
            self.hooks.observe("sequences_finished", finished=report.finished)
        if self.hooks.has_observers("step_finished"):
            self.hooks.observe("step_finished", report=report)
        return report

    # ------------------------------------------------------------------------------------------- the end

    def assert_idle(self) -> None:
        """Raise ``AssertionError`` with the numbers if an engine without work still holds anything."""
        self.state.assert_idle()

    def close(self) -> None:
        """Tell every plugin, then free the device. May be called twice."""
        if not self._closed:
            self._closed = True
            self.hooks.teardown()
            self.executor.close()
