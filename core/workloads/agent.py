"""``workload=agent``: sessions of an agent. Every step sends the whole history again and more, and then waits for a tool.

    step k (from 0) has first_tokens + k x tokens_per_step prompt tokens: the prompt of step k - 1, its answer, and what the
    tool gave, which fills up to tokens_per_step

With the defaults (2,000 and 300 more a step, 20 steps) a session submits 97,000 prompt tokens, of which 7,700 are distinct.
The next step is sent ``stall_s`` after the one before it finished. ``reuse_output`` puts the answer that was really given into
the next prompt; false puts made-up tokens of the recorded length there, so prompts are the same whatever the model says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import numpy as np

from core.types import ConfigError, SamplingParams
from core.uniform import uniform
from core.workloads import WorkloadRequest
from core.workloads.draws import (
    arrival_times,
    arrivals,
    closed,
    concurrency,
    flag,
    hashed_tokens,
    integer,
    number,
    plain,
)

SHARED = 2**62  # key of the text that all sessions begin with: no session's own


@attrs.define(eq=False, kw_only=True)
class Agent:
    """``num_sessions`` sessions of ``num_steps`` requests. ``concurrency`` bounds the open sessions, stalled ones included."""

    num_sessions: int = attrs.field(default=16, validator=integer(1))
    num_steps: int = attrs.field(default=20, validator=integer(1))
    first_tokens: int = attrs.field(default=2000, validator=integer(1))
    tokens_per_step: int = attrs.field(default=300, validator=integer(1))
    output_tokens: int = attrs.field(default=100, validator=integer(1))
    shared_tokens: int = attrs.field(default=0, validator=integer(0))  # of first_tokens: the same in every session
    stall_s: float = attrs.field(default=2.0, validator=number(0))  # mean
    stall_cv: float = attrs.field(default=0.0, validator=number(0))  # standard deviation / mean; 0: always the mean
    reuse_output: bool = attrs.field(default=True, validator=flag)
    scale: float = attrs.field(default=1, validator=number(0, above=True))  # lengths are divided by it
    arrivals: dict = attrs.field(factory=closed, converter=plain, validator=arrivals)  # of sessions
    concurrency: int | None = attrs.field(default=None, validator=concurrency)  # closed loop; None: all at once
    seed: int = attrs.field(default=0, validator=integer(0))

    def __attrs_post_init__(self) -> None:
        if self.output_tokens > self.tokens_per_step:
            raise ConfigError(
                f"workload.output_tokens={self.output_tokens}: the answer is part of the {self.tokens_per_step} tokens that a "
                "step adds (workload.tokens_per_step)"
            )
        if self.shared_tokens > self.first_tokens:
            raise ConfigError(
                f"workload.shared_tokens={self.shared_tokens}: "
                f"the first prompt has {self.first_tokens} tokens (workload.first_tokens)"
            )

    @property
    def num_requests(self) -> int:
        return self.num_sessions * self.num_steps

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The first request of each session; the others follow it. ConfigError when a session outgrows ``max_model_len``."""
        longest = self._scaled(self.first_tokens + (self.num_steps - 1) * self.tokens_per_step)
        longest += self._scaled(self.output_tokens)
        if longest > max_model_len:
            raise ConfigError(
                f"workload=agent: the last step of a session needs {longest} tokens, max_model_len is {max_model_len}; "
                "raise workload.scale, or lower workload.num_steps, workload.first_tokens or workload.tokens_per_step"
            )
        times = arrival_times(self.arrivals, np.random.default_rng(self.seed))
        for session, arrival_s in enumerate(itertools.islice(times, self.num_sessions)):
            yield self._step(session, 0, self._first_prompt(session, vocab_size), vocab_size, arrival_s)

    def _first_prompt(self, session: int, vocab_size: int) -> tuple[int, ...]:
        shared = self._scaled(self.shared_tokens) if self.shared_tokens else 0
        own = self._scaled(self.first_tokens) - shared
        return (
            *hashed_tokens(self.seed, SHARED, shared, vocab_size),
            *hashed_tokens(self.seed, session, own, vocab_size),
        )

    def _step(
        self, session: int, step: int, prompt: tuple[int, ...], vocab_size: int, arrival_s: float | None = None
    ) -> WorkloadRequest:
        num_output = self._scaled(self.output_tokens)

        def then(output: tuple[int, ...]) -> tuple[float, WorkloadRequest] | None:
            if step + 1 == self.num_steps:
                return None
            added = self._added(session, step, output if self.reuse_output else None, vocab_size)
            return self._stall(session, step), self._step(session, step + 1, prompt + added, vocab_size)

        return WorkloadRequest(
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False),
            arrival_s=arrival_s,
            recorded_output_tokens=num_output,
            session_id=f"agent-{session}",
            stall_s=self._stall(session, step) if step + 1 < self.num_steps else None,  # its KV may be kept until then
            label=f"agent-{session} step {step}",
            then=then,
        )

    def _added(self, session: int, step: int, output: tuple[int, ...] | None, vocab_size: int) -> tuple[int, ...]:
        """What a step adds to the history: its answer, then the tool's."""
        size = self._scaled(self.first_tokens + (step + 1) * self.tokens_per_step)
        size -= self._scaled(self.first_tokens + step * self.tokens_per_step)
        made_up = hashed_tokens(self.seed, session, size, vocab_size, start=self._start(step))
        answer = () if output is None else output[:size]
        return (*answer, *made_up[len(answer) :])

    def _start(self, step: int) -> int:
        """Where a step's text lies in its session's endless one."""
        return self._scaled(self.first_tokens + step * self.tokens_per_step)

    def _stall(self, session: int, step: int) -> float:
        if not self.stall_s or not self.stall_cv:
            return self.stall_s
        word = int(uniform(self.seed, session, step) * 2**53)
        shape = self.stall_cv**-2
        return float(np.random.default_rng(word).gamma(shape, self.stall_s / shape))

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens / self.scale))
