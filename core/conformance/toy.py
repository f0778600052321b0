"""The kit's toy engine: sizes, requests, a run that watches every step, and the tokens that each request must get.

The toy model's KV entry is the token itself with its position, so a block that is wrong in any way is seen twice: ``check_content``
reads every running sequence's KV through its block table after each step, and the answers differ from ``oracle``'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
from omegaconf import DictConfig, OmegaConf

from core.engine import Engine
from core.executors.toy import ToyExecutor
from core.types import Batch, Limits, Move, Output, SamplingBatch, SamplingParams, StepReport

VOCAB = 320
STEP_CAP = 6000


@attrs.frozen(kw_only=True)
class Sizes:
    """Everything about an engine that is not a policy."""

    num_blocks: int = 64
    block_size: int = 4
    num_swap_blocks: int = 64
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    max_model_len: int = 64
    link_bytes_per_s: float = 1e6
    vocab_size: int = VOCAB

    def put_into(self, config: DictConfig) -> None:
        """Write the sizes into a composed config, for options whose YAML refers to them."""
        OmegaConf.set_struct(config, False)
        for name in ("num_blocks", "block_size"):
            config.cache[name] = getattr(self, name)
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            config[name] = getattr(self, name)


@attrs.frozen
class Work:
    """One request: what it asks, and the steps before which it arrives and is aborted."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    n: int = 1
    salt: str = ""
    arrives: int = 0
    aborts: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.max_tokens

    def submit(self, engine: Engine, arrival_s: float | None = None) -> int:
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            n=self.n,
            detokenize=False,
            ignore_eos=True,
        )
        return engine.submit(
            self.prompt, params, arrival_s=arrival_s, cache_salt=self.salt,
            recorded_output_tokens=self.max_tokens, client_id=f"client {self.seed}",
        )  # fmt: skip


class WatchedToy(ToyExecutor):
    """The toy executor, and what its KV will be once the moves that are decided but not run have run."""

    def content_after(self, moves: Sequence[Move]) -> np.ndarray:
        """[num_blocks, block_size] int64: token + (position << 20) of each slot."""
        if not moves:
            return self._slots
        slots, host = self._slots.copy(), self._host.copy()
        for kind, source, destination in moves:
            if kind == "copy":
                slots[destination] = slots[source]
            elif kind == "swap_out":
                host[destination] = slots[source]
            else:
                slots[destination] = host[source]
        return slots


