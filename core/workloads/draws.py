"""What every workload draws: lengths in tokens and times of arrival, from options that are checked when they are read.

Lengths are a number of tokens or a distribution, rounded to whole tokens and at least 1::

    {kind: fixed, value: 64}
    {kind: uniform, low: 32, high: 96}              both ends included
    {kind: lognormal, median: 64, sigma: 1.0}       exp(normal(ln median, sigma))
    {kind: lognormal, mean: 105, sigma: 1.0}        the same with median = mean / exp(sigma^2 / 2)
    {kind: lognormal, ..., max: 512}                longer ones become 512
    {kind: quantiles, points: [[0, 1], [0.5, 64], [1, 900]]}   a straight line between two quantiles

Arrivals, the first always at 0 s::

    {kind: closed}                         a new request when one ends, ``concurrency`` in flight
    {kind: burst}                          all at 0 s
    {kind: poisson, rate_per_s: 2}         gaps exponential, mean 1 / rate
    {kind: gamma, rate_per_s: 2, cv: 3}    gaps gamma, mean 1 / rate, standard deviation cv / rate (above 1: bursts)
    {kind: trace}                          when the file says (workloads that are read from one)
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from core.types import ConfigError
from core.uniform import uniforms

log = logging.getLogger(__name__)

LENGTH_FIELDS = {
    "fixed": {"value"},
    "uniform": {"low", "high"},
    "lognormal": {"mean", "median", "sigma", "max"},
    "quantiles": {"points"},
}
ARRIVAL_KINDS = ("closed", "burst", "poisson", "gamma")

# ------------------------------------------------------------------------------------------------ checking options


def plain(value: Any) -> Any:
    """A Hydra node as a plain dict without nulls."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value


def is_whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _positive(where: str, value: object) -> None:
    if not (is_number(value) and value > 0):  # type: ignore[operator]
        raise ConfigError(f"{where} must be a finite number above 0, got {value!r}")


def integer(low: int, optional: bool = False):
    """An attrs validator: a whole number of at least ``low``, or with ``optional`` null."""

    def check(instance: object, attribute: attrs.Attribute, value: object) -> None:
        if not is_whole(value, low) and not (optional and value is None):
            or_null = " or null" if optional else ""
            raise ConfigError(f"workload.{attribute.name} must be an integer of at least {low}{or_null}, got {value!r}")

    return check


def number(low: float, above: bool = False):
    """An attrs validator: a finite number of at least ``low``, or with ``above`` greater than it."""

    def check(instance: object, attribute: attrs.Attribute, value: object) -> None:
        if not is_number(value) or value < low or (above and value == low):  # type: ignore[operator]
            rule = f"above {low:g}" if above else f"of at least {low:g}"
            raise ConfigError(f"workload.{attribute.name} must be a finite number {rule}, got {value!r}")

    return check


def one_of(*names: str):
    """An attrs validator: one of these words."""

    def check(instance: object, attribute: attrs.Attribute, value: object) -> None:
        if value not in names:
            raise ConfigError(f"workload.{attribute.name} must be one of {', '.join(names)}, got {value!r}")

    return check


