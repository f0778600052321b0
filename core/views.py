"""What policies read: live pictures of sequences and of the engine, kept up to date in place by core, read-only to everyone else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from core.blocks import BlockPool
    from core.cost import CostModel

HOLE = -1
"""A block table entry without a device block: its KV is in host memory, or is not there yet."""

Where = Literal["none", "device", "swap"]


class SequenceView:
    """A live, read-only picture of one sequence. Policies may keep it; core keeps it up to date in place.

    ``num_tokens`` counts prompt and output, tokens in flight included; ``num_computed_tokens`` those whose KV is in the cache.
    Every step moves the second towards the first; the newest sampled token has no KV yet.
    """

    id: int  # the engine's own, unique for its life
    request_id: int  # shared by the branches of one request
    branch: int  # 0 is the parent
    n: int  # branches of the request
    token_ids: Sequence[int]  # read-only [num_tokens]
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    max_tokens: int  # most output tokens (declared, or what max_model_len leaves)
    block_table: Sequence[int]  # read-only block ids; HOLE where there is no device block
    where: Where  # where its KV is
    arrival_s: float
    priority: int
    client_id: str
    session_id: str
    cache_salt: str
    service_class: str  # names its service level
    deadline_s: float | None  # when its first token is due
    tpot_s: float | None  # its target for the mean time of a further token
    stall_s: float | None  # its session comes back about so long after the end
    idle_since_s: float | None  # when it ended, while its KV is kept for its session's next turn
    predicted_output_tokens: int  # in 1..max_tokens, what predictor= expects its whole answer to be
    num_tokens_at_preemption: int  # num_tokens when it was last preempted; 0: never
    queued_s: float  # its place in the queue: arrival, or when it was demoted
    demoted: bool  # it lost its place in the queue (admission=deadline)
    recorded_output_tokens: int | None
    num_preemptions: int  # so far
    _pool: BlockPool
    _times: list[float]  # when each output token was delivered
    _tokens_at_end: int  # what its blocks will hold when it ends, at most: for core's accounting
    __slots__ = tuple(__annotations__)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a policy may not write SequenceView.{name}: return a decision instead, core acts on it")

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens still to compute before the next one can be sampled (1 while decoding)."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def first_token_s(self) -> float | None:
        """When its first token was delivered."""
        return self._times[0] if self._times else None

    @property
    def predicted_remaining_tokens(self) -> int:
        """Output tokens still to come as far as was predicted; one that outlived its prediction is expected to go on as long again.

        At least 1, and no more than ``max_tokens`` leaves.
        """
        done = self.num_tokens - self.num_prompt_tokens
        left = self.predicted_output_tokens - done
        return max(1, min(left if left > 0 else done, self.max_tokens - done))

    @property
    def private_blocks(self) -> int:
        """Device blocks that only this sequence holds: what evicting it frees."""
        refs = self._pool.refs
        return sum(1 for block in self.block_table if block != HOLE and refs[block] == 1)

    def __repr__(self) -> str:
        return f"<sequence {self.id} {self.num_computed_tokens}/{self.num_tokens} tokens, {self.where}>"


class View:
    """What a policy sees of the engine at ``now``. One object for the engine's life, kept up to date in place, read-only."""

    now: float  # seconds on the executor's clock at the start of the step
    step: int  # number of this step
    running: Sequence[SequenceView]  # in arrival order
    waiting: Sequence[SequenceView]  # in arrival order; where is "none", "swap", or "device" (of a stall, or a beam)
    idle: Sequence[SequenceView]  # ended turns of sessions that will be back, the longest idle first
    cached_tokens: Mapping[int, int]  # leading tokens in the cache, by sequence id: of the head of waiting, absent = 0
    num_blocks: int  # in the pool
    block_size: int  # tokens
    num_free_blocks: int  # that a reserve can take (unreferenced cached ones included)
    num_free_swap_blocks: int  # on the host
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    cost: CostModel  # seconds to move or recompute
    block_refs: Sequence[int]  # how many sequences hold each block of the pool
    finds_prefixes: bool  # the allocator finds computed tokens again that nobody holds
    blocks_missing: int  # that the plan is short of; 0 but in a plan_idle on shortage
    __slots__ = tuple(__annotations__)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a policy may not write View.{name}: return a decision instead, core acts on it")


class ReadOnlyList(Sequence):
    """A window on a list that core owns: reads and slices cost what the list's do, writes do not exist."""

    __slots__ = ("_items",)

    def __init__(self, items: list):
        self._items = items

    def __getitem__(self, index):
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return list(self._items) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._items)
