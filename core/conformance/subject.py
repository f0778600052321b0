"""What is being proved: one option, composed through the real configuration, and the engines that it runs in.

The plugin always comes from ``core.config.compose`` and ``core.config.instantiate``, so that entry point, YAML and class are proved
with it. Its partners are shipped options, chosen by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from hypothesis import HealthCheck, Phase, given, settings
from omegaconf import DictConfig, OmegaConf

from core.blocks import BlockPool
from core.config import compose, instantiate
from core.conformance.draws import same_draws
from core.conformance.toy import Sizes, WatchedToy
from core.cost import CostModel
from core.discovery import Option, discover
from core.edge import Edge
from core.engine import Engine
from core.metrics import Metrics
from core.plugins import Chosen, EngineHooks
from core.types import ConfigError, EngineInfo, Limits

PARTNERS = {"executor": "toy", "allocator": "paged", "scheduler": "chunked", "preemption": "recompute"}
"""The shipped options that the subject works with, unless a case says otherwise."""
POLICIES = ("allocator", "scheduler", "preemption")


@attrs.define(eq=False)
class Subject:
    """One option under proof. ``note`` takes a line that belongs in the report: a figure, a capability."""

    kind: str
    name: str
    overrides: tuple[str, ...] = ()
    config_dir: str | None = None  # a folder of YAML files (allocator/mine.yaml) that is not part of a package
    trust: tuple[str, ...] = ()  # modules besides the installed plugins whose classes may be built
    examples: int = 100  # of each property
    shrink: bool = False  # look for the smallest failing example, which may take minutes
    note: Callable[[str], None] = attrs.field(default=lambda line: None)
    facts: dict[str, Any] = attrs.field(factory=dict)  # what cases found out once and share
    _nodes: dict[str, DictConfig] = attrs.field(factory=dict, init=False)

    @property
    def option(self) -> str:
        return f"{self.kind}={self.name}"

    # ------------------------------------------------------------------------------------------- configuration

    def words(self, *more: str) -> list[str]:
        """Overrides that compose a toy engine around the subject; ``more`` come last."""
        chosen = {**PARTNERS, self.kind: self.name}
        words = [f"{kind}={name}" for kind, name in chosen.items()]
        if self.config_dir:
            words.append(f'hydra.searchpath=["file://{Path(self.config_dir).resolve()}"]')
        if self.trust:
            words.append(f"trust=[{','.join(self.trust)}]")
        return [*words, *self.overrides, *more]

    def compose(self, *more: str) -> DictConfig:
        return compose(self.words(*more))

    def config(self, kind: str, name: str | None = None) -> DictConfig:
        """The config in which ``kind`` is the subject or a partner; composed once."""
        word = f"{kind}={name or (self.name if kind == self.kind else PARTNERS[kind])}"
        if word not in self._nodes:
            self._nodes[word] = self.compose() if word == self.option or kind not in PARTNERS else self.compose(word)
        return self._nodes[word]

    def plain_node(self) -> dict[str, Any]:
        """The subject's fields as its YAML has them, without the overrides of this run."""
        words = [word for word in self.words() if word not in self.overrides]
        return dict(OmegaConf.to_container(compose(words)[self.kind]))  # type: ignore[arg-type]

    def find(self) -> Option | None:
        """Who offers the subject; None when only a YAML in ``config_dir`` names it."""
        return discover().find(self.kind, self.name)

    def build(self, kind: str | None = None, name: str | None = None, sizes: Sizes | None = None) -> Any:
        """A new plugin object. Interpolations in its YAML see the sizes."""
        kind = kind or self.kind
        config = self.config(kind, name)
        if sizes is not None:
            sizes.put_into(config)
        return instantiate(config[kind], f"{kind}={name or (self.name if kind == self.kind else PARTNERS[kind])}")

    def origin(self) -> str:
        """Distribution, version and class, for the head of the report."""
        plugin = self.build()
        dist, version = discover().provider(type(plugin).__module__)
        return f"{self.option}  [{dist} {version}: {type(plugin).__module__}.{type(plugin).__qualname__}]"

    # ------------------------------------------------------------------------------------------- engines

    def engine(self, sizes: Sizes, *, checks: str = "full", **partners: Any) -> Engine:
        """A toy engine around the subject. ``partners`` are option names or ready objects by kind. ConfigError: it
        refuses the sizes."""
        chosen = []
        for kind in POLICIES:
            partner = partners.get(kind)
            plugin = self.build(kind, partner, sizes) if partner is None or isinstance(partner, str) else partner
            name = self.name if kind == self.kind else partner if isinstance(partner, str) else PARTNERS[kind]
            dist, version = discover().provider(type(plugin).__module__)
            chosen.append(
                Chosen(kind, name, plugin, dist, version, f"{type(plugin).__module__}.{type(plugin).__qualname__}")
            )
        executor = WatchedToy(vocab_size=sizes.vocab_size, step_seconds=1.0)
        model = executor.load()
        limits = Limits(**{f.name: getattr(sizes, f.name) for f in attrs.fields(Limits) if hasattr(sizes, f.name)})
        hooks = EngineHooks(chosen)
        executor.allocate(limits)
        pool = BlockPool(limits.num_blocks, limits.block_size)
        cost = CostModel.of(model, sizes.link_bytes_per_s, 1e10)
        engine = Engine(
            executor=executor, hooks=hooks, limits=limits, model=model, cost=cost, pool=pool,
            edge=Edge(model, limits, executor.tokenizer), metrics=Metrics(), tokenizer=executor.tokenizer, checks=checks,
        )  # fmt: skip
        swap = engine.state.swap
        known: dict[str, Any] = {
            "limits": limits, "model": model, "pool": pool, "cost": cost, "seed": 0,
            "num_free_swap_blocks": lambda: swap.num_free, "swap": swap,
        }  # fmt: skip
        hooks.setup(EngineInfo(**{field.name: known[field.name] for field in attrs.fields(EngineInfo)}))
        return engine

    def refuses(self, sizes: Sizes) -> str | None:
        """Why the subject does not start with these sizes; None when it does."""
        try:
            self.engine(sizes)
        except ConfigError as error:
            return str(error)
        return None

    # ------------------------------------------------------------------------------------------- properties

    def settings(self, share: float = 1.0, **more: Any) -> settings:
        phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if self.shrink else [])]
        return settings(
            max_examples=max(1, int(self.examples * share)),
            deadline=None,
            database=None,
            derandomize=True,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            **more,
        )

    def holds(self, check: Callable[..., None], share: float = 1.0, **strategies: Any) -> None:
        """Call ``check`` with many drawn examples, the same ones in every run."""
        with same_draws():
            self.settings(share)(given(**strategies)(check))()


