"""The sampler of ``core.sampler`` for a GPU: all rows at once, no wait until everything is queued, one copy back.

The same draw from the same numbers: largest logit for greedy rows, else top-k, then top-p, then inverse CDF over ids in
ascending order, in float64. Sums over a vocabulary are added up in another order than on a CPU, so that a number within
about 1e-15 of an edge may fall on the other side of it.

Rows with ``top_k`` or ``top_p`` are sorted (stable, so that ties go to smaller ids); other rows are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from core.sampler import NO_TOKEN, Sampled
from core.types import SamplingBatch, TokenLogprobs
from core.uniform import uniforms

ROWS_AT_ONCE = 64
"""Rows drawn together: bounds the float64 copies of their logits (64 x 150,000 x 8 bytes = 77 MB each)."""


class DeviceSampler:
    """``start`` queues a step's sampling; what it returns reads the result, once the device has come that far."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pinned = device.type == "cuda"
        self._back = torch.empty(0, dtype=torch.float64)

    def start(self, logits: torch.Tensor, rows: Sequence[int], sampling: SamplingBatch) -> Callable[[], Sampled]:
        """Draw S tokens from logits [R, V]; sample i from row ``rows[i]``. The result is as ``core.sampler`` gives it."""
        if not rows:
            return lambda: ([], None, {})
        params = sampling.params
        drawn = [i for i, one in enumerate(params) if one.temperature != 0]
        filtered = {i for i in drawn if params[i].top_k > 0 or params[i].top_p < 1}
        drawn.sort(key=lambda i: i not in filtered)  # rows that are sorted come first
        asked = [i for i, one in enumerate(params) if one.logprobs is not None]
        most = min(max((max(params[i].logprobs or 0, 0) for i in asked), default=0), logits.shape[1])
        numbers = uniforms(sampling.seeds, sampling.branches, sampling.positions)
        sent = self._send(
            np.array(
                [
                    [rows[i], one.temperature, one.top_k if one.top_k > 0 else logits.shape[1], one.top_p, numbers[i]]
                    for i, one in enumerate(params)
                ]
            ).T
        )
        where = sent[0].long()
        largest, greedy = logits.max(-1)  # NaN wins; the first of equal values
        tokens = greedy[where]
        for start in range(0, len(drawn), ROWS_AT_ONCE):
            part = drawn[start : start + ROWS_AT_ONCE]
            index = self._send(np.array(part, np.float64)).long()
            sorted_rows = sum(i in filtered for i in part)
            tokens[index] = draw(logits[where[index]], largest[where[index]], sent[1:, index], sorted_rows)
        pieces = [tokens.double(), largest[where].double()]
        if asked:
            index = self._send(np.array(asked, np.float64)).long()
            shares = logits[where[index]].double().log_softmax(-1)
            values, ids = shares.topk(most)
            pieces += [shares.gather(1, tokens[index][:, None])[:, 0], values.flatten(), ids.double().flatten()]
        back = self._bring(torch.cat(pieces))
        return lambda: self._read(back.numpy(), sampling, asked, most)

    def _send(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(self.device, non_blocking=True) if self.pinned else host

    def _bring(self, values: torch.Tensor) -> torch.Tensor:
        if len(self._back) < len(values):
            self._back = torch.empty(2 * len(values), dtype=torch.float64, pin_memory=self.pinned)
        return self._back[: len(values)].copy_(values, non_blocking=True)

    def _read(self, back: np.ndarray, sampling: SamplingBatch, asked: list[int], most: int) -> Sampled:
        count = len(sampling)
        token_ids = back[:count].astype(np.int64).tolist()
        largest = back[count : 2 * count]
        errors: dict[int, str] = {}
        for i in np.flatnonzero(~(np.abs(largest) < np.inf)).tolist():
            errors[i] = f"the model gave no usable logits for this row (the largest is {largest[i]})"
            token_ids[i] = NO_TOKEN
        if not asked:
            return token_ids, None, errors
        own, rest = back[2 * count : 2 * count + len(asked)], back[2 * count + len(asked) :]
        values, ids = rest.reshape(2, len(asked), most)
        logprobs: list[TokenLogprobs | None] = [None] * count
        for place, i in enumerate(asked):
            if i not in errors:
                k = min(max(sampling.params[i].logprobs or 0, 0), most)
                top = zip(ids[place, :k].astype(int).tolist(), values[place, :k].tolist(), strict=True)
                logprobs[i] = TokenLogprobs(token_ids[i], float(own[place]), tuple(top))
        return token_ids, logprobs, errors


def draw(logits: torch.Tensor, largest: torch.Tensor, settings: torch.Tensor, sorted_rows: int) -> torch.Tensor:
    """One id each (int64 [S]) from logits [S, V] with their largest [S]; ``settings`` float64 [4, S] are temperature,
    top-k, top-p and the number in [0, 1). Only the first ``sorted_rows`` rows are filtered.
    """
    temperature, top_k, top_p, number = (row[:, None] for row in settings)
    weights = ((logits.double() - largest.double()[:, None]) / temperature).exp_()
    if sorted_rows:
        few = slice(0, sorted_rows)
        ids = logits[few].sort(dim=-1, descending=True, stable=True).indices
        best = weights[few].gather(1, ids)
        best = torch.where(torch.arange(best.shape[1], device=best.device) < top_k[few], best, 0.0)
        before = best.cumsum(-1)
        target = torch.where(top_p[few] < 1, top_p[few] * before[:, -1:], torch.inf)
        before = before.roll(1, -1)
        before[:, 0] = 0.0
        weights[few] = torch.zeros_like(best).scatter_(1, ids, torch.where(before < target, best, 0.0))
    sums = weights.cumsum(-1)
    total = sums[:, -1:].contiguous()
    chosen = torch.searchsorted(sums, number * total, right=True)  # first id whose sum exceeds the target
    last = torch.searchsorted(sums, total)  # last id with a weight: the target may round up to the total
    return torch.minimum(chosen, last)[:, 0].clamp_(max=logits.shape[1] - 1)  # a row of NaN: any id, it is an error
