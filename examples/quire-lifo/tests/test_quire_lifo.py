"""The policies alone, and the installed package through the configuration. Run in an environment that has Quire."""

import pytest
from quire_lifo.schedulers import LifoScheduler

from core.api import build
from core.types import ConfigError

TOY = ["executor=toy", "cache.num_blocks=12", "cache.block_size=4", "cache.swap_gb=0.001", "checks=full"]
LIFO = ["scheduler=lifo", "allocator=lastfit"]


def answers(*overrides):
    with build([*TOY, *overrides]) as quire:
        completions = quire.generate([[1, 2, 3], [4] * 9, [5]], {"max_tokens": 12, "temperature": 0, "n": 2})
        quire.engine.assert_idle()
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_same_tokens_as_the_built_in_policies(preemption):
    """However blocks and turns are handed out, a request's tokens are those it would get alone."""
    assert answers(*LIFO, f"preemption={preemption}") == answers()


def test_newest_waiting_first(caplog):
    with build([*TOY, *LIFO, "scheduler.max_running=1", "observers=[steplog]", "observers.steplog.every=1"]) as quire:
        ids = [quire.engine.submit([1, 2, 3]) for _ in range(3)]
        with caplog.at_level("INFO"):
            plan = quire.engine.step().plan
    assert len(plan.chunks) == 1 and len(ids) == 3
    assert "1 running, 2 waiting" in caplog.text


def test_a_bad_field_is_named():
    with pytest.raises(ConfigError, match="scheduler.max_running=0"):
        build([*TOY, "scheduler=lifo", "scheduler.max_running=0"])
    assert LifoScheduler(max_running=3).max_running == 3