def names(kind: str, config_dir: str | None) -> list[str]:
    """Every option of a kind that can be named: installed ones, and the YAML files of ``config_dir``."""
    found = {option.name for option in discover().options if option.kind == kind}
    if config_dir:
        found |= {path.stem for path in (Path(config_dir) / kind).glob("*.yaml")}
    return sorted(found)


def require(kind: str, name: str, config_dir: str | None) -> None:
    """ConfigError that lists what is installed, broken plugins included, unless the option exists."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    allowed = names(kind, config_dir)
    if name not in allowed:
        broken = "".join(f"; broken: {each}" for each in discover().broken)
        raise ConfigError(f"--{kind} {name}: no such option; installed: {', '.join(allowed) or 'none'}{broken}")


def subject_of(option: str, overrides: Sequence[str] = (), **fields: Any) -> Subject:
    """A subject from ``allocator=mine``, built once so that a broken plugin is an error before any case runs."""
    kind, _, name = option.partition("=")
    require(kind, name, fields.get("config_dir"))
    subject = Subject(kind, name, tuple(overrides), **fields)
    if "candidates" in subject.config(kind)[kind]:
        listed = ", ".join(map(str, subject.config(kind)[kind].candidates))
        raise ConfigError(f"--{kind} {name}: it is a list of others; name one of {listed}")
    subject.build()
    return subject


Partners = Mapping[str, Any]
