"""Logits to tokens. A token depends on its own logits row, its parameters and its uniform number, and on nothing else
in the batch.

A request's penalties, bias and masks (core/logits.py) change a copy of its row first; log probabilities stay those of
the raw logits. Greedy rows take the first of the largest logits. Other rows are filtered (top-k, then top-p of what is left),
softmaxed at their temperature, and drawn by inverse CDF over token ids in ascending order with one uniform number per
(seed, branch, position). ``min_p`` leaves out, at the request's temperature, what is less likely than that part of the
likeliest, before top-k and top-p.

On a CPU each drawn row is computed by itself, so that its floats cannot depend on how a batch would have been split
over threads or vector lanes; rows of that length are worth it, and a row's few hundred kB stay in the cache. Drawing
uses float64.

``top_k``: exactly the k largest, ties to smaller ids. ``top_p``: the fewest of the largest whose probability reaches
p, ties to smaller ids. Only ``top_p`` without a small ``top_k`` can need a sort of the vocabulary, and only when the
best ``HEAD`` do not reach p.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from core.logits import NOTHING_LEFT, Edits, edits_for, is_edited
from core.types import SamplingBatch, SamplingParams, TokenLogprobs, Unsamplable, failure
from core.uniform import uniform

HEAD = 1024
"""How many of the largest logits are looked at before the whole vocabulary is sorted for ``top_p``."""

NO_TOKEN = -1
"""Token id given for a row that could not be sampled; its error says why."""

log = logging.getLogger(__name__)

Sampled = tuple[list[int], list[TokenLogprobs | None] | None, dict[int, str]]


class Sampler:
    """Stateless: everything a draw depends on is in its arguments. ``eos_token_ids`` is what ``min_tokens`` holds back."""

    def __init__(self, eos_token_ids: frozenset[int] = frozenset()):
        self.eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> Sampled:
        """Draw S tokens from logits [R, V] (any float type, any device).

        Gives token ids [S] (``NO_TOKEN`` where the row failed), log probabilities [S] from the raw logits (None for
        samples that did not ask; None altogether if none did), and errors by sample index. One bad row never harms
        another.
        """
        if len(sampling) == 0:
            return [], None, {}
        best_values, best_ids = logits[: max(sampling.rows) + 1].max(-1)  # propagates NaN; the first of equal values
        largest, greedy_ids = best_values.tolist(), best_ids.tolist()
        token_ids: list[int] = []
        errors: dict[int, str] = {}
        sums: dict[tuple, torch.Tensor] = {}  # a row with several branches is filtered once
        drawn: list[tuple[int, torch.Tensor]] = []
        for i, (row, params) in enumerate(zip(sampling.rows, sampling.params, strict=True)):
            if not abs(largest[row]) < float("inf"):  # NaN compares false
                errors[i] = f"the model gave no usable logits for this row (the largest is {largest[row]})"
                token_ids.append(NO_TOKEN)
                continue
            try:
                own = self._own_row(logits[row], sampling, i)
                if own is not None:
                    token_ids.append(own if isinstance(own, int) else NO_TOKEN)
                    if not isinstance(own, int):
                        drawn.append((i, own))
                elif params.temperature == 0:
                    token_ids.append(greedy_ids[row])
                else:
                    key = (row, params.temperature, params.top_k, params.top_p, params.min_p)
                    if key not in sums:
                        sums[key] = cumulative(logits[row], largest[row], params)
                    number = uniform(sampling.seeds[i], sampling.branches[i], sampling.positions[i])
                    drawn.append((i, pick(sums[key], number)))
                    token_ids.append(NO_TOKEN)
            except Exception as error:  # this request's own: nobody else may feel it
                log.warning("sampling failed for one request", exc_info=error)
                errors[i] = failure(error)
                token_ids.append(NO_TOKEN)
        if drawn:  # one wait for the device, not one a row
            for (i, _), token in zip(drawn, torch.stack([token for _, token in drawn]).tolist(), strict=True):
                token_ids[i] = token
        return token_ids, self._logprobs(logits, sampling, token_ids, errors), errors

    def edits_any(self, sampling: SamplingBatch) -> bool:
        """Whether some row is changed before it is drawn from (penalties, masks, grammars), or prompt tokens are scored."""
        if sampling.scores or any(one is not None for one in sampling.constraints or ()):
            return True
        return any(params.min_p or is_edited(params) for params in sampling.params)

    def _own_row(self, row: torch.Tensor, sampling: SamplingBatch, i: int) -> int | torch.Tensor | None:
        """A draw from a row that this request's parameters change; None when they do not."""
        edits = edits_for(sampling, i, len(row), self.eos_token_ids)
        if edits is None:
            return None
        row, params = edited(row, edits), sampling.params[i]
        largest, best_id = row.max(-1)
        if not abs(float(largest)) < float("inf"):
            raise Unsamplable(NOTHING_LEFT)
        if params.temperature == 0:
            return int(best_id)
        number = uniform(sampling.seeds[i], sampling.branches[i], sampling.positions[i])
        return pick(cumulative(row, float(largest), params), number)

    def score(self, logits: torch.Tensor, sampling: SamplingBatch) -> list[TokenLogprobs]:
        """Log probabilities of the prompt tokens that ``sampling.scores`` names, from logits [R, V]."""
        return [token_logprobs(logits[score.row], score.token_id, score.k) for score in sampling.scores]

    def _logprobs(
        self, logits: torch.Tensor, sampling: SamplingBatch, token_ids: Sequence[int], errors: dict[int, str]
    ) -> list[TokenLogprobs | None] | None:
        if all(params.logprobs is None for params in sampling.params):
            return None
        return [
            None
            if params.logprobs is None or i in errors
            else token_logprobs(logits[sampling.rows[i]], token_ids[i], params.logprobs)
            for i, params in enumerate(sampling.params)
        ]


