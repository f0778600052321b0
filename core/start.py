"""From a composed config to a running engine, in one fixed order; what was selected is said line by line and kept in the manifest.

    compose, build, check, load, prepare_model, select_kernel, size and allocate the pool, bind kernels, cost, setup, warm-up

Everything that can be refused without the model is refused before it is loaded.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from omegaconf import DictConfig, OmegaConf

import core
from core.blocks import BlockPool
from core.config import Root, check_root, instantiate, option_name
from core.cost import CostModel
from core.discovery import discover
from core.edge import Edge
from core.engine import Engine
from core.kernel import SCALED
from core.metrics import Metrics
from core.plugins import Chosen, EngineHooks
from core.types import CacheConfig, ConfigError, EngineInfo, Limits, ModelInfo

LOG = logging.getLogger(__name__)
Say = Callable[[str], None]
MAX_SWAP_POOLS = 16
"""Host blocks are at most this many times the pool's: more could not be filled, and a toy model's are tiny but each is tracked."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


@attrs.frozen(eq=False)
class Started:
    """A running engine, the config it was made from, what was selected, and the lines that said so."""

    engine: Engine
    config: DictConfig
    manifest: dict[str, Any]
    lines: tuple[str, ...] = ()


def start(config: DictConfig, say: Say = LOG.info, max_queue: int | None = None) -> Started:
    """Build and start the engine that a config describes. ConfigError for bad input, PolicyError for a plugin's fault.

    ``max_queue`` is what the config's ``auto`` stands for: a frontend's bound on how many requests may wait, None without one.
    """
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        say(line)

    root = check_root(config)
    root = attrs.evolve(root, max_queue=max_queue) if root.max_queue == "auto" else root
    executor, hooks = _build(config, root, tell)
    try:
        return _start(config, root, executor, hooks, tell, lines)
    except BaseException:
        hooks.teardown()
        executor.close()
        raise


def _start(config: DictConfig, root: Root, executor: Any, hooks: EngineHooks, tell: Say, lines: list[str]) -> Started:
    model = _with_kv_dtype(executor.load(), root.cache)
    for line in executor.prepare(hooks, root.cache):
        tell(line)
    limits = _limits(root, model, executor)
    executor.allocate(limits)
    cost, cost_record = _cost(root, model, executor)
    pool = BlockPool(limits.num_blocks, limits.block_size)
    engine = Engine(
        executor=executor,
        hooks=hooks,
        limits=limits,
        model=model,
        cost=cost,
        pool=pool,
        edge=Edge(model, limits, executor.tokenizer, root.slo),
        metrics=Metrics(),
        tokenizer=executor.tokenizer,
        checks=root.checks,
        seed=root.seed,
    )
    hooks.setup(
        EngineInfo(
            limits=limits,
            model=model,
            pool=pool,
            cost=cost,
            seed=root.seed,
            num_free_swap_blocks=lambda: engine.stats()["free_swap_blocks"],
            swap=engine.state.swap,
        )
    )
    executor.warm_up()
    for line in _describe(model, limits, executor, cost_record):
        tell(line)
    return Started(engine, config, _manifest(config, engine, cost_record), tuple(lines))


# ------------------------------------------------------------------------------------------------ build and check


def _build(config: DictConfig, root: Root, tell: Say) -> tuple[Any, EngineHooks]:
    """Every chosen object, from config alone; the hooks are checked before the executor loads anything."""
    executor_name = option_name(config, "executor")
    executor = instantiate(config.executor, executor_name)
    chosen = [
        _choose(config, config[kind], option_name(config, kind))
        for kind in ("allocator", "scheduler", "predictor", "admission", "preemption", "idle")
    ]
    if getattr(executor, "uses_kernels", "model" in config.executor):
        chosen += [one for kind in ("kernel", "linears") for one in _chain(config, kind, tell)]
    else:
        unused = "kernel and linears" if "model" in config.executor else "kernel, linears and model"
        tell(f"{executor_name}: runs no model; {unused} are not used")
    if "_target_" in config.observers:
        raise ConfigError("an observer's YAML must begin with '# @package observers.<its name>'")
    chosen += [_choose(config, node, f"observers={name}") for name, node in config.observers.items()]
    tell(f"quire {core.__version__}, Python {platform.python_version()}, torch {_version('torch')}")
    for one in chosen:
        tell(f"{one.option}  [{one.dist} {one.version}]")
    hooks = EngineHooks(chosen, root.observer_errors)
    for hook, who in hooks.wrappers().items():
        tell(f"{hook} is wrapped by {', '.join(who)}")
    return executor, hooks


