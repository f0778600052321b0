"""``scheduler=prefix_aware``: newcomers with the longest prefix in the cache first, before it is evicted, with a bound on being
passed.

Sources: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024 (longest prefix match); the
fairness bound after Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025.

Order: running sequences by arrival as in ``chunked`` (the youngest give way); newcomers by cached tokens (``view.cached_tokens``, a
bounded head of the queue), then by arrival. Fairness: a request that ``max_passed`` later arrivals were started ahead of is not
passed again: it starts within max_passed starts + T steps, T the tokens of all that had arrived before it. May preempt for a
newcomer: never. Without an allocator that shares prefixes it is ``chunked``.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, Plan, SequenceView, View
from plugins.schedulers.packing import Room, continue_running, in_order, start_waiting


@attrs.define(eq=False)
class PrefixAwareScheduler:
    """Remembers for each waiting request how many later ones were planned ahead of it."""

    max_passed: int = attrs.field(
        default=32, validator=[attrs.validators.instance_of(int), attrs.validators.ge(0)]
    )  # starts
    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
    max_chunk: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))
    _passed: dict[int, int] = attrs.field(init=False, factory=dict)

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        room = Room(view, self.watermark, self.max_chunk)
        chunks = continue_running(room, view.running)
        if view.waiting and room.tokens and room.rows:
            chunks += self._newcomers(view, room)
        return Plan(tuple(chunks))

    def _newcomers(self, view: View, room: Room) -> list[Chunk]:
        cached, passed = view.cached_tokens, self._passed
        if not cached:
            return start_waiting(room, view.waiting)
        head = view.waiting[: view.max_num_seqs]  # what was looked up
        place = {sequence.id: i for i, sequence in enumerate(head)}
        # computed (a turn of a session), or found in the cache
        best = in_order(head, lambda s: -float(s.num_computed_tokens or cached.get(s.id, 0)))
        chunks: list[Chunk] = []
        started: set[int] = set()
        first = 0  # the oldest that was not started: passed at least as often as anybody behind it
        while first < len(head):
            ahead = sum(1 for chunk in chunks if place[chunk.sequence] > first)
            if passed.get(head[first].id, 0) + ahead >= self.max_passed:
                sequence = head[first]
            else:
                sequence = next(s for s in best if s.id not in started)
            if not room.fits(sequence):
                break
            chunks.append(Chunk(sequence.id, room.take_new(sequence)))
            started.add(sequence.id)
            while first < len(head) and head[first].id in started:
                first += 1
        self._note(started, head)
        return chunks

    def _note(self, planned: set[int], head: Sequence[SequenceView]) -> None:
        """Count for everyone the later arrivals that were planned now, and forget whom nobody waits for.

        A planned one may lose its chunk for lack of blocks and wait on: it keeps its count.
        """
        later, passed = 0, {}
        for sequence in reversed(head):
            count = self._passed.get(sequence.id, 0)
            if sequence.id in planned:
                later += 1
            else:
                count += later
            if count:
                passed[sequence.id] = count
        self._passed = passed
