"""Beam search: the beams of one request advance together, by fork and release of ordinary sequences.

The search is the one of transformers' ``generate(num_beams=width, do_sample=False, early_stopping=False)``, after Graves,
"Sequence Transduction with Recurrent Neural Networks" (2012), with a length penalty as in Wu et al., "Google's Neural Machine
Translation System" (2016) without its constant: the score of a finished answer of L tokens (eos counts) is its summed log
probability / L ** length_penalty. Of all continuations the best (1 + number of eos tokens, at least 2) * width are looked at;
those among the first ``width`` that end are answers, the best ``width`` that do not end go on. It is over at ``max_tokens``,
or when ``width`` answers are known and the best beam, scored at the length it has, is no better than the worst of them.

How it runs: each beam is a sequence that schedulers, allocators and preemption policies treat like any other. The executor
gives the best log probabilities at its end. A beam that has them while a sibling has not (it was preempted, or its prompt is
cut differently) is held: it leaves every queue, keeps its KV while nobody needs the blocks, and its candidates whatever
happens to the KV. When the last sibling has its own, the winners are chosen: a parent goes on as its first child, further
children fork from it, beams without a child are released. A child that finds no room, or whose parent lost its KV, waits
like an ordinary sequence and is computed again. So no pool, however small, changes the answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs

from core.scratch import Step
from core.state import Sequence, State, Status, put_num_tokens
from core.types import (
    UNSAMPLABLE,
    Finished,
    FinishReason,
    ModelInfo,
    Output,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
    failure,
)

log = logging.getLogger(__name__)

NO_LOGPROBS = UNSAMPLABLE + "beam search needs log probabilities, and this executor gives none"


class Beam:
    """One living beam: its sequence, its summed log probability, and the continuations it offers (None: not computed yet)."""

    __slots__ = ("seq", "score", "chosen", "offers")

    def __init__(self, seq: Sequence, score: float = 0.0, chosen: tuple[TokenLogprobs, ...] = ()):
        self.seq, self.score, self.chosen = seq, score, chosen
        self.offers: TokenLogprobs | None = None


class Continuation(NamedTuple):
    """A beam and one token more: a continuation."""

    score: float
    beam: Beam
    token: int


class Answer(NamedTuple):
    """A finished answer. ``tokens`` holds its eos token, if one ended it."""

    score: float
    tokens: tuple[int, ...]
    reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]


class Search:
    """The beams of one request, best first, and the answers found so far. Knows nothing of blocks."""

    def __init__(self, root: Sequence, params: SamplingParams, eos: frozenset[int]):
        assert params.beam_width is not None and params.max_tokens is not None
        self.width, self.n, self.max_tokens = params.beam_width, params.n, params.max_tokens
        self.length_penalty = params.length_penalty
        self.logprobs = params.logprobs  # as the request asked for them
        self.eos = frozenset() if params.ignore_eos else eos
        self.num_looked_at = max(2, 1 + len(self.eos)) * self.width
        self.beams = [Beam(root)]
        self.answers: list[Answer] = []
        self.num_preemptions = 0  # of beams that are gone
        self.error: str | None = None
        self.over = False

    @property
    def ready(self) -> bool:
        """Every beam has its offers."""
        return all(beam.offers is not None for beam in self.beams)

    def beam_of(self, seq: Sequence) -> Beam:
        return next(beam for beam in self.beams if beam.seq is seq)

    def choose(self) -> list[Continuation]:
        """The beams of the next round, best first; none: the search is over. Answers found on the way are kept."""
        offered = [
            Continuation(beam.score + value, beam, token)
            for beam in self.beams
            for token, value in (beam.offers.top if beam.offers is not None else ())
        ]
        offered.sort(key=lambda each: -each.score)
        one = self.beams[0].seq
        length = len(one.tokens) - one.view.num_prompt_tokens + 1
        scale, last = float(length) ** self.length_penalty, length >= self.max_tokens
        winners: list[Continuation] = []
        for place, each in enumerate(offered[: self.num_looked_at]):
            if not last and each.token not in self.eos:
                winners.append(each)
            elif place < self.width:
                self.answers.append(self._answer(each, scale))
        self.answers = sorted(self.answers, key=lambda answer: -answer.score)[: self.width]
        del winners[self.width :]
        known = len(self.answers) == self.width
        if winners and known and not winners[0].score / scale > self.answers[-1].score:
            return []
        return winners

    def _answer(self, each: Continuation, scale: float) -> Answer:
        seq = each.beam.seq
        tokens = (*seq.tokens[seq.view.num_prompt_tokens :], each.token)
        reason: FinishReason = "stop" if each.token in self.eos else "length"
        return Answer(each.score / scale, tokens, reason, self.chosen(each))

    def chosen(self, each: Continuation) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of a beam's tokens with the new one, as far as the request wants them."""
        offers = each.beam.offers
        if self.logprobs is None or offers is None:
            return ()
        value = next(value for token, value in offers.top if token == each.token)
        rank = 1 + sum(1 for _, other in offers.top if other > value)
        return (*each.beam.chosen, TokenLogprobs(each.token, value, offers.top[: self.logprobs], rank))