def edited(row: torch.Tensor, edits: Edits) -> torch.Tensor:
    """A changed copy of one row of logits [V], at least float32."""
    device = row.device
    row = row.to(torch.float64 if row.dtype == torch.float64 else torch.float32, copy=True)
    if len(edits.seen):
        ids = torch.from_numpy(edits.seen).to(device)
        seen = row[ids]
        row[ids] = torch.where(seen > 0, seen / edits.repetition, seen * edits.repetition)
    if len(edits.add_ids):
        row[torch.from_numpy(edits.add_ids).to(device)] += torch.from_numpy(edits.add_values).to(device, row.dtype)
    if edits.allowed is not None:
        row.masked_fill_(~torch.from_numpy(edits.allowed).to(device), float("-inf"))
    if len(edits.banned):
        row[torch.from_numpy(edits.banned).to(device)] = float("-inf")
    return row


def cumulative(row: torch.Tensor, largest: float, params: SamplingParams) -> torch.Tensor:
    """Unnormalised cumulative probabilities [V] float64 of one row of logits [V], in id order, after temperature,
    top-k and top-p.

    ``largest`` is the row's largest logit, finite. Never NaN: the best token's weight is 1.
    """
    scaled = (row.to(torch.float64) - largest) / params.temperature
    weights = scaled.exp_()
    if params.min_p > 0:  # the best weight is 1
        weights = torch.where(weights >= params.min_p, weights, 0.0)
    kept = num_kept(row, weights, params)
    if kept < len(row):
        weights = torch.where(best(row, kept), weights, 0.0)
    return weights.cumsum(-1)


def num_kept(row: torch.Tensor, weights: torch.Tensor, params: SamplingParams) -> int:
    """How many of the largest logits stay: ``top_k`` of them, or fewer where those reach ``top_p`` of their
    probability.
    """
    vocab_size = len(row)
    limited = 0 < params.top_k < vocab_size
    top_k = params.top_k if limited else vocab_size
    if params.top_p >= 1:
        return top_k
    for head in (top_k,) if limited else (min(HEAD, vocab_size), vocab_size):
        sums = weights.topk(head).values.cumsum(-1)
        total = sums[-1] if limited else weights.sum()
        below = int((sums < params.top_p * total).sum())
        if below < head:
            return below + 1
    return top_k


def best(row: torch.Tensor, count: int) -> torch.Tensor:
    """bool [V]: exactly the ``count`` largest of ``row`` [V], ties to smaller ids."""
    last = row.topk(count).values[-1]
    above, equal = row > last, row == last
    room = count - above.sum()
    return above | (equal & (equal.cumsum(-1) <= room))


def pick(sums: torch.Tensor, number: float) -> torch.Tensor:
    """The id (int64 scalar) whose part of the cumulative weights [V] holds ``number`` in [0, 1), never of weight 0."""
    total = sums[-1]
    chosen = torch.searchsorted(sums, number * total, right=True)  # first id whose sum exceeds the target
    last = torch.searchsorted(sums, total)  # last id with a weight: the target may round up to the total
    return torch.minimum(chosen, last)


def token_logprobs(row: torch.Tensor, token_id: int, k: int) -> TokenLogprobs:
    """Natural-log probabilities of one row of raw logits [V]: of ``token_id`` with its rank, and of the ``k`` best."""
    logprobs = row.to(torch.float64).log_softmax(-1)
    values, ids = logprobs.topk(min(max(k, 0), len(row)))
    chosen = logprobs[token_id]
    rank = int((logprobs > chosen).sum()) + 1
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(chosen), top, rank)
