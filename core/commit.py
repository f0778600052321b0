"""Commit: sampled tokens become text, stops, shared blocks, forks and releases, in this order; and every way a sequence ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from core.accounting import external_waste, memory_report
from core.batch import BatchBuilder, Run, to_score
from core.beams import Beams, Hands
from core.hookspecs import ForkGroup
from core.scratch import Step
from core.sessions import Sessions
from core.state import Sequence, State, Status, put_num_computed, put_num_tokens
from core.stops import StopMatcher
from core.types import (
    Finished,
    FinishReason,
    Lease,
    ModelInfo,
    Output,
    Release,
    Shortfall,
    StepOutput,
    TokenLogprobs,
    failure,
)

log = logging.getLogger(__name__)


class Drawn:
    """One token drawn for one branch, and what becomes of it."""

    __slots__ = ("seq", "token", "reason", "stop_reason", "text", "error", "logprobs")

    def __init__(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None = None, error: str | None = None):
        self.seq, self.token, self.error = seq, token, error
        self.reason: FinishReason | None = "error" if error else None
        self.stop_reason: str | int | None = None
        self.text = ""
        self.logprobs = (logprobs,) if logprobs is not None else ()

    def fail(self, what: str, error: Exception) -> None:
        """Something of this request's own went wrong: it ends, and nobody else does."""
        log.warning("request %s: %s failed", self.seq.request.id, what, exc_info=error)
        self.reason, self.stop_reason, self.text = "error", None, ""
        self.error = failure(error, what)


