"""The values that pass between the stages of a step, and nothing else.

Every value here is frozen: a stage reads what it is given and answers with a new value. The live views that policies read are in
core/views.py and what a step reports in core/reports.py; plugins import all of them from here.

Units: lengths are in tokens, memory in blocks of ``block_size`` tokens, times in seconds on the executor's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import attrs

from core.reports import Finished, FinishReason, MemoryReport, Output, Outputs, Preempted, StepReport  # noqa: F401
from core.views import HOLE, ReadOnlyList, SequenceView, View, Where  # noqa: F401

if TYPE_CHECKING:
    import numpy as np

    from core.blocks import BlockPool
    from core.cost import CostModel

API_VERSION = 1
"""Version of the plugin contract (hookspecs and the types here). An incompatible change raises it."""

EvictionKind = Literal["swap", "recompute"]
MoveKind = Literal["copy", "swap_out", "swap_in"]
ReleaseReason = Literal["finish", "abort", "error", "swap", "recompute", "turned", "forced"]


class QuireError(Exception):
    """Base of the errors that are shown to a person as one line, without a traceback."""


class ConfigError(QuireError):
    """Bad input before or at start: names the field, the value and what is allowed (exit code 2)."""


class PolicyError(QuireError):
    """A plugin broke the contract. The engine stops: a silent fall-back would falsify results (exit code 1)."""


class RequestError(QuireError, ValueError):
    """A request that can never be served as asked. Harms that request only."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class QueueFull(RequestError):
    """As many requests wait as may (``max_queue``): come back later. Over HTTP a 429 with Retry-After."""

    def __init__(self, num_waiting: int, max_queue: int, retry_after_s: float):
        super().__init__(
            f"{num_waiting} requests are waiting and max_queue is {max_queue}; try again in {retry_after_s:.0f} s"
        )
        self.num_waiting = num_waiting
        self.max_queue = max_queue
        self.retry_after_s = retry_after_s  # seconds until a place is expected to be free, at least 1


UNSAMPLABLE = "the request asks for what cannot be: "
"""How the error of such a request begins: its own fault, so the API answers 400."""


class Unsamplable(ValueError):
    """A request's own parameters leave no token, or cost too much to follow. The message may be shown."""

    def __init__(self, reason: str):
        super().__init__(UNSAMPLABLE + reason)


def failure(error: Exception, what: str = "sampling") -> str:
    """The error of one request, in a line that may be shown."""
    return str(error) if isinstance(error, Unsamplable) else f"{what} failed: {type(error).__name__}"


# ------------------------------------------------------------------------------------------------ requests


