"""What a request's parameters do to its logits before a token is drawn, worked out in numpy for every executor.

For one row, in this order (the order matters where several are used):

1. ``repetition_penalty`` r, on every token of prompt and output: a positive logit is divided by r, another multiplied
   (Keskar et al., "CTRL", 2019).
2. ``presence_penalty`` once and ``frequency_penalty`` a time, on the tokens of the output, and ``logit_bias``: added.
3. What may not come: tokens outside ``allowed_token_ids`` or outside the grammar, the last token of a bad word whose
   first ones have just come, and while the output is shorter than ``min_tokens`` what would end it: minus infinity. A
   grammar knows where an answer ends, so ``min_tokens`` gives way to it.

Counts are taken from the tokens themselves, so a prefix hit or a preemption cannot change them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from core.types import SamplingBatch, SamplingParams

NOTHING_LEFT = "no token is left between what it allows and what it forbids"


class Edits(NamedTuple):
    """Changes to one row of V logits. Ids are int64."""

    seen: np.ndarray  # ids under the repetition penalty
    repetition: float
    add_ids: np.ndarray  # distinct
    add_values: np.ndarray  # float64
    banned: np.ndarray  # ids
    allowed: np.ndarray | None  # bool [V]; None: all


_NO_IDS = np.zeros(0, np.int64)


def is_edited(params: SamplingParams) -> bool:
    """Whether a row with these parameters can have edits (a grammar aside)."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(params.bad_words)
        or params.min_tokens > 0
    )


def edits_for(sampling: SamplingBatch, i: int, vocab_size: int, eos_token_ids: frozenset[int]) -> Edits | None:
    """The edits of sample ``i``; None when its logits stay as they are."""
    params = sampling.params[i]
    constraint = sampling.constraints[i] if sampling.constraints else None
    if constraint is None and not is_edited(params):
        return None
    history, num_prompt = sampling.histories[i], sampling.num_prompt_tokens[i]
    num_tokens = sampling.positions[i]
    seen = _NO_IDS
    if params.repetition_penalty != 1:
        seen = np.unique(np.asarray(history[:num_tokens], np.int64))
    add_ids, add_values = _added(params, history[num_prompt:num_tokens])
    banned = [word[-1] for word in params.bad_words if _is_next(word, history, num_prompt, num_tokens)]
    if num_tokens - num_prompt < params.min_tokens and constraint is None:
        banned += [*eos_token_ids, *params.stop_token_ids]
    return Edits(
        seen, params.repetition_penalty, add_ids, add_values, np.asarray(banned, np.int64),
        _allowed(params, constraint, vocab_size),
    )  # fmt: skip


def _added(params: SamplingParams, output: Any) -> tuple[np.ndarray, np.ndarray]:
    added: dict[int, float] = {}
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
        values = -params.presence_penalty - params.frequency_penalty * counts
        added = dict(zip(ids.tolist(), values.tolist(), strict=True))
    for token, bias in params.logit_bias.items():
        added[token] = added.get(token, 0.0) + bias
    return np.fromiter(added, np.int64, len(added)), np.fromiter(added.values(), np.float64, len(added))


def _is_next(word: tuple[int, ...], history: Any, num_prompt: int, num_tokens: int) -> bool:
    """Whether the output ends with all of a bad word but its last token."""
    start = num_tokens - (len(word) - 1)
    return start >= num_prompt and tuple(history[start:num_tokens]) == word[:-1]


def _allowed(params: SamplingParams, constraint: Any, vocab_size: int) -> np.ndarray | None:
    allowed = None if constraint is None else constraint.allowed(vocab_size)
    if params.allowed_token_ids is not None:
        listed = np.zeros(vocab_size, bool)
        listed[list(params.allowed_token_ids)] = True
        allowed = listed if allowed is None else allowed & listed
    return allowed


def apply(row: np.ndarray, edits: Edits) -> np.ndarray:
    """A changed copy of one row of logits [V], float64."""
    row = row.astype(np.float64)
    seen = row[edits.seen]
    with np.errstate(over="ignore"):  # a tiny penalty: an infinite logit, which cannot be drawn from and is said so
        row[edits.seen] = np.where(seen > 0, seen / edits.repetition, seen * edits.repetition)
    row[edits.add_ids] += edits.add_values
    if edits.allowed is not None:
        row[~edits.allowed] = -np.inf
    row[edits.banned] = -np.inf
    return row
