"""``workload=synthetic``: random token ids with lengths and arrival times drawn from distributions.

Lengths are a number of tokens or a distribution, rounded to whole tokens and at least 1::

    {kind: fixed, value: 64}
    {kind: uniform, low: 32, high: 96}              both ends included
    {kind: lognormal, median: 64, sigma: 1.0}       exp(normal(ln median, sigma))
    {kind: lognormal, mean: 105, sigma: 1.0}        the same with median = mean / exp(sigma^2 / 2)
    {kind: lognormal, ..., max: 512}                longer ones become 512

Arrivals, the first always at 0 s::

    {kind: closed}                         a new request when one ends, ``concurrency`` in flight
    {kind: burst}                          all at 0 s
    {kind: poisson, rate_per_s: 2}         gaps exponential, mean 1 / rate
    {kind: gamma, rate_per_s: 2, cv: 3}    gaps gamma, mean 1 / rate, standard deviation cv / rate (above 1: bursts)

Prompt lengths, output lengths, arrivals and token ids have a random stream each, so changing one option leaves the
rest as they were.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from core.types import ConfigError, SamplingParams
from core.workloads import WorkloadRequest

log = logging.getLogger(__name__)

LENGTH_FIELDS = {"fixed": {"value"}, "uniform": {"low", "high"}, "lognormal": {"mean", "median", "sigma", "max"}}
ARRIVAL_KINDS = ("closed", "burst", "poisson", "gamma")


def _plain(value: Any) -> Any:
    """A Hydra node as a plain dict without nulls."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value


