"""``workload=synthetic``: random token ids with lengths and arrival times drawn from distributions (core/workloads/draws.py).

Prompt lengths, output lengths, arrivals and token ids have a random stream each, so changing one option leaves the
rest as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import numpy as np

from core.types import ConfigError, SamplingParams
from core.workloads import WorkloadRequest
from core.workloads.draws import (
    arrival_times,
    arrivals,
    closed,
    concurrency,
    cut,
    draw,
    flag,
    integer,
    lengths,
    number,
    plain,
)


@attrs.define(eq=False, kw_only=True)
class Synthetic:
    """Requests made up by distribution; the same for the same options and seed."""

    num_requests: int = attrs.field(default=16, validator=integer(1))
    prompt_tokens: int | dict = attrs.field(default=64, converter=plain, validator=lengths)
    output_tokens: int | dict = attrs.field(default=32, converter=plain, validator=lengths)
    scale: float = attrs.field(default=1, validator=number(0, above=True))  # lengths are divided by it
    arrivals: dict = attrs.field(factory=closed, converter=plain, validator=arrivals)
    concurrency: int | None = attrs.field(default=None, validator=concurrency)  # closed loop; None: all at once
    seed: int = attrs.field(default=0, validator=integer(0))
    ignore_eos: bool = attrs.field(default=True, validator=flag)
    declared_tokens: int | None = attrs.field(
        default=None, validator=integer(1, optional=True)
    )  # None: the output's length

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The requests in order of arrival. What does not fit ``max_model_len`` is cut; a warning says how many."""
        streams = np.random.SeedSequence(self.seed).spawn(4)
        prompt_rng, output_rng, arrival_rng, token_rng = map(np.random.default_rng, streams)
        drawn_prompts = draw(self.prompt_tokens, self.num_requests, prompt_rng, self.scale)
        drawn_outputs = draw(self.output_tokens, self.num_requests, output_rng, self.scale)
        prompts, outputs = cut(drawn_prompts, drawn_outputs, max_model_len, "synthetic")
        if self.declared_tokens is not None and self.ignore_eos:
            raise ConfigError(
                "workload.declared_tokens needs workload.ignore_eos=false: else every answer is as long as declared"
            )
        times = itertools.islice(arrival_times(self.arrivals, arrival_rng), self.num_requests)
        return self._make(prompts.tolist(), outputs.tolist(), times, vocab_size, max_model_len, token_rng)

    def _make(
        self,
        prompts: list[int],
        outputs: list[int],
        arrivals: Iterator[float | None],
        vocab_size: int,
        max_model_len: int,
        rng: np.random.Generator,
    ) -> Iterator[WorkloadRequest]:
        for num_prompt, num_output, arrival_s in zip(prompts, outputs, arrivals, strict=True):
            declared = num_output
            if self.declared_tokens is not None:  # what the client allows, of which the answer uses a part
                declared = max(num_output, min(self.declared_tokens, max_model_len - num_prompt))
            params = SamplingParams(max_tokens=declared, temperature=0.0, ignore_eos=self.ignore_eos, detokenize=False)
            yield WorkloadRequest(
                prompt_token_ids=tuple(rng.integers(0, vocab_size, num_prompt).tolist()),
                params=params,
                arrival_s=arrival_s,
                recorded_output_tokens=num_output,
            )
