"""``scheduler=priority``: the most important request first (smaller ``priority``), with ageing; may preempt for a newcomer.

Source: priority scheduling with ageing is the classic of operating systems (see Silberschatz et al., "Operating System Concepts");
iteration-level as in Orca, decodes first as in Sarathi-Serve.

Order: ``priority`` less one level for every ``age_s`` seconds since arrival, then arrival; the plan lists everybody in this
order, so the least important give way. Fairness: whoever arrives more than ``age_s`` x (difference in priority) later ranks
behind, so a request waits at most that long plus the work that was there by then: with a step of s seconds, age_s x difference
/ s + T steps, T the tokens of all requests that rank before it. With ``age_s: null`` there is no bound. May preempt for a
newcomer: yes (``preempt``), for blocks and for its row, but only running sequences that rank at least one whole level below it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, Plan, SequenceView, View, one_token
from plugins.schedulers.packing import Room, in_order

_priority = attrgetter("priority")


@attrs.define(eq=False)
class PriorityScheduler:
    """Decodes get their token first (it is cheap), then prefills under way and newcomers by rank.

    One token of each step is a running sequence's: then the plan holds a chunk that may preempt, whatever the allocator says to
    newcomers.
    """

    age_s: float | None = attrs.field(default=60.0, validator=attrs.validators.optional(attrs.validators.gt(0)))  # type: ignore[arg-type]
    preempt: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
    max_chunk: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    def _rank(self, sequence: SequenceView) -> float:
        """In levels, smaller first. All ages grow alike, so the order of two never changes: ``now`` is left out."""
        return sequence.priority + (sequence.queued_s / self.age_s if self.age_s else 0.0)

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        room = Room(view, self.watermark, self.max_chunk)
        running = list(view.running)
        ranks = [self._rank(sequence) for sequence in running]
        ranked = [(ranks[i], running[i]) for i in sorted(range(len(running)), key=ranks.__getitem__)]
        decodes = room.decodes(running)
        prompts = self._prompts(view, room, ranked) if room.tokens else iter(())
        chunks: list[Chunk] = []
        next_one = next(prompts, None)
        for rank, sequence in ranked:
            if sequence.num_tokens - sequence.num_computed_tokens != 1:
                continue
            while next_one is not None and next_one[0] <= rank:
                chunks.append(next_one[1])
                next_one = next(prompts, None)
            if decodes:
                decodes -= 1
                chunks.append(one_token(sequence.id))
        while next_one is not None:
            chunks.append(next_one[1])
            next_one = next(prompts, None)
        return Plan(tuple(chunks))

    def _prompts(
        self, view: View, room: Room, ranked: list[tuple[float, SequenceView]]
    ) -> Iterator[tuple[float, Chunk]]:
        """Prefills under way and newcomers, by rank, until the step is full or a newcomer finds no room."""
        below = _Below(ranked)
        under_way = deque((rank, s) for rank, s in ranked if s.num_tokens - s.num_computed_tokens != 1)
        kept = int(
            len(under_way) == len(ranked) > 0
        )  # no decode: a newcomer without blocks must not take the whole step
        room.tokens -= kept
        for sequence in in_order(self._candidates(view, room, ranked), self._rank):
            rank = self._rank(sequence)
            while under_way and under_way[0][0] <= rank and room.tokens + kept:
                room.tokens, kept = room.tokens + kept, 0
                yield self._go_on(room, *under_way.popleft())
            fits = room.fits(sequence)
            if not fits and not (self.preempt and room.tokens and below.displace(rank + 1, room, sequence)):
                break
            yield rank, Chunk(sequence.id, room.take_new(sequence), not fits)
        room.tokens += kept
        while under_way and room.tokens:
            yield self._go_on(room, *under_way.popleft())

    def _candidates(self, view: View, room: Room, ranked: list[tuple[float, SequenceView]]) -> Sequence[SequenceView]:
        """Who may start: nobody where all rows are taken and none that waits can rank a level above the least important of them."""
        waiting = view.waiting
        if waiting and room.rows < 1:
            oldest = waiting[0].queued_s / self.age_s if self.age_s else 0.0  # the queue is in this order
            if not self.preempt or ranked[-1][0] < min(map(_priority, waiting)) + oldest + 1:
                return ()
        return waiting

    @staticmethod
    def _go_on(room: Room, rank: float, prefill: SequenceView) -> tuple[float, Chunk]:
        return rank, Chunk(prefill.id, room.take_running(prefill), True)


class _Below:
    """Running sequences from the least important up, as far as newcomers have not claimed their place."""

    def __init__(self, ranked: list[tuple[float, SequenceView]]):
        self._ranked = ranked
        self._left = len(ranked)  # the least important last

    def displace(self, rank: float, room: Room, sequence: SequenceView) -> bool:
        """Whether those that rank at ``rank`` or below make room for a newcomer; if so they are claimed and the room is there."""
        rows, free, left = room.rows, room.free, self._left
        needed = room.missing_blocks(sequence)
        while rows < 1 or free < needed:
            left -= 1
            if left < 0 or self._ranked[left][0] < rank:
                return False
            rows += 1
            if free < needed:
                free += self._ranked[left][1].private_blocks
        self._left, room.rows, room.free = left, rows, free
        return True