def flag(instance: object, attribute: attrs.Attribute, value: object) -> None:
    """An attrs validator: true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"workload.{attribute.name} must be true or false, got {value!r}")


def lengths(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """An attrs validator: a number of tokens, or one of the distributions above."""
    name = f"workload.{attribute.name}"
    if not isinstance(value, dict):
        if not is_whole(value, 1):
            raise ConfigError(f"{name} must be an integer of at least 1, or a distribution, got {value!r}")
        return
    kind, given = value.get("kind"), set(value) - {"kind"}
    if kind not in LENGTH_FIELDS:
        raise ConfigError(f"{name}.kind must be one of {', '.join(LENGTH_FIELDS)}, got {kind!r}")
    if given - LENGTH_FIELDS[kind]:
        unknown = ", ".join(sorted(given - LENGTH_FIELDS[kind]))
        raise ConfigError(f"{name}: kind {kind} has no {unknown}; it takes {', '.join(sorted(LENGTH_FIELDS[kind]))}")
    for field in given & {"value", "low", "high", "max"}:
        if not is_whole(value[field], 1):
            raise ConfigError(f"{name}.{field} must be an integer of at least 1, got {value[field]!r}")
    if kind == "fixed" and given != {"value"}:
        raise ConfigError(f"{name}: kind fixed needs value")
    if kind == "uniform" and (given != {"low", "high"} or value["low"] > value["high"]):
        raise ConfigError(f"{name}: kind uniform needs low and high with low <= high, got {value}")
    if kind == "quantiles" and not _are_quantiles(value.get("points")):
        raise ConfigError(
            f"{name}: kind quantiles needs points, a list of [quantile, tokens] from quantile 0 to 1, both rising, "
            f"got {value.get('points')!r}"
        )
    if kind == "lognormal":
        if "sigma" not in given or len(given & {"mean", "median"}) != 1:
            raise ConfigError(f"{name}: kind lognormal needs sigma and one of mean, median, got {value}")
        for field in given & {"mean", "median", "sigma"}:
            _positive(f"{name}.{field}", value[field])


def _are_quantiles(points: Any) -> bool:
    if not isinstance(points, Sequence) or isinstance(points, str) or len(points) < 2:
        return False
    for each in points:
        if not isinstance(each, Sequence) or isinstance(each, str) or len(each) != 2 or not all(map(is_number, each)):
            return False
    at = [each[0] for each in points]
    tokens = [each[1] for each in points]
    rising = all(a < b for a, b in itertools.pairwise(at)) and all(a <= b for a, b in itertools.pairwise(tokens))
    return rising and at[0] == 0 and at[-1] == 1 and tokens[0] >= 1


def arrivals(instance: Any, attribute: attrs.Attribute, value: Any) -> None:
    """An attrs validator: one of the kinds above without ``trace``."""
    _check_arrivals(value, ARRIVAL_KINDS)


def trace_arrivals(instance: Any, attribute: attrs.Attribute, value: Any) -> None:
    """An attrs validator: one of the kinds above."""
    _check_arrivals(value, ("trace", *ARRIVAL_KINDS))


def _check_arrivals(value: Any, kinds: tuple[str, ...]) -> None:
    name = "workload.arrivals"
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in kinds:
        raise ConfigError(f"{name}.kind must be one of {', '.join(kinds)}, got {value!r}")
    needed = {"poisson": {"rate_per_s"}, "gamma": {"rate_per_s", "cv"}}.get(kind, set())
    if set(value) - {"kind"} != needed:
        given = ", ".join(sorted(set(value) - {"kind"})) or "nothing"
        raise ConfigError(f"{name}: kind {kind} takes {' and '.join(sorted(needed)) or 'nothing else'}, got {given}")
    for field in needed:
        _positive(f"{name}.{field}", value[field])


def concurrency(instance: Any, attribute: attrs.Attribute, value: Any) -> None:
    """An attrs validator for a field that stands behind ``arrivals``: null unless the loop is closed."""
    integer(1, optional=True)(instance, attribute, value)
    if value is not None and instance.arrivals["kind"] != "closed":
        kind = instance.arrivals["kind"]
        raise ConfigError(
            f"workload.concurrency belongs to arrivals.kind=closed; with {kind}, arrival times decide: set it to null"
        )


def closed() -> dict[str, Any]:
    """The default of ``arrivals``."""
    return {"kind": "closed"}


# ------------------------------------------------------------------------------------------------ drawing


def draw(lengths: int | dict, num: int, rng: np.random.Generator, scale: float = 1) -> np.ndarray:
    """``num`` lengths in tokens divided by ``scale``: int64, at least 1."""
    return np.maximum(np.rint(_draw(lengths, num, rng) / scale), 1).astype(np.int64)


def _draw(lengths: int | dict, num: int, rng: np.random.Generator) -> np.ndarray:
    if isinstance(lengths, int):
        return np.full(num, lengths, dtype=np.int64)
    kind = lengths["kind"]
    if kind == "fixed":
        return np.full(num, lengths["value"], dtype=np.int64)
    if kind == "uniform":
        return rng.integers(lengths["low"], lengths["high"], num, endpoint=True)
    if kind == "quantiles":
        at, tokens = zip(*lengths["points"], strict=True)
        return np.interp(rng.random(num), at, tokens)
    sigma = lengths["sigma"]
    mu = math.log(lengths["median"]) if "median" in lengths else math.log(lengths["mean"]) - sigma**2 / 2
    longest = lengths.get("max", 2**31)
    return np.clip(np.rint(rng.lognormal(mu, sigma, num)), 1, longest)


def arrival_times(arrivals: dict, rng: np.random.Generator) -> Iterator[float | None]:
    """Seconds from the start, without end; None for a closed loop. Not for ``trace``."""
    kind = arrivals["kind"]
    time_s = 0.0
    while True:
        yield None if kind == "closed" else time_s
        if kind in ("poisson", "gamma"):
            cv = arrivals.get("cv", 1.0)  # a gamma of shape 1 is the exponential of a Poisson process
            shape, mean = cv**-2, 1 / arrivals["rate_per_s"]
            time_s += float(rng.gamma(shape, mean / shape))


def hashed_tokens(seed: int, key: int, num: int, vocab_size: int, start: int = 0) -> list[int]:
    """Tokens ``start`` .. ``start + num`` of an endless text named by (seed, key): a fixed hash of (seed, key, index)."""
    seeds, keys = (np.full(num, value & (2**64 - 1), dtype=np.uint64) for value in (seed, key))
    words = uniforms(seeds, keys, np.arange(start, start + num))
    return np.floor(words * vocab_size).astype(np.int64).tolist()


def cut(prompts: np.ndarray, outputs: np.ndarray, max_model_len: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Lengths that fit ``max_model_len``: a prompt keeps room for one output token; one warning says how many changed."""
    require_room(max_model_len)
    short_prompts = np.minimum(prompts, max_model_len - 1)
    short_outputs = np.minimum(outputs, max_model_len - short_prompts)
    num_cut = int(((short_prompts < prompts) | (short_outputs < outputs)).sum())
    if num_cut:
        log.warning(
            "%s: %d of %d requests were cut to max_model_len=%d tokens", name, num_cut, len(prompts), max_model_len
        )
    return short_prompts, short_outputs


def require_room(max_model_len: int) -> None:
    """ConfigError where not even one prompt and one output token fit."""
    if max_model_len < 2:
        raise ConfigError(f"max_model_len is {max_model_len}: a prompt and an output need at least 2 tokens")
