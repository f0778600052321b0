"""``workload=chat | code | long_context``: lengths and arrivals with the statistics that were published of real traces.

``lengths`` chooses how they are drawn::

    quantiles   a table through the published quantiles; it keeps a distribution's two humps (answers in chat)
    lognormal   exp(normal(mu, sigma)) with the published mu and sigma of the logarithm (long_context: fitted to median and p90)
    fixed       one length: for comparison with the arithmetic of ``python -m core.ledger``

Sources: Azure LLM inference trace 2023, conversation and code (19,366 and 8,819 requests, AzurePublicDataset, CC-BY); Mooncake
conversation trace (12,031 requests, FAST'25). Median, p90 and, of
Azure's, the maximum are theirs (and p99 of conversation prompts). The points of a table between those are
ours, set so that its mean is the published one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs

from core.workloads import WorkloadRequest
from core.workloads.draws import arrivals, closed, concurrency, flag, integer, number, one_of, plain
from core.workloads.synthetic import Synthetic


def _table(*points: tuple[float, float]) -> dict[str, Any]:
    return {"kind": "quantiles", "points": [list(point) for point in points]}


def _lognormal(mu: float, sigma: float, longest: int) -> dict[str, Any]:
    return {"kind": "lognormal", "median": math.exp(mu), "sigma": sigma, "max": longest}


TRACES: dict[str, dict[str, tuple[Any, Any]]] = {
    "azure_conversation": {
        "quantiles": (
            _table(
                (0, 2), (0.25, 230), (0.5, 1020), (0.75, 1400), (0.9, 2734), (0.99, 4142), (0.999, 4500), (1, 14050)
            ),
            _table((0, 7), (0.2, 38), (0.5, 129), (0.6, 240), (0.75, 395), (0.9, 424), (0.99, 600), (1, 1000)),
        ),
        "lognormal": (_lognormal(6.633, 0.985, 14050), _lognormal(5.019, 0.859, 1000)),
        "fixed": (512, 128),
    },
    "azure_code": {
        "quantiles": (
            _table((0, 3), (0.25, 600), (0.5, 1469), (0.75, 2553), (0.9, 5188), (0.99, 7200), (1, 7437)),
            _table((0, 1), (0.2, 7), (0.5, 13), (0.75, 25), (0.9, 55), (0.99, 170), (0.999, 300), (1, 1899)),
        ),
        "lognormal": (_lognormal(6.999, 1.360, 7437), _lognormal(2.788, 0.847, 1899)),
        "fixed": (2048, 28),
    },
    "mooncake_conversation": {
        "quantiles": (
            _table((0, 890), (0.25, 3300), (0.5, 6909), (0.75, 14256), (0.9, 27367), (0.99, 52420), (1, 123192)),
            _table((0, 1), (0.5, 350), (1, 671)),
        ),
        "lognormal": (
            _lognormal(math.log(6909), math.log(27367 / 6909) / 1.2816, 123192),
            _table((0, 1), (0.5, 350), (1, 671)),
        ),
        "fixed": (12035, 343),
    },
}
"""Trace -> how lengths are drawn -> (prompt tokens, output tokens)."""


@attrs.define(eq=False, kw_only=True)
class Published:
    """Requests with a trace's lengths and made-up tokens; the same for the same options and seed."""

    trace: str = attrs.field(validator=one_of(*TRACES))
    lengths: str = attrs.field(default="quantiles", validator=one_of("quantiles", "lognormal", "fixed"))
    num_requests: int = attrs.field(default=200, validator=integer(1))
    scale: float = attrs.field(default=1, validator=number(0, above=True))  # lengths are divided by it
    arrivals: dict = attrs.field(factory=closed, converter=plain, validator=arrivals)
    concurrency: int | None = attrs.field(default=None, validator=concurrency)  # closed loop; None: all at once
    seed: int = attrs.field(default=0, validator=integer(0))
    ignore_eos: bool = attrs.field(default=True, validator=flag)

    def requests(self, vocab_size: int, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The requests in order of arrival. What does not fit ``max_model_len`` is cut; a warning says how many."""
        prompt_tokens, output_tokens = TRACES[self.trace][self.lengths]
        return Synthetic(
            num_requests=self.num_requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            scale=self.scale,
            arrivals=self.arrivals,
            concurrency=self.concurrency,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        ).requests(vocab_size, max_model_len)
