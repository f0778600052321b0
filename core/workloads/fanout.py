"""``workload=fanout``: every request asks for ``n`` answers to one prompt, which share its KV where the allocator can."""

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


@attrs.define(eq=False, kw_only=True)
class FanOut:
    """``num_requests`` requests of ``n`` branches each. Branches differ by their random numbers, so ``temperature`` is above 0."""

    num_requests: int = attrs.field(default=16, validator=integer(1))
    n: int = attrs.field(default=8, validator=integer(1))
    prompt_tokens: int | dict = attrs.field(default=4096, converter=plain, validator=lengths)
    output_tokens: int | dict = attrs.field(default=256, converter=plain, validator=lengths)  # of each branch
    temperature: float = attrs.field(default=1.0, validator=number(0))
    scale: float = attrs.field(default=1, validator=number(0, above=True))  # lengths are divided by it
    arrivals: dict = attrs.field(factory=closed, converter=plain, validator=arrivals)
    concurrency: int | None = attrs.field(default=None, validator=concurrency)  # closed loop; None: all at once
    seed: int = attrs.field(default=0, validator=integer(0))
    ignore_eos: bool = attrs.field(default=True, validator=flag)

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The requests in order of arrival. What does not fit ``max_model_len`` is cut; a warning says how many."""
        prompt_rng, output_rng, arrival_rng = map(np.random.default_rng, np.random.SeedSequence(self.seed).spawn(3))
        drawn_prompts = draw(self.prompt_tokens, self.num_requests, prompt_rng, self.scale)
        drawn_outputs = draw(self.output_tokens, self.num_requests, output_rng, self.scale)
        prompts, outputs = cut(drawn_prompts, drawn_outputs, max_model_len, "fanout")
        times = itertools.islice(arrival_times(self.arrivals, arrival_rng), self.num_requests)
        for index, (num_prompt, num_output, arrival_s) in enumerate(zip(prompts.tolist(), outputs.tolist(), times)):
            yield WorkloadRequest(
                prompt_token_ids=tuple(hashed_tokens(self.seed, index, num_prompt, vocab_size)),
                params=SamplingParams(
                    max_tokens=num_output,
                    temperature=self.temperature,
                    seed=index,
                    n=self.n,
                    ignore_eos=self.ignore_eos,
                    detokenize=False,
                ),
                arrival_s=arrival_s,
                recorded_output_tokens=num_output,
            )