def _choose(config: DictConfig, node: Any, option: str) -> Chosen:
    kind, _, name = option.partition("=")
    plugin = instantiate(node, option)
    dist, version = discover().provider(type(plugin).__module__)
    return Chosen(kind, name, plugin, dist, version, f"{type(plugin).__module__}.{type(plugin).__qualname__}")


def _chain(config: DictConfig, kind: str, tell: Say) -> list[Chosen]:
    """The plugins of ``kernel`` or ``linears``: one, or with ``auto`` the ``candidates`` in ``order``.

    An ``auto`` candidate whose packages are not installed is left out, and that is said; a named option is not.
    """
    node = config[kind]
    if "candidates" not in node:
        return [_choose(config, node, option_name(config, kind))]
    chosen = []
    for name in node.order or []:
        if name not in node.candidates:
            raise ConfigError(f"{kind}.order={name}: allowed are {', '.join(map(str, node.candidates))}")
        try:
            chosen.append(_choose(config, node.candidates[name], f"{kind}={name}"))
        except ConfigError as error:
            if not _is_missing_package(error):
                raise
            tell(f"{option_name(config, kind)}: {name} is left out: {error}")
    if not chosen:
        raise ConfigError(
            f"{kind}.order={list(node.order or [])}: it needs at least one of {', '.join(map(str, node.candidates))}"
        )
    return chosen


def _is_missing_package(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ImportError):
        error = error.__cause__
    return error is not None


# ------------------------------------------------------------------------------------------------ sizes and cost


def _with_kv_dtype(model: ModelInfo, cache: CacheConfig) -> ModelInfo:
    """The model's bytes a token, in the type that the cache stores."""
    if cache.kv_dtype is None or cache.kv_dtype == model.dtype or model.dtype not in DTYPE_BYTES:
        return model
    values = model.kv_bytes_per_token // DTYPE_BYTES[model.dtype]
    scales = 4 * values // model.head_dim if cache.kv_dtype in SCALED else 0
    return attrs.evolve(model, kv_bytes_per_token=values * DTYPE_BYTES[cache.kv_dtype] + scales)