@attrs.frozen(slots=True)
class Structure:
    """What the text of an answer must look like. ``text`` is a JSON Schema, "" (any JSON object), a regular expression, a grammar
    in Lark's notation, or a JSON list of texts."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    text: str


@attrs.frozen(slots=True, kw_only=True)
class SamplingParams:
    """How one request wants its tokens chosen and when it ends. Checked once, at the edge, by ``core.params``."""

    max_tokens: int | None = None  # output tokens; None: up to max_model_len
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    seed: int | None = None  # None: core draws one at admission and records it
    n: int = 1  # branches that share one prompt
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best
    detokenize: bool = True  # False: no text is made (replay)
    min_tokens: int = 0  # output tokens before eos, a stop token or a stop string may end it
    min_p: float = 0.0  # [0, 1]: tokens less likely than this part of the likeliest are left out
    repetition_penalty: float = 1.0  # > 0; on tokens of prompt and output
    presence_penalty: float = 0.0  # [-2, 2]; once for each token of the output
    frequency_penalty: float = 0.0  # [-2, 2]; for each time a token is in the output
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)  # token id -> added to its logit
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token id sequences that never come out
    prompt_logprobs: int | None = None  # None: none; k: of each prompt token but the first, and the k best there
    include_stop_str_in_output: bool = False  # keeps the stop string, or the stop token's text
    skip_special_tokens: bool = True  # in the text
    structure: Structure | None = None
    beam_width: int | None = None  # beam search with so many beams: its n best answers (core/beams.py)
    length_penalty: float = 1.0  # [-10, 10]; of beam search: summed log probability / length ** this
    extra: Mapping[str, Any] = attrs.field(factory=dict)  # for samplers that know more than these


@attrs.frozen(slots=True, kw_only=True, eq=False)
class Request:
    """One call to the engine, before it has a sequence. ``id`` is the engine's own; a client's id is only a label."""

    id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    priority: int = 0  # smaller is served first, where a policy reads it
    client_id: str = ""
    session_id: str = ""
    cache_salt: str = ""
    service_class: str = ""  # names its service level (root group slo)
    deadline_s: float | None = None  # when its first token is due, on the executor's clock
    tpot_s: float | None = None  # most seconds a further token may take on average
    stall_s: float | None = (
        None  # its session says that it comes back about so many seconds after the end (a tool call)
    )
    recorded_output_tokens: int | None = None  # replay: the length the trace says; policies named oracle may read it
    label: str = ""
    grammar: Any = None  # core.structure.Compiled, of params.structure


@attrs.frozen(slots=True)
class Refusal:
    """A no with its reason: of a request by ``admit``, of a case by a kernel."""

    reason: str


# ------------------------------------------------------------------------------------------------ decisions


class Chunk(NamedTuple):
    """Tokens of one sequence to compute in this step. A tuple, because a step makes one for each sequence."""

    sequence: int  # id
    num_tokens: int  # to compute after a prefix hit, >= 1
    may_preempt: bool = (
        False  # True: others may be evicted for it (set on running sequences; on a newcomer also for its row)
    )


@lru_cache(maxsize=4096)
def one_token(sequence: int) -> Chunk:
    """The chunk of a running sequence that decodes: made once, since most chunks of most plans are one of these."""
    return Chunk(sequence, 1, True)


@attrs.frozen(slots=True)
class Plan:
    """What a step should compute, most wanted first, within ``max_num_batched_tokens``.

    An empty plan while there is work is legal only with ``wait_until``, the time to ask again.
    """

    chunks: tuple[Chunk, ...] = ()
    wait_until: float | None = None


class Move(NamedTuple):
    """One block to copy before the forward pass, in the order the moves were decided. Ids are device or host block ids."""

    kind: MoveKind
    source: int
    destination: int


@attrs.frozen(slots=True)
class Lease:
    """A change to the block table that core owns.

    ``blocks`` are (table index, block id): an index at the table's end appends, one inside it fills a hole or replaces an entry
    (copy on write; the allocator has already dropped its reference on the replaced block). ``moves`` are the copies that must run
    before the forward pass. ``num_cached_tokens`` leading tokens are already in the leased blocks (a prefix hit); 0 for a swapped
    or running sequence.
    """

    blocks: tuple[tuple[int, int], ...] = ()
    moves: tuple[Move, ...] = ()
    num_cached_tokens: int = 0


NO_CHANGE = Lease()
"""The lease of a chunk that fits in the blocks its sequence has: one shared value, since most leases are this one."""


@attrs.frozen(slots=True)
class Shortfall:
    """The plan does not fit. The first ``num_fitting`` chunks would; ``blocks_missing`` >= 1 is a lower bound for the whole plan.

    ``rows_missing`` is core's own: so many newcomers that may preempt found ``max_num_seqs`` sequences running. Then
    ``blocks_missing`` is 1, and so many running sequences have to go, whatever they hold.
    """

    num_fitting: int
    blocks_missing: int
    rows_missing: int = 0


@attrs.frozen(slots=True)
class Eviction:
    """A running sequence to push out: its KV goes to host memory, or is dropped and computed again later.

    ``ahead`` says that the policy means to push out one that the scheduler wants more than the first that does not fit, which is
    an error without it; the policy's docs must say so.
    """

    sequence: int
    kind: EvictionKind
    ahead: bool = False


@attrs.frozen(slots=True)
class Triage:
    """What becomes of waiting sequences before the plan: some are refused, some lose their place in the queue."""

    refused: tuple[tuple[int, str], ...] = ()  # (sequence id, reason that the client is told)
    demoted: tuple[int, ...] = ()  # from now on as if they had arrived now


@attrs.frozen(slots=True)
class IdleChoice:
    """What becomes of the KV of a session between two turns: it stays, goes to host memory, or is forgotten."""

    sequence: int
    kind: Literal["keep", "swap", "discard"]


@attrs.frozen(slots=True)
class Release:
    """Blocks that a sequence gives back: exact ids, in table order."""

    sequence: int
    block_ids: tuple[int, ...]
    reason: ReleaseReason


# ------------------------------------------------------------------------------------------------ core and executor


@attrs.frozen(slots=True, eq=False)
class Batch:
    """One step's index arrays, packed: T tokens of B sequences, S of which are sampled. int32 views into persistent buffers."""

    token_ids: np.ndarray  # [T]
    positions: np.ndarray  # [T] position of each token in its sequence
    slot_mapping: (
        np.ndarray
    )  # [T] where its K and V go: block id * block_size + offset; widen to int64 before use as an offset
    query_start: np.ndarray  # [B + 1] first token of each sequence in the packed batch
    kv_lens: np.ndarray  # [B] tokens visible to each sequence after this step (computed + this step's)
    block_tables: (
        np.ndarray
    )  # [B, max blocks in this batch]; entries at or behind ceil(kv_len / block_size) are never read
    logit_tokens: (
        np.ndarray
    )  # [R] packed tokens whose logits are needed: one a sampled sequence, then those that are scored
    sequence_ids: tuple[int, ...]  # [B]
    block_size: int
    max_query_len: int
    max_kv_len: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.kv_lens)