def check_content(engine: Engine) -> None:
    """Every computed token of every running sequence is in the block where its table says: AssertionError names the wrong one."""
    content = engine.executor.content_after(engine._moves)  # type: ignore[attr-defined]
    size = engine.limits.block_size
    for view in engine.state.running:
        n = view.num_computed_tokens
        table = list(view.block_table[: -(-n // size)])
        seen = content[table].reshape(-1)[:n]
        wanted = np.array(view.token_ids[:n], dtype=np.int64) + (np.arange(n, dtype=np.int64) << 20)
        wrong = np.flatnonzero(seen != wanted)
        if len(wrong):
            position = int(wrong[0])
            raise AssertionError(
                f"the KV of {view!r} is wrong: block {table[position // size]} (table index {position // size}) holds "
                f"{_describe(int(seen[position]))} where token {view.token_ids[position]} of position {position} belongs "
                "(a block that was not copied, belongs to another sequence, or was said to be cached and is not)"
            )


def _describe(entry: int) -> str:
    return "nothing" if entry < 0 else f"token {entry & 0xFFFFF} of position {entry >> 20}"


# ------------------------------------------------------------------------------------------------ the reference


@functools.lru_cache(maxsize=8192)
def _oracle(prompt: tuple[int, ...], max_tokens: int, temperature: float, seed: int, branch: int) -> tuple[int, ...]:
    length = len(prompt) + max_tokens
    toy = ToyExecutor(vocab_size=VOCAB, step_seconds=1.0)
    toy.allocate(
        Limits(
            block_size=length,
            num_blocks=1,
            num_swap_blocks=0,
            max_model_len=length,
            max_num_seqs=1,
            max_num_batched_tokens=length,
        )
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    tokens = list(prompt)
    for _ in range(max_tokens):
        n = len(tokens)
        sampling = SamplingBatch([0], [params], [seed], [branch], [n], [tokens], [len(prompt)], [None])
        tokens.append(toy.execute(_one_sequence(tokens, length), (), sampling).token_ids[0])
    return tuple(tokens[len(prompt) :])


def _one_sequence(tokens: list[int], block_size: int) -> Batch:
    n = len(tokens)
    places = np.arange(n, dtype=np.int32)
    return Batch(
        token_ids=np.array(tokens, dtype=np.int32), positions=places, slot_mapping=places,
        query_start=np.array([0, n], dtype=np.int32), kv_lens=np.array([n], dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32), logit_tokens=np.array([n - 1], dtype=np.int32),
        sequence_ids=(0,), block_size=block_size, max_query_len=n, max_kv_len=n,
    )  # fmt: skip


def oracle(work: Work, branch: int) -> tuple[int, ...]:
    """The tokens that a branch must get, from the toy model alone: no engine, no pool, no policy takes part."""
    return _oracle(work.prompt, work.max_tokens, work.temperature, work.seed, branch)


# ------------------------------------------------------------------------------------------------ a run


class Served:
    """What the requests of a run got, by (index of the work, branch), and what the engine reported."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = list(works)
        self.index: dict[int, int] = {}  # request id -> index of its work
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.reason: dict[tuple[int, int], str] = {}
        self.last: dict[tuple[int, int], Output] = {}
        self.reports: list[StepReport] = []

    def take(self, report: StepReport) -> None:
        self.reports.append(report)
        for out in report.outputs:
            key = (self.index[out.request_id], out.branch)
            if key in self.reason:
                raise AssertionError(f"request {key[0]} branch {key[1]} got an output after it had ended")
            self.tokens.setdefault(key, []).extend(out.token_ids)
            self.last[key] = out
            if out.finish_reason is not None:
                self.reason[key] = out.finish_reason

    def check_tokens(self, may_refuse: Callable[[Work], bool] = lambda work: False) -> None:
        """Same tokens as the reference: whole answers, or a prefix of them for what was aborted."""
        for i, work in enumerate(self.works):
            for branch in range(work.n):
                got, reason = tuple(self.tokens.get((i, branch), ())), self.reason.get((i, branch))
                if reason == "refused" and may_refuse(work):
                    continue
                where = f"request {i} (prompt of {len(work.prompt)}, max_tokens {work.max_tokens}), branch {branch} of {work.n}"
                if reason not in ("length", "abort"):
                    error = self.last[i, branch].error if (i, branch) in self.last else "no output"
                    raise AssertionError(f"{where} ended with {reason}: {error}")
                wanted = oracle(work, branch)
                if got != (wanted if reason == "length" else wanted[: len(got)]):
                    raise AssertionError(f"{where} got other tokens than it gets alone: {got} instead of {wanted}")

    def trace(self) -> list[Any]:
        """Everything observable of the run, as plain values: two equal runs have equal traces."""
        return [
            [
                [list(chunk) for chunk in report.plan.chunks],
                [[self.index[o.request_id], o.branch, list(o.token_ids), o.finish_reason] for o in report.outputs],
                [[p.kind, p.num_computed_tokens, p.num_blocks] for p in report.preempted],
                [report.num_running, report.num_waiting, report.prefix_hit_tokens],
                list(attrs.astuple(report.memory)) if report.memory is not None else [],
            ]
            for report in self.reports
        ]


def serve(engine: Engine, works: Sequence[Work], *, step_cap: int = STEP_CAP, content: bool = True) -> Served:
    """Serve to the end, looking after every step. AssertionError: no progress, a wrong block, or something left behind."""
    served = Served(works)
    pending = sorted(range(len(works)), key=lambda i: works[i].arrives)
    for step in range(step_cap):
        while pending and (works[pending[0]].arrives <= step or not engine.has_work()):
            i = pending.pop(0)
            served.index[works[i].submit(engine)] = i
        for request_id, i in served.index.items():
            if works[i].aborts == step:
                engine.abort(request_id)
        if not engine.has_work() and not pending:
            engine.assert_idle()
            return served
        take_step(engine, served, content)
    raise AssertionError(f"the work has not ended after {step_cap} steps: {engine.stats()} (no termination)")


def take_step(engine: Engine, served: Served, content: bool = True) -> StepReport:
    """One step; with work it must compute a token, end something, or say until when it waits."""
    report = engine.step()
    served.take(report)
    if content:
        check_content(engine)
    ended = any(out.finish_reason in ("refused", "abort", "error") for out in report.outputs)
    if report.idle and report.wait_until is not None:
        engine.executor.wait_until(report.wait_until)
    elif not report.num_tokens and not ended and engine.state.sequences:
        raise AssertionError(f"step {report.step} with work computed nothing (no progress): {engine.stats()}")
    return report