def _limits(root: Root, model: ModelInfo, executor: Any) -> Limits:
    """Settle every null. ``max_model_len: null`` is what the model was made for or what the pool holds, whichever is less."""
    cache = root.cache
    if root.max_model_len is not None and root.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len={root.max_model_len}: {model.name} was made for {model.max_position} tokens at most"
        )
    num_blocks = cache.num_blocks
    if num_blocks is None:
        longest = root.max_model_len or model.max_position
        num_blocks = executor.fit_blocks(cache, longest, root.max_num_seqs, root.max_num_batched_tokens)
    pool_tokens = num_blocks * cache.block_size
    if root.max_model_len is not None and root.max_model_len > pool_tokens:
        raise ConfigError(
            f"max_model_len={root.max_model_len}: the pool has {num_blocks} blocks of {cache.block_size} = {pool_tokens} tokens"
        )
    block_bytes = model.kv_bytes_per_token * cache.block_size
    swap_bytes = cache.swap_gb * 1e9
    if not math.isfinite(swap_bytes):
        raise ConfigError(f"cache.swap_gb={cache.swap_gb}: allowed is a finite number from 0")
    num_swap_blocks = int(swap_bytes // block_bytes) if block_bytes else 0
    return Limits(
        block_size=cache.block_size,
        num_blocks=num_blocks,
        num_swap_blocks=min(num_swap_blocks, max(MAX_SWAP_POOLS * num_blocks, 65_536)),
        max_model_len=root.max_model_len or min(model.max_position, pool_tokens),
        max_num_seqs=root.max_num_seqs,
        max_num_batched_tokens=root.max_num_batched_tokens,
        max_queue=root.max_queue,  # type: ignore[arg-type]
    )


def _cost(root: Root, model: ModelInfo, executor: Any) -> tuple[CostModel, dict[str, dict[str, Any]]]:
    """The rates, from config or measured, and a record of which is which. Memory bandwidth only where the executor knows it."""
    given = {"link_bytes_per_s": root.cost.link_bytes_per_s, "prefill_flop_per_s": root.cost.prefill_flop_per_s}
    measured = executor.measure_cost() if None in given.values() else (0.0, 0.0)
    rates = {name: own if value is None else value for (name, value), own in zip(given.items(), measured, strict=True)}
    found = getattr(executor, "cost_source", "measured")  # a simulated machine knows its rates
    source = {name: found if value is None else "config" for name, value in given.items()}
    record = {name: {"value": rates[name], "from": source[name]} for name in given}
    memory = root.cost.memory_bytes_per_s or getattr(executor, "memory_bytes_per_s", None)
    if memory is not None:
        own = "config" if root.cost.memory_bytes_per_s else "machine"
        record["memory_bytes_per_s"] = {"value": memory, "from": own}
    return CostModel.of(model, rates["link_bytes_per_s"], rates["prefill_flop_per_s"], memory), record


# ------------------------------------------------------------------------------------------------ what was selected


def _describe(model: ModelInfo, limits: Limits, executor: Any, cost: dict[str, dict[str, Any]]) -> list[str]:
    tokens = limits.num_blocks * limits.block_size
    pool = getattr(executor, "fit_line", "") or (
        f"KV pool: {limits.num_blocks} blocks of {limits.block_size} = {tokens} tokens, "
        f"{tokens * model.kv_bytes_per_token / 1e9:.2f} GB, {tokens / limits.max_model_len:.1f} sequences of max_model_len"
    )
    graphs = getattr(executor, "graph_line", "")
    return [
        f"model {model.name}: {model.num_parameters / 1e6:,.1f} M parameters, {model.dtype} on {model.device}",
        pool,
        f"max_model_len {limits.max_model_len}, swap {limits.num_swap_blocks} blocks on the host, "
        f"step at most {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} sequences, "
        + ("no bound on the queue" if limits.max_queue is None else f"at most {limits.max_queue} requests wait"),
        *([graphs] if graphs else []),
        "cost: " + ", ".join(f"{name}={each['value']:.3g} ({each['from']})" for name, each in cost.items()),
    ]


def _manifest(config: DictConfig, engine: Engine, cost: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What ran: enough to run it again and to believe its figures."""
    hooks, model = engine.hooks, engine.model
    policies = [
        {"option": one.option, "target": one.target, "dist": one.dist, "version": one.version} for one in hooks.chosen
    ]
    described = engine.executor.describe()
    return {
        "quire": core.__version__,
        "git": git_revision(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "machine": platform.machine(),
        "policies": [each for each in policies if not each["option"].startswith("observers=")],
        "observers": [each for each in policies if each["option"].startswith("observers=")],
        "disabled_observers": hooks.disabled,
        "wrappers": hooks.wrappers(),
        "device": described.get("device", model.device),
        "dtype": described.get("dtype", model.dtype),
        "kernels": described.get("kernels", {}),
        "executor": described,
        "model": {**attrs.asdict(model), "eos_token_ids": sorted(model.eos_token_ids)},
        "limits": attrs.asdict(engine.limits),
        "cost": cost,
        "config": OmegaConf.to_container(config, resolve=True),
    }


def git_revision() -> str | None:
    """Commit of the checkout that this runs from, with ``+`` when files differ from it; None outside a checkout."""
    root = Path(core.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None  # no git program, or a checkout without a commit


def _version(dist: str) -> str | None:
    try:
        return importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return None