def _is_int(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _positive(where: str, value: object) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{where} must be a finite number above 0, got {value!r}")


def _integer(low: int, optional: bool = False):
    def check(instance: object, attribute: attrs.Attribute, value: object) -> None:
        if not _is_int(value, low) and not (optional and value is None):
            or_null = " or null" if optional else ""
            raise ConfigError(f"workload.{attribute.name} must be an integer of at least {low}{or_null}, got {value!r}")

    return check


def _lengths(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    name = f"workload.{attribute.name}"
    if not isinstance(value, dict):
        if not _is_int(value, 1):
            raise ConfigError(f"{name} must be an integer of at least 1, or a distribution, got {value!r}")
        return
    kind, given = value.get("kind"), set(value) - {"kind"}
    if kind not in LENGTH_FIELDS:
        raise ConfigError(f"{name}.kind must be one of {', '.join(LENGTH_FIELDS)}, got {kind!r}")
    if given - LENGTH_FIELDS[kind]:
        unknown = ", ".join(sorted(given - LENGTH_FIELDS[kind]))
        raise ConfigError(f"{name}: kind {kind} has no {unknown}; it takes {', '.join(sorted(LENGTH_FIELDS[kind]))}")
    for field in given & {"value", "low", "high", "max"}:
        if not _is_int(value[field], 1):
            raise ConfigError(f"{name}.{field} must be an integer of at least 1, got {value[field]!r}")
    if kind == "fixed" and given != {"value"}:
        raise ConfigError(f"{name}: kind fixed needs value")
    if kind == "uniform" and (given != {"low", "high"} or value["low"] > value["high"]):
        raise ConfigError(f"{name}: kind uniform needs low and high with low <= high, got {value}")
    if kind == "lognormal":
        if "sigma" not in given or len(given & {"mean", "median"}) != 1:
            raise ConfigError(f"{name}: kind lognormal needs sigma and one of mean, median, got {value}")
        for field in given & {"mean", "median", "sigma"}:
            _positive(f"{name}.{field}", value[field])


def _arrivals(instance: Synthetic, attribute: attrs.Attribute, value: Any) -> None:
    name = "workload.arrivals"
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in ARRIVAL_KINDS:
        raise ConfigError(f"{name}.kind must be one of {', '.join(ARRIVAL_KINDS)}, got {value!r}")
    needed = {"poisson": {"rate_per_s"}, "gamma": {"rate_per_s", "cv"}}.get(kind, set())
    if set(value) - {"kind"} != needed:
        given = ", ".join(sorted(set(value) - {"kind"})) or "nothing"
        raise ConfigError(f"{name}: kind {kind} takes {' and '.join(sorted(needed)) or 'nothing else'}, got {given}")
    for field in needed:
        _positive(f"{name}.{field}", value[field])


def _concurrency(instance: Synthetic, attribute: attrs.Attribute, value: Any) -> None:
    _integer(1, optional=True)(instance, attribute, value)
    if value is not None and instance.arrivals["kind"] != "closed":
        kind = instance.arrivals["kind"]
        raise ConfigError(
            f"workload.concurrency belongs to arrivals.kind=closed; with {kind}, arrival times decide: set it to null"
        )


@attrs.define(eq=False, kw_only=True)
class Synthetic:
    """Requests made up by distribution; the same for the same options and seed."""

    num_requests: int = attrs.field(default=16, validator=_integer(1))
    prompt_tokens: int | dict = attrs.field(default=64, converter=_plain, validator=_lengths)
    output_tokens: int | dict = attrs.field(default=32, converter=_plain, validator=_lengths)
    arrivals: dict = attrs.field(factory=lambda: {"kind": "closed"}, converter=_plain, validator=_arrivals)
    concurrency: int | None = attrs.field(default=None, validator=_concurrency)  # closed loop; None: all at once
    seed: int = attrs.field(default=0, validator=_integer(0))
    ignore_eos: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The requests in order of arrival. What does not fit ``max_model_len`` is cut; a warning says how many."""
        if max_model_len < 2:
            raise ConfigError(f"max_model_len is {max_model_len}: a prompt and an output need at least 2 tokens")
        streams = np.random.SeedSequence(self.seed).spawn(4)
        prompt_rng, output_rng, arrival_rng, token_rng = map(np.random.default_rng, streams)
        drawn_prompts = _draw(self.prompt_tokens, self.num_requests, prompt_rng)
        drawn_outputs = _draw(self.output_tokens, self.num_requests, output_rng)
        prompts = np.minimum(drawn_prompts, max_model_len - 1)
        outputs = np.minimum(drawn_outputs, max_model_len - prompts)
        num_cut = int(((prompts < drawn_prompts) | (outputs < drawn_outputs)).sum())
        if num_cut:
            log.warning(
                "synthetic: %d of %d requests were cut to max_model_len=%d tokens",
                num_cut,
                self.num_requests,
                max_model_len,
            )
        arrivals = self._arrival_times(arrival_rng)
        return self._make(prompts.tolist(), outputs.tolist(), arrivals, vocab_size, token_rng)

    def _make(
        self,
        prompts: list[int],
        outputs: list[int],
        arrivals: list[float] | list[None],
        vocab_size: int,
        rng: np.random.Generator,
    ) -> Iterator[WorkloadRequest]:
        for num_prompt, num_output, arrival_s in zip(prompts, outputs, arrivals, strict=True):
            params = SamplingParams(
                max_tokens=num_output, temperature=0.0, ignore_eos=self.ignore_eos, detokenize=False
            )
            yield WorkloadRequest(
                prompt_token_ids=tuple(rng.integers(0, vocab_size, num_prompt).tolist()),
                params=params,
                arrival_s=arrival_s,
                recorded_output_tokens=num_output,
            )

    def _arrival_times(self, rng: np.random.Generator) -> list[float] | list[None]:
        kind = self.arrivals["kind"]
        if kind == "closed":
            return [None] * self.num_requests
        if kind == "burst":
            return [0.0] * self.num_requests
        cv = self.arrivals.get("cv", 1.0)  # a gamma of shape 1 is the exponential of a Poisson process
        shape, mean = cv**-2, 1 / self.arrivals["rate_per_s"]
        gaps = rng.gamma(shape, mean / shape, self.num_requests - 1)
        return [0.0, *np.cumsum(gaps).tolist()]


def _draw(lengths: int | dict, num: int, rng: np.random.Generator) -> np.ndarray:
    """``num`` lengths in tokens, int64, at least 1."""
    if isinstance(lengths, int):
        return np.full(num, lengths, dtype=np.int64)
    kind = lengths["kind"]
    if kind == "fixed":
        return np.full(num, lengths["value"], dtype=np.int64)
    if kind == "uniform":
        return rng.integers(lengths["low"], lengths["high"], num, endpoint=True)
    sigma = lengths["sigma"]
    mu = math.log(lengths["median"]) if "median" in lengths else math.log(lengths["mean"]) - sigma**2 / 2
    longest = lengths.get("max", 2**31)
    return np.clip(np.rint(rng.lognormal(mu, sigma, num)), 1, longest).astype(np.int64)
