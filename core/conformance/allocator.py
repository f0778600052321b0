"""What every allocator must do. Named by what each case protects; ``python -m core.conformance --allocator NAME`` runs them."""

from __future__ import annotations

import random
from typing import ClassVar

import attrs
import pytest
from hypothesis import strategies as st

from core.conformance.common import PolicyCases
from core.conformance.machine import run_machine
from core.conformance.strategies import PREFIXES, contests, fixed_works
from core.conformance.subject import Subject
from core.conformance.timing import check_growth, check_time
from core.conformance.toy import Served, Sizes, Work, serve, take_step
from core.conformance.watch import Watch
from core.engine import Engine
from core.plugins import HOOKS
from core.types import ConfigError

NUM_SEQUENCES = 200
TIMED = ("cached_tokens", "reserve", "commit", "release")
"""The hooks whose time in a step is measured together."""


class AllocatorCases(PolicyCases):
    kind: ClassVar[str] = "allocator"

    def _may_refuse(self, work: Work, sizes: Sizes) -> bool:
        """An allocator may refuse what it can never place beside its own slack; never what needs a quarter of the pool."""
        return -(-work.num_tokens // sizes.block_size) * 4 > sizes.num_blocks

    def test_any_plan_any_company(self, subject: Subject) -> None:
        """Whatever is planned, forked, aborted, swapped or dropped, in any order: no block has two owners unless
        counted, none is given back twice or lost, a refused plan leaves no trace, and every KV entry is where its table says."""
        seen = run_machine(subject, self._may_refuse)
        assert seen, f"{subject.option} refused every pool size: {subject.facts.get('refused sizes')}"
        subject.note(", ".join(f"{name} {count}" for name, count in sorted(seen.items())))

    def test_same_tokens_as_alone(self, subject: Subject) -> None:
        """With the shipped scheduler and each shipped preemption, however tight the pool, every request gets the
        tokens it gets alone, and nothing is left behind."""

        def holds(contest: tuple[list[Work], Sizes], preemption: str) -> None:
            works, sizes = contest
            try:
                engine = subject.engine(sizes, preemption=preemption)
            except ConfigError as error:
                subject.facts["refused sizes"] = str(error)
                return
            Watch(engine).install()
            serve(engine, works).check_tokens(lambda work: self._may_refuse(work, sizes))

        subject.holds(holds, contest=contests(), preemption=st.sampled_from(["recompute", "swap", "breakeven"]))

    @pytest.mark.parametrize("block_size", [1, 2, 3, 5, 7, 16, 33, 256])
    def test_block_sizes(self, subject: Subject, block_size: int) -> None:
        """Any block size from 1 to 256 works, not only powers of two, with prompts that end on, before and behind a
        block's edge."""
        edges = [max(1, block_size + d) for d in (-1, 0, 1)] + [2 * block_size + d for d in (0, 1)]
        works = [
            Work(tuple(t % 300 for t in range(i, i + n)), 1 + 3 * i, seed=i, arrives=i) for i, n in enumerate(edges)
        ]
        longest = max(work.num_tokens for work in works)
        sizes = Sizes(
            block_size=block_size, num_blocks=max(2, 2 * -(-longest // block_size)), max_model_len=longest,
            max_num_batched_tokens=max(8, block_size + 1),
        )  # fmt: skip
        engine = subject.engine(sizes, preemption="swap")
        Watch(engine).install()
        serve(engine, works).check_tokens(lambda work: self._may_refuse(work, sizes))

    def test_a_request_alone_in_the_pool_ends(self, subject: Subject) -> None:
        """Progress: a request of max_model_len tokens is served when it is alone, also in chunks of one token."""
        for budget in (1, 5, 64):
            work = Work(tuple(range(20)), 28)
            sizes = Sizes(block_size=4, num_blocks=16, max_model_len=48, max_num_batched_tokens=budget, max_num_seqs=1)
            serve(subject.engine(sizes), [work]).check_tokens()

    def test_a_second_engine_run_in_the_same_engine(self, subject: Subject) -> None:
        """What one load leaves behind (counters, an index, cached blocks) does not disturb the next one."""
        works = fixed_works()
        longest = max(work.num_tokens for work in works)
        sizes = Sizes(
            block_size=4,
            num_blocks=-(-longest // 4) + 6,
            max_num_batched_tokens=12,
            max_num_seqs=6,
            max_model_len=longest,
        )
        engine = subject.engine(sizes, preemption="swap")
        Watch(engine).install()
        for _ in range(3):
            serve(engine, works).check_tokens(lambda work: self._may_refuse(work, sizes))

    def test_forked_branches(self, subject: Subject) -> None:
        """n > 1: the branches start from one prompt and part; each gets its own tokens, and a shared block is copied
        before a write."""
        work = Work(PREFIXES[0][:14], 9, 0.9, seed=3, n=4)
        sizes = Sizes(block_size=4, num_blocks=64)
        engine = subject.engine(sizes)
        watch = Watch(engine).install()
        served = Served([work])
        served.index[work.submit(engine)] = 0
        fullest = 0
        while engine.has_work():
            take_step(engine, served)
            fullest = max(fullest, engine.pool.num_used)
        engine.assert_idle()
        served.check_tokens()
        offers = engine.hooks.has("fork")
        how = (
            "shares blocks"
            if watch.seen["shared"]
            else "copies"
            if offers
            else "has no fork hook: branches queue and compute the prompt again"
        )
        subject.note(f"{how}; 4 branches of a 14-token prompt held {fullest} blocks of 4 at most")

    def test_prefixes_are_shared_within_a_salt_only(self, subject: Subject) -> None:
        """An allocator with cached_tokens finds a prompt again, leaves its last token to compute, and never across cache_salts."""
        sizes = Sizes(block_size=4, num_blocks=64)
        engine = subject.engine(sizes)
        if not engine.hooks.has("cached_tokens"):
            pytest.skip("it shares no prefixes (no cached_tokens hook)")
        Watch(engine).install()
        work = Work(PREFIXES[1][:16], 5, 0.0, seed=1)

        def hit(work: Work) -> int:
            served = serve(engine, [work])
            served.check_tokens()
            return served.last[0, 0].num_cached_tokens

        first, again, other = hit(work), hit(work), hit(attrs.evolve(work, salt="another tenant"))
        assert first == 0, f"a new engine says that {first} tokens of the first prompt are cached"
        assert 0 < again < 16, f"the same prompt of 16 tokens again: {again} tokens cached, expected 1 to 15"
        assert other == 0, f"the same prompt under another cache_salt: {other} tokens cached, expected none"
        subject.note(f"{again} of 16 tokens found again")
        if "reset_cache" in HOOKS and engine.hooks.has("reset_cache"):
            engine.reset_cache()
            after = hit(work)
            assert after == 0, f"after reset_cache {after} tokens of the prompt are still cached"
            subject.note("reset_cache forgets them")

    @pytest.mark.parametrize("num_blocks", [2_000, 100_000])
    def test_time_per_call(self, subject: Subject, num_blocks: int) -> None:
        """cached_tokens, reserve, commit and release together take at most 50 times what paged's take with the same 200
        running sequences, in a small and in a large pool."""
        what = f"up to {NUM_SEQUENCES} sequences and {num_blocks:,} blocks"
        check_time(subject, lambda one, count: busy(one, count, num_blocks), NUM_SEQUENCES, TIMED, what)

    def test_time_grows_with_the_sequences_not_their_square(self, subject: Subject) -> None:
        """Eight times as many running sequences in eight times as many blocks: at most 16 times the time a step."""
        check_growth(subject, lambda one, count: busy(one, count, 10 * count), TIMED)


def busy(subject: Subject, count: int, num_blocks: int) -> Engine:
    """``count`` sequences that start at once, with 16 tokens each and 30 to 69 to come."""
    sizes = Sizes(
        block_size=16, num_blocks=num_blocks, max_num_seqs=count, max_num_batched_tokens=20 * count + 96, max_model_len=160
    )  # fmt: skip
    engine = subject.engine(sizes, checks="cheap")
    rng = random.Random(0)
    for i in range(count):
        Work(tuple(rng.choices(range(300), k=16)), 30 + i % 40, seed=i).submit(engine)
    return engine
