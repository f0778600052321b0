"""Which running sequences are pushed out: shared by the preemption policies, whose own part is the kind (swap or recompute).

Candidates are those that the plan leaves out, then those in it behind the first chunk that does not fit; with ``choose`` other than
``youngest`` also those ahead of it (the eviction then says ``ahead``), but never all of the plan. ``choose`` orders them::

    youngest       unplanned ones first, the last to arrive first, then from the plan's end: what the scheduler wants least
    oldest         the first to arrive first: it pushes out an old request for a younger one, by name
    longest        most tokens first: one victim makes much room
    fewest_blocks  fewest blocks of its own first: least is lost
    most_slack     furthest from its next due token first (deadline_s, tpot_s); without targets the youngest

Rules for all: no more victims than needed (one that turns out unnecessary when a later one is chosen stays); branches of one
request go together, before anybody else, while more is needed, since the blocks they share come free with the last of them; and
one that was pushed out lately and has not got ``min_progress`` tokens since then goes last, so that nobody bounces. If all that
could go are such, the order is ``youngest``, with which the oldest always advances: so a preemption that repeats had
``min_progress`` tokens of progress between, and their number is bounded by the tokens of the request / ``min_progress`` plus
the blocks of those older than it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs

from core.types import HOLE, Chunk, Eviction, EvictionKind, Plan, SequenceView, Shortfall, View

CHOICES = ("youngest", "oldest", "longest", "fewest_blocks", "most_slack")


def choose_field() -> Any:
    return attrs.field(default="youngest", validator=attrs.validators.in_(CHOICES))


def progress_field() -> Any:
    """Tokens that a preempted sequence gets before it may be pushed out again while another can go."""
    return attrs.field(default=16, validator=[attrs.validators.instance_of(int), attrs.validators.ge(0)])


def evictions(
    view: View,
    plan: Plan,
    shortfall: Shortfall,
    choose: str,
    min_progress: int,
    kind_of: Callable[[SequenceView], EvictionKind],
) -> tuple[Eviction, ...] | None:
    """Evictions that make the plan fit, as far as one can tell (blocks_missing is a lower bound: core asks again); None: nobody
    can go."""
    fitting = {chunk.sequence for chunk in plan.chunks[: shortfall.num_fitting]}
    search = _Search(view, plan, shortfall, kind_of)
    for sequence in _candidates(view, plan, shortfall, choose, min_progress):
        if search.enough():
            break
        if sequence.id not in search.chosen and search.may_go(sequence):
            search.take(sequence)
    found = search.minimal()
    return tuple(Eviction(s.id, search.kinds[s.id], s.id in fitting) for s in found) or None


def _candidates(view: View, plan: Plan, shortfall: Shortfall, choose: str, min_progress: int) -> list[SequenceView]:
    """Running sequences in the order in which they should go."""
    running = {sequence.id: sequence for sequence in view.running}
    planned = {chunk.sequence for chunk in plan.chunks}
    first_to_go = max(1, shortfall.num_fitting)  # the most wanted chunk stays, or the step would compute nothing
    behind = [running[c.sequence] for c in reversed(plan.chunks[first_to_go:]) if c.sequence in running]
    order = [s for s in reversed(view.running) if s.id not in planned] + behind
    unsettled = {s.id for s in view.running if _is_unsettled(s, min_progress)}
    if choose != "youngest":
        ahead = [running[c.sequence] for c in reversed(plan.chunks[:first_to_go]) if c.sequence in running]
        by_choice = sorted([s for s in order + ahead if s.id not in unsettled], key=_key(choose, view))
        chosen = {s.id for s in by_choice}
        return by_choice + [s for s in order if s.id not in chosen]
    return [s for s in order if s.id not in unsettled] + [s for s in order if s.id in unsettled]


def _is_unsettled(sequence: SequenceView, min_progress: int) -> bool:
    return bool(sequence.num_preemptions) and sequence.num_tokens - sequence.num_tokens_at_preemption < min_progress


def _key(choose: str, view: View) -> Callable[[SequenceView], tuple[float, ...]]:
    """Smallest goes first; ties by age, the youngest first."""
    keys: dict[str, Callable[[SequenceView], float]] = {
        "oldest": lambda s: s.arrival_s,
        "longest": lambda s: -s.num_tokens,
        "fewest_blocks": lambda s: s.private_blocks,
        "most_slack": lambda s: -_slack_s(s, view.now),
    }
    key = keys[choose]
    newest_first = -1.0 if choose != "oldest" else 1.0
    return lambda s: (key(s), newest_first * s.arrival_s, newest_first * s.id)


def _slack_s(sequence: SequenceView, now: float) -> float:
    """Seconds until its next token is due; infinite without a target."""
    if sequence.first_token_s is None:
        return sequence.deadline_s - now if sequence.deadline_s is not None else float("inf")
    if sequence.tpot_s is None:
        return float("inf")
    return sequence.first_token_s + sequence.tpot_s * sequence.num_output_tokens - now


class _Search:
    """The victims so far, and what they free: their own blocks, shared ones whose last holder goes, and blocks no longer asked
    for. Every step of it costs the blocks of one sequence."""

    def __init__(self, view: View, plan: Plan, shortfall: Shortfall, kind_of: Callable[[SequenceView], EvictionKind]):
        self.view, self._kind_of = view, kind_of
        self.chunks = {chunk.sequence: chunk for chunk in plan.chunks}
        self.blocks, self.rows = shortfall.blocks_missing, shortfall.rows_missing
        if self.rows:
            self.blocks = 0  # rows are what is missing; blocks are asked for afterwards
        self.kept = len(plan.chunks)
        self.behind = {chunk.sequence for chunk in plan.chunks[max(1, shortfall.num_fitting) :]}
        self.chosen: dict[int, SequenceView] = {}
        self.kinds: dict[int, EvictionKind] = {}
        self._freed = 0
        self._own: dict[int, int] = {}  # what a victim frees whoever else goes
        self._shared: dict[int, list[int]] = {}  # blocks that come free when all who hold them have gone
        self._dropped = Counter[int]()

    def enough(self) -> bool:
        return len(self.chosen) >= self.rows and self._freed >= self.blocks

    def may_go(self, sequence: SequenceView) -> bool:
        """Not the last chunk of the plan."""
        return sequence.id not in self.chunks or self.kept > 1

    def take(self, sequence: SequenceView) -> None:
        """Choose a victim, and after it its sibling branches as far as they are needed."""
        self._add(sequence)
        if sequence.n == 1:
            return
        for sibling in reversed(self.view.running):
            same = sibling.request_id == sequence.request_id and sibling.id not in self.chosen
            if same and not self.enough() and self.may_go(sibling) and self._is_behind(sibling):
                self._add(sibling)

    def _is_behind(self, sequence: SequenceView) -> bool:
        """Whether it may go without saying ``ahead``: siblings follow only from where the scheduler put them behind."""
        return sequence.id not in self.chunks or sequence.id in self.behind

    def _add(self, sequence: SequenceView) -> None:
        id, refs = sequence.id, self.view.block_refs
        kind = self._kind_of(sequence)
        own, shared = 0, []
        for block in sequence.block_table:
            if block == HOLE:
                continue
            if refs[block] == 1:
                own += 1
            elif kind == "recompute":  # a swap leaves shared blocks where they are
                shared.append(block)
        own += _asked(sequence, self.chunks.get(id), self.view.block_size)
        self.chosen[id], self.kinds[id], self._own[id], self._shared[id] = sequence, kind, own, shared
        self.kept -= id in self.chunks
        self._dropped.update(shared)
        self._freed += self._share(id)

    def _share(self, id: int) -> int:
        """What would not be free without this victim."""
        refs, dropped = self.view.block_refs, self._dropped
        return self._own[id] + sum(1 for block in self._shared[id] if dropped[block] == refs[block])

    def minimal(self) -> list[SequenceView]:
        """Without those that the later ones made unnecessary, and without those that free nothing; the first chosen first.

        Where nobody frees anything, because branches share what they hold, the first goes alone: dropping its references may
        let the last owner write in place.
        """
        wanted = min(self.blocks, self._freed)
        if not wanted and not self.rows:
            return list(self.chosen.values())[:1]
        for id in list(self.chosen)[:-1]:
            share = self._share(id)
            if len(self.chosen) > max(1, self.rows) and self._freed - share >= wanted:
                self._freed -= share
                self._dropped.subtract(self._shared[id])
                del self.chosen[id]
        return list(self.chosen.values())


def _asked(sequence: SequenceView, chunk: Chunk | None, size: int) -> int:
    """New blocks that the sequence's own chunk asks for."""
    if chunk is None:
        return 0
    end = min(sequence.num_computed_tokens + chunk.num_tokens, sequence.num_tokens)
    return max(0, -(-end // size) - len(sequence.block_table))  # one that runs has no holes