class Committer:
    """Stage 10. Holds nothing between steps."""

    def __init__(
        self,
        state: State,
        hooks: Any,
        *,
        model: ModelInfo,
        builder: BatchBuilder,
        tokenizer: Any,
        next_id: Callable[[], int],
        sessions: Sessions,
    ):
        self.state, self.hooks, self.model, self.builder = state, hooks, model, builder
        self.tokenizer, self.next_id, self.sessions = tokenizer, next_id, sessions
        hands = Hands(self._let_go, self._fork, self._record, next_id)
        self.beams = Beams(state, builder, model, tokenizer, hands)
        self.block_bytes = model.kv_bytes_per_token * state.limits.block_size

    def open_text(self, seq: Sequence) -> None:
        """Give a new sequence its own decoder state; none when nobody wants its text. A beam search makes it at its end."""
        if seq.params.beam_width is not None:
            self.beams.open(seq)
            return
        if self.tokenizer is not None and (seq.params.detokenize or seq.params.stop):
            params = seq.params
            seq.stream = self.tokenizer.stream(params.skip_special_tokens)
            seq.stops = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        looks = seq.stream is not None or seq.grammar is not None or seq.scores is not None
        seq.wants_text = looks or bool(seq.params.stop_token_ids)

    def commit(self, step: Step, runs: list[Run], output: StepOutput, now: float) -> None:
        """Record what was computed and drawn at ``now``; end what is over."""
        rows, forking = self._append(runs, output, now)
        step.num_sampled = len(rows)
        # before anything is given back: what the forward pass just used
        step.memory = memory_report(
            self.state, step.num_copies * self.block_bytes, external_waste(self.state, self.hooks)
        )
        step.mark("commit")
        drawn = [row for row in rows if type(row) is Drawn]
        for one in drawn:
            if one.seq.stream is not None and one.error is None:
                try:
                    self._text(one)
                except Exception as error:
                    one.fail("making text", error)
        step.mark("text")
        step.outputs += [self._output(row) if type(row) is Drawn else row for row in rows] if drawn else rows
        if self.hooks.has("commit"):
            self.hooks.commit(sequences=[run.seq.view for run in runs])
        if forking:
            self._fork(step, [(p, [c.seq for c in children if c.reason is None]) for p, children in forking])
        ending = [(one.seq, one.reason) for one in drawn if one.reason is not None]
        if ending:
            self._end(step, ending, now)
        if self.beams.touched:
            self.beams.settle(step, now)

    # ------------------------------------------------------------------------------------------- tokens and text

    def _append(
        self, runs: list[Run], output: StepOutput, now: float
    ) -> tuple[list[Any], list[tuple[Sequence, list[Drawn]]]]:
        """What became of each token drawn, in order: a ``Drawn``, or ``(sequence, token)`` where there is no more to say."""
        rows: list[Any] = []
        forking: list[tuple[Sequence, list[Drawn]]] = []
        logprobs, errors, tokens = output.logprobs, output.errors, output.token_ids
        eos, index, scores = self.model.eos_token_ids, 0, iter(output.scores)
        for run in runs:
            seq, _, end = run
            view = seq.view
            if seq.scores is not None:
                seq.scores += [next(scores) for _ in to_score(run)]
            put_num_computed(view, end)
            if end != len(seq.tokens):
                continue
            if seq.wants_text or seq.to_fork or logprobs or errors:
                if seq.beams is not None:
                    self.beams.take(seq, output, index)
                    index += 1
                    continue
                family = self._draw(seq, tokens, index, output, now)
                index += len(family)
                rows += family
                if len(family) > 1:
                    forking.append((seq, family[1:]))
                continue
            token = tokens[index]
            index += 1
            seq.tokens.append(token)
            seq.times.append(now)
            put_num_tokens(view, end + 1)
            if (token in eos and not seq.params.ignore_eos) or len(seq.times) >= view.max_tokens:
                one = Drawn(seq, token)
                self._judge(one)
                rows.append(one)
            else:
                rows.append((seq, token))
        return rows, forking

    def _draw(self, seq: Sequence, tokens: Any, index: int, output: StepOutput, now: float) -> list[Drawn]:
        """The tokens of one sequence and of the branches it still has to start."""
        family, logprobs, errors = [], output.logprobs, output.errors
        for branch in [seq, *self._children(seq)] if seq.to_fork else [seq]:
            one = Drawn(
                branch, tokens[index], logprobs[index] if logprobs else None, errors.get(index) if errors else None
            )
            if branch.scores and any(s.logprob != s.logprob for s in branch.scores):
                one.error, one.reason = "the model gave no usable logits for the prompt", "error"
            if one.error is None:
                branch.append(one.token, now)
                try:
                    self._judge(one)
                except Exception as error:
                    one.fail("following the grammar", error)
            family.append(one)
            index += 1
        return family

    def _children(self, parent: Sequence) -> list[Sequence]:
        children = []
        for branch in range(1, parent.to_fork + 1):
            child = Sequence(
                parent.request, parent.params, parent.seed, self.state.pool, id=self.next_id(), branch=branch
            )
            child.first_seen_s, child.first_scheduled_s = parent.first_seen_s, parent.first_scheduled_s
            child.num_cached_tokens = parent.num_cached_tokens
            child.set_predicted(parent.view.predicted_output_tokens)
            child.scores = parent.scores
            self.open_text(child)
            self.state.add(child)
            children.append(child)
        parent.to_fork = 0
        return children

    def _judge(self, one: Drawn) -> None:
        """Whether this token ends the sequence, as far as tokens can tell."""
        seq, token = one.seq, one.token
        params = seq.params
        if not params.ignore_eos and token in self.model.eos_token_ids:
            one.reason = "stop"
        elif token in params.stop_token_ids:
            one.reason, one.stop_reason = "stop", token
        elif len(seq.times) >= seq.view.max_tokens:
            one.reason = "length"
        elif seq.grammar is not None:
            seq.grammar.advance(token)

    def _text(self, one: Drawn) -> None:
        """New final text; a stop string ends the sequence; at the end held text is let go."""
        seq = one.seq
        params = seq.params
        ends = one.reason == "stop"  # by this token, which then is no part of the text
        piece = "" if ends and not params.include_stop_str_in_output else seq.stream.push(one.token)
        if one.reason is not None:
            piece += seq.stream.flush()
        if seq.stops is None or len(seq.times) <= params.min_tokens:
            one.text = piece
            return
        one.text, matched = seq.stops.push(piece)
        if matched is not None:
            one.reason, one.stop_reason = "stop", matched
        elif one.reason is not None:
            one.text += seq.stops.flush()

    def _output(self, one: Drawn) -> Output:
        seq = one.seq
        view = seq.view
        tokens = () if one.error is not None else (one.token,)
        return Output(
            view.request_id, view.id, view.branch, tokens, one.text, one.reason, one.stop_reason, one.error,
            view.num_prompt_tokens, seq.num_cached_tokens, one.logprobs,
            tuple(seq.scores) if seq.scores and len(seq.times) == 1 else (),
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------- forks

    def _fork(self, step: Step, groups: list[tuple[Sequence, list[Sequence]]]) -> None:
        """Branches start from their parent's blocks; those that do not fit stay in the queue as ordinary sequences."""
        room = self.state.limits.max_num_seqs - len(self.state.running)
        asked: list[tuple[ForkGroup, list[Sequence]]] = []
        for parent, children in groups:
            taken = children[: max(0, room)]
            room -= len(taken)
            if taken:
                asked.append((ForkGroup(parent.view, tuple(c.view for c in taken)), taken))
        if not asked or not self.hooks.has("fork"):
            return
        answer = self.hooks.fork(groups=tuple(group for group, _ in asked))
        if answer is None or isinstance(answer, Shortfall):
            return
        if [len(leases) for leases in answer] != [len(children) for _, children in asked]:
            raise self.hooks.policy_error("fork", f"gave {answer!r}: one lease for each child of each group")
        for (group, children), leases in zip(asked, answer, strict=True):
            for child, lease in zip(children, leases, strict=True):
                self._start_child(step, group, child, lease)

    def _start_child(self, step: Step, group: ForkGroup, child: Sequence, lease: Lease) -> None:
        parent = group.parent
        table = [block for _, block in lease.blocks]
        needed = -(-parent.num_computed_tokens // self.state.limits.block_size)
        in_order = [i for i, _ in lease.blocks] == list(range(len(table)))
        if not in_order or len(table) < needed or not all(self._is_held(b) for b in table):
            raise self.hooks.policy_error(
                "fork", f"gave {lease.blocks} for a parent with {needed} blocks of computed tokens"
            )
        step.num_forked += 1
        child.table.extend(table)
        child.set_computed(parent.num_computed_tokens)
        child.set_tokens_at_end(self.state.limits.block_size)
        step.late_moves.extend(lease.moves)
        self.state.move(child, Status.RUNNING)
        self.builder.set_row(child.row, child.table)

    def _is_held(self, block: int) -> bool:
        return 0 <= block < self.state.limits.num_blocks and self.state.pool.refs[block] > 0

    # ------------------------------------------------------------------------------------------- endings

    def end(
        self, step: Step, ending: Iterable[tuple[Sequence, FinishReason]], now: float, error: str | None = None
    ) -> None:
        """End sequences outside a sample (abort, error): each of their branches, those still to come included, gets an output."""
        ending = list(ending)
        for seq, reason in ending:
            if seq.beams is not None:
                self.beams.end(step, seq.beams, reason, now, error)
        ending = [(seq, reason) for seq, reason in ending if seq.beams is None]
        for seq, reason in ending:
            for branch in range(seq.view.branch, seq.view.branch + 1 + seq.to_fork):
                step.outputs.append(
                    Output(
                        seq.request.id,
                        seq.id,
                        branch,
                        (),
                        "",
                        reason,
                        None,
                        error,
                        seq.view.num_prompt_tokens,
                        seq.num_cached_tokens,
                    )
                )
        self._end(step, ending, now)

    def _end(self, step: Step, ending: list[tuple[Sequence, Any]], now: float) -> None:
        gone = []
        for seq, reason in ending:
            kept = reason in ("stop", "length") and self.sessions.keep(step, seq, now)
            step.finished.append(self._record(seq, reason, now))
            if not kept:
                gone.append((seq, reason))
        self._let_go(gone)

    def _let_go(self, gone: list[tuple[Sequence, Any]]) -> None:
        """Give back all that these hold, and forget them."""
        releases = []
        for seq, reason in gone:
            why: Any = reason if reason in ("abort", "error") else "finish"
            releases.append(Release(seq.id, seq.device_blocks(), why))
            if seq.host_blocks:
                self.state.swap.give(tuple(seq.host_blocks.values()))
                seq.host_blocks.clear()
            seq.table.clear()
            self.state.move(seq, Status.FINISHED)
        if releases:
            self.hooks.release(releases=tuple(releases))

    def _record(self, seq: Sequence, reason: FinishReason, now: float) -> Finished:
        view = seq.view
        return Finished(
            request_id=view.request_id,
            sequence_id=view.id,
            branch=view.branch,
            client_id=view.client_id,
            num_prompt_tokens=view.num_prompt_tokens,
            num_cached_tokens=seq.num_cached_tokens,
            num_output_tokens=len(seq.times),
            finish_reason=reason,
            arrival_s=view.arrival_s,
            first_seen_s=seq.first_seen_s,
            first_scheduled_s=seq.first_scheduled_s,
            token_times_s=tuple(seq.times),
            finished_s=now,
            num_preemptions=view.num_preemptions,
            service_class=view.service_class,
            deadline_s=view.deadline_s,
            tpot_s=view.tpot_s,
        )
