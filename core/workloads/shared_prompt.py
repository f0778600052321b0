"""``workload=shared_prompt``: requests that begin with a common system prompt, or with one of several by popularity."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import numpy as np

from core.types import SamplingParams
from core.workloads import WorkloadRequest
from core.workloads.draws import (
    arrival_times,
    arrivals,
    closed,
    concurrency,
    cut,
    draw,
    flag,
    hashed_tokens,
    integer,
    lengths,
    number,
    plain,
)

OWN = 2**32  # key of the first request's own text, behind those of the shared prompts


@attrs.define(eq=False, kw_only=True)
class SharedPrompt:
    """``shared_tokens`` that requests have in common, then ``prompt_tokens`` of their own.

    With ``num_shared`` above 1 there are that many system prompts; the k-th most popular is chosen in proportion to k ** -zipf.
    """

    num_requests: int = attrs.field(default=64, validator=integer(1))
    shared_tokens: int = attrs.field(default=2000, validator=integer(1))
    num_shared: int = attrs.field(default=1, validator=integer(1))
    zipf: float = attrs.field(default=1.0, validator=number(0))
    prompt_tokens: int | dict = attrs.field(default=128, converter=plain, validator=lengths)
    output_tokens: int | dict = attrs.field(default=128, converter=plain, validator=lengths)
    scale: float = attrs.field(default=1, validator=number(0, above=True))  # lengths are divided by it
    arrivals: dict = attrs.field(factory=closed, converter=plain, validator=arrivals)
    concurrency: int | None = attrs.field(default=None, validator=concurrency)  # closed loop; None: all at once
    seed: int = attrs.field(default=0, validator=integer(0))
    ignore_eos: bool = attrs.field(default=True, validator=flag)

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The requests in order of arrival. What does not fit ``max_model_len`` is cut; a warning says how many."""
        streams = map(np.random.default_rng, np.random.SeedSequence(self.seed).spawn(4))
        prompt_rng, output_rng, arrival_rng, choice_rng = streams
        shared = max(1, round(self.shared_tokens / self.scale))
        drawn_prompts = shared + draw(self.prompt_tokens, self.num_requests, prompt_rng, self.scale)
        drawn_outputs = draw(self.output_tokens, self.num_requests, output_rng, self.scale)
        prompts, outputs = cut(drawn_prompts, drawn_outputs, max_model_len, "shared_prompt")
        times = itertools.islice(arrival_times(self.arrivals, arrival_rng), self.num_requests)
        weights = np.arange(1, self.num_shared + 1) ** -float(self.zipf)
        chosen = choice_rng.choice(self.num_shared, self.num_requests, p=weights / weights.sum())
        rows = zip(prompts.tolist(), outputs.tolist(), chosen.tolist(), times)
        for index, (num_prompt, num_output, which, arrival_s) in enumerate(rows):
            common = hashed_tokens(self.seed, which, min(shared, num_prompt), vocab_size)
            own = hashed_tokens(self.seed, OWN + index, num_prompt - len(common), vocab_size)
            yield WorkloadRequest(
                prompt_token_ids=(*common, *own),
                params=SamplingParams(
                    max_tokens=num_output, temperature=0.0, ignore_eos=self.ignore_eos, detokenize=False
                ),
                arrival_s=arrival_s,
                recorded_output_tokens=num_output,
            )
