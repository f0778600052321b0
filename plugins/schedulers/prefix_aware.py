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

import attrs

from core.hookspecs import hookimpl
from core.types import Plan, SequenceView, View
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

    def _newcomers(self, view: View, room: Room) -> list:
        cached, passed = view.cached_tokens, self._passed
        if not cached:
            return start_waiting(room, view.waiting)

        def order(sequence: SequenceView) -> float:
            """One that was passed too often first, then by what is cached for it: computed (after a stall), or found."""
            if passed.get(sequence.id, 0) >= self.max_passed:
                return float("-inf")
            return -float(sequence.num_computed_tokens or cached.get(sequence.id, 0))

        head = view.waiting[: view.max_num_seqs]  # what was looked up
        new = start_waiting(room, in_order(head, order))
        self._note({chunk.sequence for chunk in new}, head)
        return new

    def _note(self, started: set[int], head: list[SequenceView]) -> None:
        """Count for everyone the later arrivals that were started now, and forget whom nobody waits for."""
        later, passed = 0, {}
        for sequence in reversed(head):
            if sequence.id in started:
                later += 1
            elif later or sequence.id in self._passed:
                passed[sequence.id] = self._passed.get(sequence.id, 0) + later
        self._passed = passed