class Score(NamedTuple):
    """A prompt token whose log probability is wanted, with the ``k`` best at its place."""

    row: int  # index into Batch.logit_tokens
    token_id: int
    k: int


@attrs.frozen(slots=True, eq=False)
class SamplingBatch:
    """What to draw in this step: S samples from R logits rows (a row with n branches is drawn n times)."""

    rows: Sequence[int]  # [S] index into Batch.logit_tokens
    params: Sequence[SamplingParams]  # [S]
    seeds: Sequence[int]  # [S]
    branches: Sequence[int]  # [S]
    positions: Sequence[int]  # [S] absolute position of the token to draw
    histories: Sequence[Sequence[int]]  # [S] prompt and output so far (penalties)
    num_prompt_tokens: Sequence[int]  # [S] where output begins in histories
    recorded_output_tokens: Sequence[int | None]  # [S] replay without a model
    constraints: Sequence[Any] = ()  # [S] core.structure.Constraint or None; empty: none at all
    scores: Sequence[Score] = ()

    def __len__(self) -> int:
        return len(self.rows)


@attrs.frozen(slots=True)
class TokenLogprobs:
    """Natural-log probabilities from the raw logits at one position: the chosen token's, and the best ``k`` as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 1 is the likeliest; 0: not known


@attrs.frozen(slots=True, eq=False)
class StepOutput:
    """What the executor gives back for a step."""

    token_ids: Sequence[int]  # [S]
    seconds: Mapping[str, float]  # "move", "forward", "sample"
    logprobs: Sequence[TokenLogprobs | None] | None = None  # [S]
    errors: Mapping[int, str] = attrs.field(factory=dict)  # sample index -> what went wrong with that row alone
    scores: Sequence[TokenLogprobs] = ()  # of SamplingBatch.scores; NaN where the logits were not finite


@attrs.frozen(slots=True, kw_only=True)
class ModelInfo:
    """What the rest of the engine needs to know of the model, from its config alone."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int  # tokens the model was made for
    num_parameters: int
    dtype: str
    kv_bytes_per_token: int  # all layers, K and V
    eos_token_ids: frozenset[int] = frozenset()
    device: str = "cpu"


def _at_least(low: int):
    return attrs.validators.optional([attrs.validators.instance_of(int), attrs.validators.ge(low)])


@attrs.frozen(slots=True, kw_only=True)
class CacheConfig:
    """The root group ``cache`` as the operator wrote it; nulls are settled at start (see ``Limits``)."""

    block_size: int = attrs.field(
        default=16, validator=[attrs.validators.instance_of(int), attrs.validators.in_(range(1, 257))]
    )
    num_blocks: int | None = attrs.field(default=None, validator=_at_least(2))
    memory_fraction: float = attrs.field(default=0.9, validator=[attrs.validators.gt(0), attrs.validators.le(1)])
    swap_gb: float = attrs.field(
        default=1.0, validator=attrs.validators.ge(0)
    )  # host memory for swapped blocks, 1e9 bytes
    kv_dtype: str | None = None  # null: the model's dtype


@attrs.frozen(slots=True, kw_only=True)
class Limits:
    """The sizes an engine was started with, after every null was settled."""

    block_size: int
    num_blocks: int
    num_swap_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int | None = None  # requests that may wait; None: no bound


@attrs.frozen(slots=True, kw_only=True, eq=False)
class EngineInfo:
    """What ``setup`` tells every plugin of an engine, once, before the first step."""

    limits: Limits
    model: ModelInfo
    pool: BlockPool  # mechanism for allocators: take, share, give
    cost: CostModel
    seed: int  # for a policy that wants random numbers: make your own generator from it
    num_free_swap_blocks: Callable[[], int] | None = None  # free host blocks, asked at any time
    swap: BlockPool | None = (
        None  # host blocks: core takes them for swapped sequences; a cache may keep content in free ones
    )


# ------------------------------------------------------------------------------------------------ plugins


@attrs.frozen(slots=True)
class Policy:
    """One option that a distribution offers: ``kind=name`` on the command line builds ``target`` (a dotted path to a class)."""

    kind: str
    name: str
    target: str
    summary: str
