"""Engines and servers for the frontends' tests: the toy model with real plugins, and an executor that takes its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs

from core.blocks import BlockPool
from core.cost import CostModel
from core.edge import Edge
from core.engine import Engine
from core.executors.toy import ToyExecutor
from core.frontends.http import HttpFrontend
from core.levels import ServiceLevels
from core.metrics import Metrics
from core.plugins import Chosen, EngineHooks
from core.types import CacheConfig, EngineInfo, Limits, PolicyError
from plugins.allocators.paged import PagedAllocator
from plugins.preemption.recompute import Recompute
from plugins.schedulers.chunked import ChunkedScheduler


@attrs.define(eq=False)
class SlowToy(ToyExecutor):
    """The toy model with real time per step, and a step that can be told to fail."""

    delay_s: float = 0.0
    fail: BaseException | None = None
    fail_after: int | None = None  # steps
    num_steps: int = 0
    hold: threading.Event | None = None  # a step does not end before it is set
    break_at: int | None = None  # rows of requests with this max_tokens fail, each by itself

    def execute(self, *args: Any) -> Any:
        self.num_steps += 1
        if self.hold is not None:
            self.hold.wait()
        if self.num_steps == self.fail_after:
            self.fail = PolicyError("quire 0: allocator=test reserve: a fault on purpose in /srv/secret/place.py")
        if self.fail is not None:
            raise self.fail
        if self.delay_s:
            time.sleep(self.delay_s)
        output = super().execute(*args)
        if self.break_at is None:
            return output
        broken = [i for i, params in enumerate(args[2].params) if params.max_tokens == self.break_at]
        return attrs.evolve(output, errors=dict.fromkeys(broken, "the row has no numbers"))


def toy_engine(
    *,
    num_blocks: int = 4096,
    block_size: int = 16,
    max_model_len: int = 8192,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 128,
    max_queue: int | None = None,
    checks: str = "full",
    allocator: Any = None,
    preemption: Any = None,
    num_swap_blocks: int = 0,
    idle: Any = None,
    levels: ServiceLevels | None = None,
    scheduler: Any = None,
    **toy: Any,
) -> Engine:
    """An engine of the toy model and the paged (or another allocator), chunked and recompute plugins."""
    executor = SlowToy(**{"max_position": max_model_len, **toy})
    policies = {
        "allocator": allocator or PagedAllocator(),
        "scheduler": scheduler or ChunkedScheduler(),
        "preemption": preemption or Recompute(),
        **({"idle": idle} if idle is not None else {}),
    }
    hooks = EngineHooks([Chosen(kind, "test", it, "quire", "0", "") for kind, it in policies.items()])
    limits = Limits(
        block_size=block_size,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_queue=max_queue,
    )
    model, pool = executor.load(), BlockPool(num_blocks, block_size)
    cost = CostModel.of(model, *executor.measure_cost())
    executor.prepare(hooks, CacheConfig(block_size=block_size, num_blocks=num_blocks))
    executor.allocate(limits)
    hooks.setup(engine_info=EngineInfo(limits=limits, model=model, pool=pool, cost=cost, seed=0))
    return Engine(
        executor=executor,
        hooks=hooks,
        limits=limits,
        model=model,
        cost=cost,
        pool=pool,
        edge=Edge(model, limits, executor.tokenizer, levels),
        metrics=Metrics(),
        tokenizer=executor.tokenizer,
        checks=checks,
    )


class Server:
    """A server on a free port, in a thread."""

    def __init__(self, engine: Engine, **options: Any):
        self.engine = engine
        self.frontend = HttpFrontend(**{"port": 0, **options})
        self.frontend.check()
        self.url = self.frontend.address
        self.port = int(self.url.rsplit(":", 1)[1])
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.frontend.ready.wait(10)

    def _run(self) -> None:
        try:
            self.frontend.run(SimpleNamespace(engine=self.engine))
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        """Down at once, with nothing left in the engine."""
        self.frontend.shutdown()
        self.frontend.shutdown()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def wait_idle(self, seconds: float = 2.0) -> None:
        """Until the engine has no work; fails after the time is up."""
        until = time.monotonic() + seconds
        while self.engine.has_work():
            assert time.monotonic() < until, f"the engine still works: {self.engine.stats()}"
            time.sleep(0.01)
        self.engine.assert_idle()


@contextmanager
def serving(engine: Engine, **options: Any) -> Iterator[Server]:
    """A server for the length of a block."""
    server = Server(engine, grace_s=options.pop("grace_s", 1.0), **options)
    try:
        yield server
    finally:
        server.stop()
        engine.close()
