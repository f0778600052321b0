"""``scheduler=fair``: whoever was served least is served next, by client: virtual token counters (VTC).

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

Order: running sequences by arrival as in ``chunked`` (the youngest give way); newcomers of the client with the smallest
counter, each client's own by arrival. A counter grows by ``input_weight`` for each prompt token when a request first runs and
by ``output_weight`` for each token delivered; a client that comes back is lifted to the least counter of those that have work,
so idling saves nothing up. Fairness: of two clients that both always have requests waiting, the counters differ by at most 2
max(input_weight x L, output_weight x M), L the longest prompt and M the output tokens that fit in the pool at once. So a
request starts, at the latest, when every other client was served so much more than its own: within (clients - 1) x 2 max(...) /
output_weight + T steps, T the tokens of all that had arrived before it; clients without number have no bound. May preempt for
a newcomer: never. Requests without ``client_id`` are one client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import attrs

from core.hookspecs import hookimpl
from core.types import Chunk, Plan, SequenceView, StepReport, View
from plugins.schedulers.packing import Room, continue_running

_client = attrgetter("client_id")


@attrs.define(eq=False)
class FairScheduler:
    """The paper's weights: an output token costs twice an input token."""

    input_weight: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    output_weight: float = attrs.field(default=2.0, validator=attrs.validators.gt(0))
    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
    max_chunk: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))
    _counters: dict[str, float] = attrs.field(init=False, factory=dict)
    _clients: dict[int, str] = attrs.field(init=False, factory=dict)  # request id -> client, of what this step computes
    _first: dict[int, tuple[str, int]] = attrs.field(
        init=False, factory=dict
    )  # planned for the first time: client, prompt
    _active: set[str] = attrs.field(init=False, factory=set)  # clients that had work a step ago
    _least: float = attrs.field(
        init=False, default=0.0
    )  # smallest counter of a client with work, now or when there last was any

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        room = Room(view, self.watermark, self.max_chunk)
        self._clients = {sequence.request_id: sequence.client_id for sequence in view.running}
        self._lift({*map(_client, view.waiting), *self._clients.values()})
        chunks = continue_running(room, view.running)
        if view.waiting and room.tokens and room.rows:
            chunks += self._newcomers(room, view.waiting)
        return Plan(tuple(chunks))

    def _newcomers(self, room: Room, waiting: Sequence[SequenceView]) -> list[Chunk]:
        chunks: list[Chunk] = []
        queues: dict[str, deque[SequenceView]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.client_id, deque()).append(sequence)
        self._first = {}
        counters = {client: self._counters[client] for client in queues}
        while counters:
            client = min(counters, key=lambda name: (counters[name], queues[name][0].queued_s, queues[name][0].id))
            sequence = queues[client].popleft()
            if not room.fits(sequence):
                break  # nobody is skipped: blocks that become free are kept for the least served
            chunks.append(Chunk(sequence.id, room.take_new(sequence)))
            self._clients[sequence.request_id] = client
            if not sequence.branch and not sequence.num_output_tokens and not sequence.num_preemptions:
                self._first[sequence.id] = (client, sequence.num_prompt_tokens)
                counters[client] += self.input_weight * sequence.num_prompt_tokens
            if not queues[client]:
                del counters[client]
        return chunks

    def _lift(self, active: set[str]) -> None:
        """A client that comes (back) starts at the least counter of those that have work, or higher if its own is."""
        counters = self._counters
        had_work = active & self._active
        self._least = min((counters[client] for client in had_work), default=self._least)
        for client in active - had_work:
            counters[client] = max(counters.get(client, 0.0), self._least)
        self._active = active
        # an idle client whose counter is no higher would be lifted anyway: forget it
        for client in [name for name, value in counters.items() if name not in active and value <= self._least]:
            del counters[client]

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        """Charge what was really started and delivered: a plan may have lost chunks."""
        counters, clients = self._counters, self._clients
        if self._first:
            for chunk in report.plan.chunks:
                if chunk.sequence in self._first:
                    client, num_prompt_tokens = self._first[chunk.sequence]
                    counters[client] += self.input_weight * num_prompt_tokens
            self._first = {}
        for output in report.outputs:
            if output.token_ids and output.request_id in clients:
                counters[clients[output.request_id]] += self.output_weight * len(output.token_ids)
