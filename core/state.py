"""What the engine knows: its sequences, the two queues, and the one table of allowed status moves.

``State`` holds facts and keeps them consistent; it decides nothing. Core writes through ``Sequence``; policies see the same facts
through the read-only ``SequenceView`` and ``View`` that hang off it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum
from types import MappingProxyType
from typing import Any

import attrs

from core.blocks import BlockPool
from core.cost import CostModel
from core.types import HOLE, Limits, ReadOnlyList, Request, SamplingParams, SequenceView, View

_put = object.__setattr__  # how core writes what is read-only to everyone else
# the same by slot, for what changes with every token
put_num_tokens = vars(SequenceView)["num_tokens"].__set__
put_num_computed = vars(SequenceView)["num_computed_tokens"].__set__
_put_tokens_at_end = vars(SequenceView)["_tokens_at_end"].__set__
_LABELS = [field.name for field in attrs.fields(Request) if field.name in SequenceView.__slots__ and field.name != "id"]


class Status(Enum):
    """Where a sequence is in its life. Blocks are held by more than those that run; this is all of them, and who gives way to whom::

                  in             KV on the device                what becomes of it when a plan is short of blocks
        IDLE      State.idle     for its session's next turn     1. as plan_idle says; then the longest idle is forgotten
        HELD      State.held     while its siblings compute      2. dropped ("recompute"), the newest first
        WAITING   State.waiting  none; its own if State.parked   3. dropped ("turned"), the newest first, unless it is planned
        RUNNING   State.running  its own, with a row             4. as choose_victims says; else core drops the newest ("forced")
        SWAPPED   State.waiting  what it shares                  5. dropped ("turned"), the newest first, once nobody runs
        FINISHED

    Parked is a sequence that continues a session's turn, or a beam that found no row. SWAPPED and IDLE ones may hold host blocks. What is
    dropped is computed again. The order is that of core/relief.py (``_take_parked``, ``_preempt``, ``_unblock``).
    """

    WAITING = "waiting"
    SWAPPED = "swapped"
    RUNNING = "running"
    HELD = "held"  # a beam whose siblings are still computed: in no queue, and no work
    IDLE = "idle"  # ended, its KV kept: in no queue, and no work
    FINISHED = "finished"


MOVES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.SWAPPED: frozenset({Status.RUNNING, Status.WAITING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.HELD, Status.IDLE, Status.FINISHED}),
    Status.HELD: frozenset({Status.RUNNING, Status.WAITING, Status.FINISHED}),
    Status.IDLE: frozenset({Status.FINISHED}),
    Status.FINISHED: frozenset(),
}
"""The one status table: every change of status is a line of it."""

_WHERE = {Status.RUNNING: "device", Status.HELD: "device", Status.IDLE: "device", Status.SWAPPED: "swap"}


class Sequence:
    """Core's handle of one sequence: the live view that policies read, and what only core needs."""

    __slots__ = (
        "view",
        "request",
        "params",
        "status",
        "order",  # (arrival_s, id): the place in a queue
        "tokens",  # list[int], prompt and output
        "table",  # list[int], device block ids, HOLE where there is none
        "host_blocks",  # dict[table index, host block id] while swapped
        "row",  # row in the batch builder's buffers, -1 unless running
        "seed",
        "to_fork",  # branches that still wait for the first token of this one
        "num_cached_tokens",  # of the prompt, at its first computation (usage)
        "stream",  # TextStream or None
        "stops",  # StopMatcher or None
        "wants_text",  # bool: its tokens are looked at one by one, for text or for stop tokens
        "beams",  # core.beams.Search that this is a beam of, or None
        "grammar",  # core.structure.Constraint or None
        "scores",  # list[TokenLogprobs] of prompt tokens 1, 2, ... so far; None: not wanted
        "times",  # list[float], when each output token was delivered
        "first_seen_s",
        "first_scheduled_s",
    )

    def __init__(
        self, request: Request, params: SamplingParams, seed: int, pool: BlockPool, *, id: int, branch: int = 0
    ):
        self.request = request
        self.params = params
        self.status = Status.WAITING
        self.order = (request.arrival_s, id)
        self.tokens = list(request.prompt_token_ids)
        self.table: list[int] = []
        self.host_blocks: dict[int, int] = {}
        self.row = -1
        self.seed = seed
        self.to_fork = params.n - 1 if branch == 0 and params.beam_width is None else 0
        self.num_cached_tokens = 0
        self.stream: Any = None
        self.stops: Any = None
        self.wants_text = True
        self.beams: Any = None
        self.grammar: Any = None if request.grammar is None else request.grammar.start()
        self.scores: list[Any] | None = None if params.prompt_logprobs is None else []
        self.times: list[float] = []
        self.first_seen_s = 0.0
        self.first_scheduled_s: float | None = None
        self.view = self._make_view(pool, id, branch)

    def _make_view(self, pool: BlockPool, id: int, branch: int) -> SequenceView:
        view, request = SequenceView(), self.request
        facts = {
            "id": id,
            "request_id": request.id,
            "branch": branch,
            "n": self.params.beam_width or self.params.n,
            "token_ids": ReadOnlyList(self.tokens),
            "num_prompt_tokens": len(self.tokens),
            "num_tokens": len(self.tokens),
            "num_computed_tokens": 0,
            "max_tokens": self.params.max_tokens,
            "block_table": ReadOnlyList(self.table),
            "where": "none",
            "num_preemptions": 0,
            "predicted_output_tokens": self.params.max_tokens,
            "_times": self.times,
            "idle_since_s": None,
            "num_tokens_at_preemption": 0,
            "queued_s": request.arrival_s,
            "demoted": False,
            "_pool": pool,
            "_tokens_at_end": 0,
        }
        for name in _LABELS:
            facts[name] = getattr(request, name)
        for name, value in facts.items():
            _put(view, name, value)
        return view

    @property
    def id(self) -> int:
        return self.view.id

    def append(self, token: int, now: float) -> None:
        """One sampled token, delivered at ``now``."""
        self.tokens.append(token)
        self.times.append(now)
        put_num_tokens(self.view, len(self.tokens))

    def set_computed(self, num_tokens: int) -> None:
        put_num_computed(self.view, num_tokens)

    def set_tokens_at_end(self, block_size: int) -> None:
        """After its table changed: how many tokens its blocks will hold when it ends, as far as is known now.

        Up to its declared limit, or its recorded length in a replay; the last token of an answer is never written.
        """
        view = self.view
        recorded = view.recorded_output_tokens
        output = view.max_tokens if recorded is None else min(recorded, view.max_tokens)
        _put_tokens_at_end(view, min(len(self.table) * block_size, view.num_prompt_tokens + output - 1))

    def set_predicted(self, num_tokens: int) -> None:
        _put(self.view, "predicted_output_tokens", max(1, min(num_tokens, self.view.max_tokens)))

    @property
    def session(self) -> tuple[str, str, str]:
        """Whose turn it is: only the same client, with the same salt, continues a session."""
        return self.request.client_id, self.request.cache_salt, self.request.session_id

    def device_blocks(self) -> tuple[int, ...]:
        return tuple(b for b in self.table if b != HOLE)


