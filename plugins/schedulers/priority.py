"""``scheduler=priority``: the most important request first (smaller ``priority``), with ageing; may preempt for a newcomer.

Source: priority scheduling with ageing is the classic of operating systems (see Silberschatz et al., "Operating System Concepts");
iteration-level as in Orca, decodes first as in Sarathi-Serve.

Order: ``priority`` less one level for every ``age_s`` seconds since arrival, then arrival; the plan lists everybody in this order, so
the least important give way. Fairness: whoever arrives more than ``age_s`` x (difference in priority) later ranks behind, so a request
waits at most that long plus the work that was there by then: with a step of s seconds, age_s x difference / s + T steps, T the tokens of
all requests that rank before it. With ``age_s: null`` there is no bound. May preempt for a newcomer: yes (``preempt``), for blocks and for
its row, but only running sequences that rank at least one whole level below it.
"""

from __future__ import annotations

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, Plan, SequenceView, View, one_token
from plugins.schedulers.packing import Room, in_order


@attrs.define(eq=False)
class PriorityScheduler:
    """Decodes get their token first (it is cheap), then prefills under way and newcomers by rank."""

    age_s: float | None = attrs.field(default=60.0, validator=attrs.validators.optional(attrs.validators.gt(0)))
    preempt: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
    max_chunk: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))

    def _rank(self, sequence: SequenceView) -> float:
        """In levels, smaller first. All ages grow alike, so the order of two never changes: ``now`` is left out."""
        return sequence.priority + (sequence.queued_s / self.age_s if self.age_s else 0.0)

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        room = Room(view, self.watermark, self.max_chunk)
        running = sorted([(self._rank(s), s.queued_s, s.id, s) for s in view.running])
        decodes = room.decodes([entry[3] for entry in running])
        planned: list[tuple[float, float, int, Chunk]] = []
        prefills = [entry for entry in running if entry[3].num_tokens - entry[3].num_computed_tokens != 1]
        if view.waiting and room.tokens:
            planned += self._prompts(view, room, prefills, running)
        else:
            planned += [(*e[:3], Chunk(e[2], room.take_running(e[3]), True)) for e in prefills if room.tokens]
        for rank, queued, id, sequence in running:
            if decodes and sequence.num_tokens - sequence.num_computed_tokens == 1:
                decodes -= 1
                planned.append((rank, queued, id, one_token(id)))
        planned.sort()
        return Plan(tuple([entry[3] for entry in planned]))

    def _prompts(self, view: View, room: Room, prefills: list, running: list) -> list[tuple[float, float, int, Chunk]]:
        """Prefills under way and newcomers, by rank, until the step is full or a newcomer finds no room."""
        planned = []
        below = _Below(running)
        under_way = iter(prefills)
        next_one = next(under_way, None)
        for sequence in in_order(view.waiting, self._rank):
            rank = self._rank(sequence)
            while next_one is not None and next_one[0] <= rank and room.tokens:
                planned.append((*next_one[:3], Chunk(next_one[2], room.take_running(next_one[3]), True)))
                next_one = next(under_way, None)
            fits = room.fits(sequence)
            if not fits and not (self.preempt and room.tokens and below.displace(rank + 1, room, sequence)):
                break
            planned.append((rank, sequence.queued_s, sequence.id, Chunk(sequence.id, room.take_new(sequence), not fits)))
        while next_one is not None and room.tokens:
            planned.append((*next_one[:3], Chunk(next_one[2], room.take_running(next_one[3]), True)))
            next_one = next(under_way, None)
        return planned


class _Below:
    """Running sequences from the least important up, as far as newcomers have not claimed their place."""

    def __init__(self, running: list):
        self._left = list(running)  # ranked, the least important last

    def displace(self, rank: float, room: Room, sequence: SequenceView) -> bool:
        """Whether those that rank at ``rank`` or below make room for a newcomer; if so they are claimed and the room is there."""
        rows, free, count = room.rows, room.free, 0
        needed = room.missing_blocks(sequence)
        while rows < 1 or free < needed:
            count += 1
            if count > len(self._left) or self._left[-count][0] < rank:
                return False
            rows += 1
            free += self._left[-count][3].private_blocks
        del self._left[len(self._left) - count :]
        room.rows, room.free = rows, free
        return True
