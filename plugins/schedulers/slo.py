"""``scheduler=slo``: earliest deadline first on TTFT, in the largest batch whose predicted TPOT clears the target.

Targets are the requests' own (``deadline_s``, ``tpot_s``) or those of their class (root group ``slo``). The cost model predicts
a step's seconds from its tokens and the KV it reads (core/cost.py); what steps really take corrects it while it serves, so it
works, after some steps, also where the machine's rates are not known.

Sources: earliest deadline first (Liu and Layland, 1973); batches sized by predicted token time as in Sarathi-Serve (OSDI 2024) and
SLOs-Serve (Chen et al., 2025); late requests last as in DistServe's goodput (Zhong et al., OSDI 2024): finishing them earns
nothing.

Order: prefills by deadline, those that can still make it before those that cannot; decodes always get their token. The plan lists
running sequences by when their next token is due, so those with most slack give way. A TPOT target that a step of one sequence
would miss already is ignored. Fairness: a request that has waited
``patience_s`` goes first, whatever its deadline: with steps of s seconds it ends patience_s / s + T steps after it came at the
latest, T the tokens of all that were there by then. ``patience_s: null`` starves lost requests under overload. May preempt for
a newcomer: never.
"""

from __future__ import annotations

import attrs

from core.cost import CostModel
from core.hookspecs import hookimpl
from core.types import Chunk, EngineInfo, Plan, SequenceView, StepReport, View, one_token
from plugins.schedulers.packing import Room, in_order

NEVER = float("inf")
PATIENT = -5e11  # ranks below: their patience is over
FORGET = 0.98  # weight of the steps before, at each step