@attrs.frozen(slots=True)
class Hands:
    """What the beams need of commit."""

    let_go: Callable[[list[tuple[Sequence, Any]]], None]  # give back all that these hold, and forget them
    fork: Callable[[Step, list[tuple[Sequence, list[Sequence]]]], None]  # children from their parent's blocks
    record: Callable[[Sequence, FinishReason, float], Finished]
    next_id: Callable[[], int]


class Beams:
    """The searches of one engine. Between steps it holds nothing: a search is held by its sequences."""

    def __init__(self, state: State, builder: Any, model: ModelInfo, tokenizer: Any, hands: Hands):
        self.state, self.builder, self.model, self.tokenizer, self.hands = state, builder, model, tokenizer, hands
        self.touched: dict[int, Search] = {}  # by request id, in this step

    def open(self, root: Sequence) -> None:
        """Begin the search of a new request."""
        root.beams = search = Search(root, root.params, self.model.eos_token_ids)
        root.params = attrs.evolve(root.params, temperature=0.0, logprobs=search.num_looked_at)
        root.wants_text = True  # its tokens are looked at one by one

    def take(self, seq: Sequence, output: StepOutput, index: int) -> None:
        """The offers of one beam, from sample ``index`` of the step."""
        search = seq.beams
        self.touched[seq.request.id] = search
        error = output.errors.get(index) if output.errors else None
        offers = output.logprobs[index] if output.logprobs else None
        if error is not None or offers is None:
            search.error = error or NO_LOGPROBS
        else:
            search.beam_of(seq).offers = offers

    def settle(self, step: Step, now: float) -> None:
        """At the end of commit: searches whose beams are all computed advance or end, the others wait for the rest."""
        forking: list[tuple[Sequence, list[Sequence]]] = []
        touched, self.touched = self.touched, {}
        for search in touched.values():
            if search.error is not None:
                self.end(step, search, "error", now, search.error)
            elif search.ready:
                winners = search.choose()
                if winners:
                    forking += self._advance(search, winners, now)
                else:
                    self._finish(step, search, now)
            else:
                self._hold(search)
        if forking:
            self.hands.fork(step, forking)

    def _hold(self, search: Search) -> None:
        for beam in search.beams:
            if beam.offers is not None and beam.seq.status is Status.RUNNING:
                self.state.move(beam.seq, Status.HELD)

    def _advance(
        self, search: Search, winners: list[Continuation], now: float
    ) -> list[tuple[Sequence, list[Sequence]]]:
        """The next round's beams. Gives who forks: parents that hold KV, each with the children beyond its first."""
        parents = {id(each.beam) for each in winners}
        losers = [beam for beam in search.beams if id(beam) not in parents]
        search.num_preemptions += sum(beam.seq.view.num_preemptions for beam in losers)
        self.hands.let_go([(beam.seq, "finish") for beam in losers])
        free = [branch for branch in range(search.width) if branch not in {b.seq.view.branch for b in search.beams}]
        free = [beam.seq.view.branch for beam in losers] + free
        beams: list[Beam] = []
        families: dict[int, tuple[Sequence, list[Sequence]]] = {}
        for each in winners:  # children first: they begin with what their parent is now
            parent = each.beam.seq
            if id(each.beam) in families:
                child = self._child(parent, free.pop(0))
                families[id(each.beam)][1].append(child)
            else:
                child = parent
                families[id(each.beam)] = (parent, [])
            beams.append(Beam(child, each.score, search.chosen(each)))
        for each, beam in zip(winners, beams, strict=True):
            beam.seq.append(each.token, now)
        search.beams = beams
        for parent, _ in families.values():
            self._go_on(parent)
        return [(parent, children) for parent, children in families.values() if children and parent.table]

    def _child(self, parent: Sequence, branch: int) -> Sequence:
        """A waiting copy of a beam, without KV."""
        child = Sequence(
            parent.request, parent.params, parent.seed, self.state.pool, id=self.hands.next_id(), branch=branch
        )
        child.tokens.extend(parent.tokens[len(child.tokens) :])
        child.times.extend(parent.times)
        put_num_tokens(child.view, len(child.tokens))
        child.first_seen_s, child.first_scheduled_s = parent.first_seen_s, parent.first_scheduled_s
        child.num_cached_tokens = parent.num_cached_tokens
        child.set_predicted(parent.view.predicted_output_tokens)
        child.beams = parent.beams
        self.state.add(child)
        return child

    def _go_on(self, seq: Sequence) -> None:
        """A parent with its new token: it runs on; one that was held without its KV, or finds no row, waits."""
        state = self.state
        if seq.status is not Status.HELD:
            return
        if seq.table and len(state.running) < state.limits.max_num_seqs:
            state.move(seq, Status.RUNNING)
            self.builder.set_row(seq.row, seq.table)
        else:
            state.move(seq, Status.WAITING)

    # ------------------------------------------------------------------------------------------- endings

    def _finish(self, step: Step, search: Search, now: float) -> None:
        """All at once: the ``n`` best answers, in order."""
        answers = search.answers[: search.n]
        try:
            texts = [self._text(search.beams[0].seq.params, answer) for answer in answers]
        except Exception as error:
            log.warning("request %s: making text failed", search.beams[0].seq.request.id, exc_info=error)
            self.end(step, search, "error", now, failure(error, "making text"))
            return
        step.num_sampled += sum(len(answer.tokens) for answer in answers)
        self._close(step, search, now, list(zip(answers, texts, strict=True)))

    def end(self, step: Step, search: Search, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End a search without an answer, all of its beams; a second call does nothing."""
        if not search.over:
            self._close(step, search, now, [(Answer(0.0, (), reason, ()), "")] * search.n, error)

    def _close(
        self, step: Step, search: Search, now: float, ends: list[tuple[Answer, str]], error: str | None = None
    ) -> None:
        search.over = True
        seq = search.beams[0].seq
        view = seq.view
        preemptions = search.num_preemptions + sum(beam.seq.view.num_preemptions for beam in search.beams)
        for branch, (answer, text) in enumerate(ends):
            step.outputs.append(
                Output(
                    view.request_id,
                    view.id,
                    branch,
                    answer.tokens,
                    text,
                    answer.reason,
                    error=error,
                    num_prompt_tokens=view.num_prompt_tokens,
                    num_cached_tokens=seq.num_cached_tokens,
                    logprobs=answer.logprobs,
                )
            )
            step.finished.append(
                attrs.evolve(
                    self.hands.record(seq, answer.reason, now),
                    branch=branch,
                    num_output_tokens=len(answer.tokens),
                    token_times_s=(now,) * len(answer.tokens),  # nothing was delivered before
                    num_preemptions=0 if branch else preemptions,  # of the whole search, counted once
                )
            )
        reason: Any = ends[0][0].reason
        self.hands.let_go([(beam.seq, reason) for beam in search.beams])

    def _text(self, params: SamplingParams, answer: Answer) -> str:
        if self.tokenizer is None or not params.detokenize:
            return ""
        stream = self.tokenizer.stream(params.skip_special_tokens)
        shown = answer.tokens[:-1] if answer.reason == "stop" else answer.tokens
        return "".join([stream.push(token) for token in shown]) + stream.flush()
