"""What happens to requests before they run: predicted and admitted once, triaged while they wait, turned away when too many do.

All are answers of plugins (``predict_output``, ``admit``, ``triage``) or of the operator (``max_queue``); this module asks,
checks and acts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from core.scratch import Step
from core.state import Sequence, State, Status
from core.types import Limits, Output, QueueFull, Refusal, Request, Triage


class Mailbox:
    """Commands from any thread to the engine's, and the bound on how many requests may wait."""

    def __init__(self, state: State, max_queue: int | None):
        self._state, self._max_queue = state, max_queue
        self._commands: deque[tuple[str, Any]] = deque()
        self._lock = threading.Lock()
        self._num_requests = 0  # in the mailbox
        self._gap_s = 0.0  # between two first starts, smoothed
        self._last_start_s: float | None = None

    def __bool__(self) -> bool:
        return bool(self._commands)

    def put_request(self, request: Request) -> None:
        """Queue a request; ``QueueFull`` when ``max_queue`` requests wait already."""
        with self._lock:
            waiting = len(self._state.waiting) + self._num_requests
            if self._max_queue is not None and waiting >= self._max_queue:
                raise QueueFull(waiting, self._max_queue, max(1.0, self._gap_s))
            self._num_requests += 1
            self._commands.append(("add", request))

    def put(self, kind: str, value: Any) -> None:
        self._commands.append((kind, value))

    def take(self) -> list[tuple[str, Any]]:
        """Everything that has come, in order. The requests among it count as waiting until ``arrived``."""
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands

    def arrived(self, num_requests: int) -> None:
        """So many requests are in the queue now (or refused): they no longer count as in the mailbox."""
        with self._lock:
            self._num_requests -= num_requests

    def started(self, num_requests: int, now: float) -> None:
        """So many waiting requests began to run: how fast places become free, for ``QueueFull.retry_after_s``."""
        if self._last_start_s is not None:
            gap = (now - self._last_start_s) / num_requests
            self._gap_s += 0.1 * (gap - self._gap_s) if self._gap_s else gap
        self._last_start_s = now


def predict(hooks: Any, new: Seq[Sequence]) -> None:
    """Ask once for each new sequence how long its answer will be; without a predictor it is ``max_tokens``."""
    answer = hooks.predict_output(sequences=tuple(seq.view for seq in new)) if hooks.has("predict_output") else None
    if answer is None:
        return
    if len(answer) != len(new) or not all(p is None or (isinstance(p, int) and p >= 1) for p in answer):
        raise hooks.policy_error(
            "predict_output", f"gave {answer!r} for {len(new)} sequences: None or tokens >= 1 for each"
        )
    for seq, tokens in zip(new, answer, strict=True):
        if tokens is not None:
            seq.set_predicted(tokens)


def triage(step: Step, state: State, hooks: Any, refuse: Callable[[Step, list[tuple[Sequence, str]]], None]) -> None:
    """Ask what becomes of the waiting sequences, check it and do it: refuse some, move others back."""
    answer = hooks.triage(view=state.view)
    if answer is None:
        return
    if not isinstance(answer, Triage):
        raise hooks.policy_error("triage", f"gave {answer!r}: a Triage, or None")
    named = [id for id, _ in answer.refused] + list(answer.demoted)
    for id in named:
        seq = state.sequences.get(id)
        if seq is None or seq.status not in (Status.WAITING, Status.SWAPPED) or seq.times:
            raise hooks.policy_error(
                "triage", f"names {id}: only a waiting sequence without an answer can be refused or demoted"
            )
    if len(set(named)) != len(named):
        raise hooks.policy_error("triage", f"names a sequence twice: {named}")
    for id in answer.demoted:
        state.demote(state.sequences[id], step.started_s)
    refuse(step, [(state.sequences[id], reason) for id, reason in answer.refused])


def admit(new: list[Sequence], hooks: Any, limits: Limits) -> Seq[Refusal | None]:
    """What the allocator says to each new sequence; without an answer core refuses what the whole pool could not hold."""
    answer = hooks.admit(sequences=tuple(s.view for s in new)) if hooks.has("admit") else None
    if answer is None:
        return [_too_large(seq, limits) for seq in new]
    if len(answer) != len(new) or not all(r is None or isinstance(r, Refusal) for r in answer):
        raise hooks.policy_error("admit", f"gave {answer!r} for {len(new)} sequences: None or a Refusal for each")
    return answer


def _too_large(seq: Sequence, limits: Limits) -> Refusal | None:
    view = seq.view
    blocks = -(-(view.num_prompt_tokens + view.max_tokens) // limits.block_size)
    if blocks <= limits.num_blocks:
        return None
    return Refusal(
        f"the request needs {blocks} KV blocks ({view.num_prompt_tokens} prompt + {view.max_tokens} output tokens, "
        f"{limits.block_size} a block), but the pool has {limits.num_blocks} blocks ({limits.num_blocks * limits.block_size} tokens)"
    )


def refused(seq: Sequence, refusal: Refusal) -> list[Output]:
    """One output for each branch of a request that was not admitted."""
    tokens = len(seq.tokens)
    return [
        Output(seq.request.id, seq.id, branch, (), "", "refused", error=refusal.reason, num_prompt_tokens=tokens)
        for branch in range(seq.params.n)
    ]