@attrs.define(eq=False)
class SloScheduler:
    """``margin`` is the part of a TPOT target that a predicted step may take: the rest is for what the prediction does not know."""

    margin: float = attrs.field(default=0.95, validator=[attrs.validators.gt(0), attrs.validators.le(1)])
    patience_s: float | None = attrs.field(default=120.0, validator=attrs.validators.optional(attrs.validators.ge(0)))  # type: ignore[arg-type]
    watermark: float = attrs.field(default=0.01, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
    _clock: StepClock = attrs.field(init=False, default=None)

    @hookimpl
    def setup(self, engine_info: EngineInfo) -> None:
        self._clock = StepClock(engine_info.cost)

    @hookimpl
    def plan_step(self, view: View) -> Plan:
        now, clock = view.now, self._clock
        room = Room(view, self.watermark)
        decodes, prefills, kv = [], [], 0
        for s in view.running:
            if s.num_tokens - s.num_computed_tokens == 1:
                kv += s.num_tokens
                first = s.first_token_s
                decodes.append(
                    (NEVER if s.tpot_s is None or first is None else first + s.tpot_s * s.num_output_tokens, s)
                )
            else:
                prefills.append(s)
        target = self._strictest([s for _, s in decodes])
        num_decodes = room.decodes([s for _, s in decodes])
        decodes.sort(key=_due)
        chunks = [(due, s.id, one_token(s.id)) for due, s in decodes[:num_decodes]]
        limit_s = target * self.margin if chunks else NEVER  # nobody waits for a token: a step may be long
        within = clock.tokens_within(limit_s, num_decodes, kv)
        rank = self._ranks(view)
        for s in in_order(prefills, rank) if len(prefills) > 1 else prefills:
            if within < room.tokens and rank(s) >= PATIENT:  # one whose patience is over waits for nobody's target
                room.tokens = within
            if not room.tokens:
                break
            chunks.append((rank(s), s.id, Chunk(s.id, room.take_running(s), True)))
            within = max(0, within - chunks[-1][2].num_tokens)
        chunks.sort()
        plan = [chunk for _, _, chunk in chunks]
        if view.waiting and room.tokens and room.rows:
            kv += sum(s.num_tokens for s in prefills)
            plan += self._newcomers(view, room, within, target, kv, rank)
        clock.expect(plan, kv, now)
        return Plan(tuple(plan))

    def _ranks(self, view: View):
        """How urgent a first token is: its deadline; after all of those, in order, for what is lost; at once after
        ``patience_s``."""
        now, cost, cached = view.now, view.cost, view.cached_tokens
        safe = now + cost.recompute_s(
            view.max_model_len
        )  # whatever its length, a prompt that is due later than this can make it
        patient_since = now - self.patience_s if self.patience_s is not None else -NEVER

        def rank(s: SequenceView) -> float:
            if s.queued_s <= patient_since:
                return s.queued_s + 2 * PATIENT
            deadline = s.deadline_s
            if deadline is None:
                return 1e12
            if deadline > safe or s.num_tokens > s.num_prompt_tokens:
                return deadline
            if deadline <= now or deadline <= now + cost.recompute_s(
                s.num_tokens, s.num_computed_tokens or cached.get(s.id, 0)
            ):
                return deadline + 2e12
            return deadline

        return rank

    def _strictest(self, sequences: list[SequenceView]) -> float:
        """The least TPOT target of these, seconds. One that a step of this sequence alone would miss is not a target: to give way
        for it would slow all others and not meet it."""
        for s in sorted([s for s in sequences if s.tpot_s is not None], key=lambda s: s.tpot_s or 0.0):
            if s.tpot_s is not None and self._clock.seconds(1, s.num_tokens) <= s.tpot_s * self.margin:
                return s.tpot_s
        return NEVER

    def _newcomers(self, view: View, room: Room, within: int, target: float, kv: int, rank) -> list[Chunk]:
        """By rank, as long as a step of decodes with all of them still clears the strictest target; those whose patience is over
        start whatever the targets say."""
        chunks: list[Chunk] = []
        running = len(view.running)
        for s in in_order(view.waiting, rank):
            target = min(target, self._strictest([s]))
            kv += s.num_tokens
            if rank(s) >= PATIENT:
                room.tokens = min(room.tokens, within)
                others = running + len(chunks)
                if others and self._clock.seconds(others + 1, kv) > target * self.margin:
                    break
            if not room.fits(s):
                break
            chunks.append(Chunk(s.id, room.take_new(s)))
            within = max(0, within - chunks[-1].num_tokens)
        return chunks

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self._clock.learn(report)


def _due(entry: tuple[float, SequenceView]) -> float:
    return entry[0]


class StepClock:
    """Seconds of a step: a + b x the cost model's, a and b by least squares over recent steps, which it learns from."""

    def __init__(self, cost: CostModel):
        self._cost = cost
        self._a, self._b = 0.0, 1.0
        self._sums = [0.0] * 5  # weights, x, y, xx, xy
        self._expected: tuple[int, int, float] | None = None  # chunks, tokens, model seconds

    def seconds(self, num_tokens: int, kv_tokens: int) -> float:
        return self._a + self._b * self._cost.step_s(num_tokens, kv_tokens)

    def tokens_within(self, limit_s: float, num_decodes: int, kv_tokens: int) -> int:
        """Tokens beside so many decodes that keep a step within ``limit_s``; found by halving, the prediction only grows."""
        if limit_s == NEVER:
            return 1 << 30
        low, high = 0, 1 << 16
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(num_decodes + middle, kv_tokens + middle) <= limit_s:
                low = middle
            else:
                high = middle - 1
        return low

    def expect(self, plan: list[Chunk], kv_tokens: int, now: float) -> None:
        tokens = sum([chunk.num_tokens for chunk in plan])
        self._expected = (len(plan), tokens, self._cost.step_s(tokens, kv_tokens))

    def learn(self, report: StepReport) -> None:
        """Correct the prediction by a step that ran as it was planned (one that was cut for lack of blocks says nothing)."""
        expected, self._expected = self._expected, None
        if expected is None or len(report.plan.chunks) != expected[0] or report.preempted or not report.num_tokens:
            return
        x, y = expected[2], report.ended_s - report.started_s
        sums = self._sums = [FORGET * old + new for old, new in zip(self._sums, (1.0, x, y, x * x, x * y), strict=True)]
        count, sum_x, sum_y, sum_xx, sum_xy = sums
        spread = count * sum_xx - sum_x * sum_x
        if spread > 1e-6 * sum_xx * count:
            b = max(0.0, (count * sum_xy - sum_x * sum_y) / spread)
            a = (sum_y - b * sum_x) / count
            self._a, self._b = (a, b) if a >= 0 else (0.0, sum_y / sum_x)
        elif sum_x:
            self._a, self._b = 0.0, sum_y / sum_x