class State:
    """Sequences by id, ``running`` and ``waiting`` in arrival order, and the rows that running sequences occupy.

    ``sessions`` are the ended turns whose KV is kept, oldest first; ``parked`` the waiting sequences that hold device blocks as
    their own (they continue such a turn, or are beams that found no row); ``held`` the beams whose siblings are still computed.
    """

    def __init__(self, limits: Limits, pool: BlockPool, cost: CostModel):
        self.sequences: dict[int, Sequence] = {}
        self.views: dict[int, SequenceView] = {}
        self.requests: dict[int, set[int]] = {}  # request id -> its unfinished sequences
        self.running: list[SequenceView] = []
        self.running_ids: set[int] = set()
        self.waiting: list[SequenceView] = []
        self._swapped: dict[int, Sequence] = {}
        self.sessions: dict[tuple[str, str, str], Sequence] = {}
        self.idle: list[SequenceView] = []
        self.parked: dict[int, Sequence] = {}
        self.held: dict[int, Sequence] = {}
        self.pool = pool
        self.swap = BlockPool(limits.num_swap_blocks, limits.block_size, newest_first=True)
        self.limits = limits
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.cached_tokens: dict[int, int] = {}
        self.view = self._make_view(limits, cost)
        self.readonly_views = MappingProxyType(self.views)

    def _make_view(self, limits: Limits, cost: CostModel) -> View:
        view = View()
        facts = {
            "now": 0.0,
            "step": 0,
            "running": ReadOnlyList(self.running),
            "waiting": ReadOnlyList(self.waiting),
            "idle": ReadOnlyList(self.idle),
            "cached_tokens": MappingProxyType(self.cached_tokens),
            "num_blocks": limits.num_blocks,
            "block_size": limits.block_size,
            "num_free_blocks": limits.num_blocks,
            "num_free_swap_blocks": limits.num_swap_blocks,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "max_model_len": limits.max_model_len,
            "cost": cost,
            "block_refs": ReadOnlyList(self.pool.refs),
            "finds_prefixes": False,
            "blocks_missing": 0,
        }
        for name, value in facts.items():
            _put(view, name, value)
        return view

    def look(self, now: float, step: int) -> None:
        """Bring the view up to date for this step."""
        _put(self.view, "now", now)
        _put(self.view, "step", step)
        self.refresh_free()

    def set_finds_prefixes(self, value: bool) -> None:
        _put(self.view, "finds_prefixes", value)

    def set_blocks_missing(self, num_blocks: int) -> None:
        _put(self.view, "blocks_missing", num_blocks)

    def refresh_free(self) -> None:
        _put(self.view, "num_free_blocks", self.pool.num_free)
        _put(self.view, "num_free_swap_blocks", self.swap.num_free)

    # ------------------------------------------------------------------------------------------- queues and status

    def _key(self, view: SequenceView) -> tuple[float, int]:
        return self.sequences[view.id].order

    def _take_out(self, queue: list[SequenceView], seq: Sequence) -> None:
        index = bisect_left(queue, seq.order, key=self._key)
        if index == len(queue) or queue[index] is not seq.view:
            raise ValueError(f"sequence {seq.id} is not in its queue")
        del queue[index]

    def add(self, seq: Sequence) -> None:
        """Take in a new sequence: it waits, with the KV it was given if it continues a session."""
        if seq.host_blocks:
            seq.status = Status.SWAPPED
            self._swapped[seq.id] = seq
            _put(seq.view, "where", "swap")
        elif seq.table:
            self.parked[seq.id] = seq
            _put(seq.view, "where", "device")
        self.sequences[seq.id] = seq
        self.views[seq.id] = seq.view
        self.requests.setdefault(seq.request.id, set()).add(seq.id)
        insort(self.waiting, seq.view, key=self._key)

    def move(self, seq: Sequence, to: Status) -> None:
        """Change a sequence's status by the table, and its queue, row and ``where`` with it."""
        if to not in MOVES[seq.status]:
            raise ValueError(f"sequence {seq.id}: {seq.status.value} -> {to.value} is not an allowed move")
        if seq.status is Status.RUNNING:
            self._take_out(self.running, seq)
            self.running_ids.discard(seq.id)
            self._rows.append(seq.row)
            seq.row = -1
        elif seq.status is Status.IDLE:
            self._end_session(seq)
            return
        elif seq.status is Status.HELD:
            del self.held[seq.id]
        elif to is not Status.WAITING:  # swapped -> waiting keeps its place
            self._take_out(self.waiting, seq)
        if self.parked:
            self.parked.pop(seq.id, None)
        if to is Status.RUNNING:
            seq.row = self._rows.pop()
            insort(self.running, seq.view, key=self._key)
            self.running_ids.add(seq.id)
        elif seq.status in (Status.RUNNING, Status.HELD) and to in (Status.WAITING, Status.SWAPPED):
            insort(self.waiting, seq.view, key=self._key)
        elif to is Status.HELD:
            self.held[seq.id] = seq
        if to in (Status.FINISHED, Status.IDLE):
            self._forget(seq)
        self._swapped.pop(seq.id, None)
        if to is Status.SWAPPED:
            self._swapped[seq.id] = seq
        _put(seq.view, "where", _WHERE.get(to, "none"))
        if seq.status is Status.HELD and to is Status.WAITING and seq.table:
            self.parked[seq.id] = seq
            _put(seq.view, "where", "device")
        seq.status = to

    def begin_session(self, seq: Sequence, now: float) -> None:
        """A running sequence has ended and keeps its KV; its session has none so far."""
        self.move(seq, Status.IDLE)
        _put(seq.view, "idle_since_s", now)
        self.sessions[seq.session] = seq
        self.idle.append(seq.view)

    def _end_session(self, seq: Sequence) -> None:
        del self.sessions[seq.session]
        self.idle.remove(seq.view)
        seq.status = Status.FINISHED
        _put(seq.view, "where", "none")

    def set_where(self, seq: Sequence, where: str) -> None:
        """Where the KV of an idle, a held or a parked sequence is now."""
        _put(seq.view, "where", where)
        if where != "device":
            self.parked.pop(seq.id, None)

    def demote(self, seq: Sequence, now: float) -> None:
        """From now on as if it had arrived now: behind all that wait, ahead of all that come."""
        self._take_out(self.waiting, seq)
        seq.order = (now, seq.id)
        _put(seq.view, "demoted", True)
        _put(seq.view, "queued_s", now)
        insort(self.waiting, seq.view, key=self._key)

    def _forget(self, seq: Sequence) -> None:
        del self.sequences[seq.id], self.views[seq.id]
        siblings = self.requests[seq.request.id]
        siblings.discard(seq.id)
        if not siblings:
            del self.requests[seq.request.id]

    def count_preemption(self, seq: Sequence) -> None:
        _put(seq.view, "num_preemptions", seq.view.num_preemptions + 1)
        _put(seq.view, "num_tokens_at_preemption", seq.view.num_tokens)

    def swapped(self) -> list[Sequence]:
        """Sequences whose KV is in host memory, in arrival order."""
        return sorted(self._swapped.values(), key=lambda seq: seq.order)

    # ------------------------------------------------------------------------------------------- self-check

    def check_owners(self) -> None:
        """Every block is held by exactly as many tables as its reference count says. O(blocks): ``checks=full`` and tests."""
        owners: dict[int, int] = {}
        everyone = [*self.sequences.values(), *self.sessions.values()]
        for seq in everyone:
            for block in seq.device_blocks():
                owners[block] = owners.get(block, 0) + 1
        held = {b: c for b, c in enumerate(self.pool.refs) if c}
        assert owners == held, f"block tables hold {owners}, the pool counts {held}"
        self.pool.check()
        hosts = sorted(h for seq in everyone for h in seq.host_blocks.values())
        assert hosts == [h for h, c in enumerate(self.swap.refs) if c], f"swapped sequences hold host blocks {hosts}"

    def assert_idle(self) -> None:
        """Nothing leaks: raise ``AssertionError`` with the numbers unless an engine without work has given everything back."""
        assert not self.sequences and not self.views, f"{len(self.sequences)} sequences are left"
        assert not self.requests, f"requests {sorted(self.requests)} are left"
        assert not self.sessions and not self.idle, f"{len(self.sessions)} sessions are kept"
        assert not self.running and not self.waiting and not self.parked and not self.held, (
            f"{len(self.running)} running, {len(self.waiting)} waiting are left"
        )
        assert self.pool.num_free == self.pool.num_blocks, f"{self.pool.num_used} blocks are not free"
        assert self.swap.num_free == self.swap.num_blocks, f"{self.swap.num_used} host blocks are not free"
        assert len(self._rows) == self.limits.max_num_seqs, "batch rows are left occupied"
        self.pool.check()
