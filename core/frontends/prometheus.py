"""``/metrics`` under the names that vLLM's dashboards know, from what the engine loop sees.

The engine thread only adds to plain numbers; text is made when somebody asks. A request's times are entered when it finishes
(``Finished`` carries them all), so a long stream shows in the histograms at its end; running, waiting and memory are live.
Prompt tokens are counted once their first token was delivered and their request finished.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from core.service import Service
from core.types import Finished, MemoryReport, StepReport

CONTENT_TYPE = CONTENT_TYPE_LATEST
REASONS = ("stop", "length", "abort", "error", "refused")

_TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {  # None: 1, 2, 5, 10 ... up to max_model_len
    "time_to_first_token_seconds": ("Arrival to the first delivered token.", _TTFT_S),
    "inter_token_latency_seconds": ("Gap between two delivered tokens of a request.", _TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean gap between the delivered tokens of a request.", _TOKEN_S),
    "e2e_request_latency_seconds": ("Arrival to finish.", _REQUEST_S),
    "request_queue_time_seconds": ("Arrival to the first step that computed it.", _REQUEST_S),
    "request_prefill_time_seconds": ("First step that computed it to the first delivered token.", _REQUEST_S),
    "request_decode_time_seconds": ("First to last delivered token.", _REQUEST_S),
    "request_inference_time_seconds": ("First step that computed it to the last delivered token.", _REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", None),
    "request_generation_tokens": ("Delivered tokens of a request.", None),
    "iteration_tokens_total": ("Tokens computed in a step.", _STEP_TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that got an answer.",
    "generation_tokens": "Tokens sampled and delivered.",
    "num_preemptions": "Sequences preempted, of every kind.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
}
_KV_TERMS = ("written", "to_write", "internal_waste", "external_waste", "shared", "cached")
"""Where the pool's tokens are (``core.reports.MemoryReport``): the closed set of the label ``term``."""


class _Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, values: np.ndarray) -> None:
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [a + b for a, b in zip(self.counts, found.tolist(), strict=True)]
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        names = [f"{float(bound)}" for bound in self.bounds] + ["+Inf"]
        return [(name, float(total)) for name, total in zip(names, np.cumsum(self.counts).tolist(), strict=True)]


def _one_two_five(most: int) -> tuple[int, ...]:
    bounds = [step * 10**power for power in range(len(str(most)) + 1) for step in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= most) or (1,)


class ServerMetrics:
    """The metrics of one server, with a registry of their own. ``on_step`` belongs to the engine thread."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        stats: Callable[[], dict[str, Any]],
        service: Callable[[], Service] | None = None,
        service_classes: Sequence[str] = (),
        held: Callable[[], MemoryReport] | None = None,
    ):
        self._labels = [model_name]
        self._stats = stats
        self._service, self._classes = service, tuple(service_classes)  # the operator's: a closed set
        self._held = held
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._finished = dict.fromkeys(REASONS, 0)
        self._copied_bytes = self._forks = 0
        self._memory: MemoryReport | None = None
        lengths = _one_two_five(max_model_len)
        self._histograms = {name: _Histogram(bounds or lengths) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def on_step(self, report: StepReport) -> None:
        """Add one step."""
        counters = self._counters
        with self._lock:
            if report.num_tokens:
                self._histograms["iteration_tokens_total"].add(report.num_tokens)
            tokens = 0
            for output in report.outputs:
                tokens += len(output.token_ids)
                if output.finish_reason == "refused":  # never became a sequence, so it is in no ``finished``
                    self._finished["refused"] += 1
            counters["generation_tokens"] += tokens
            counters["num_preemptions"] += len(report.preempted)
            counters["prefix_cache_queries"] += report.prefix_query_tokens
            counters["prefix_cache_hits"] += report.prefix_hit_tokens
            self._forks += report.num_forked
            if report.memory is not None:
                self._memory = self._now(report, report.memory)
                self._copied_bytes += report.memory.copied_bytes
            for finished in report.finished:
                self._finish(finished)

    def _now(self, report: StepReport, used: MemoryReport) -> MemoryReport:
        """What is held from now on: a report tells of what its step used, and after a last one no other corrects that."""
        ended = report.finished and self._held is not None and not self._stats()["running"]
        return self._held() if ended else used  # type: ignore[misc]

    def _finish(self, done: Finished) -> None:
        add = self._histograms
        self._finished[done.finish_reason] += 1
        add["e2e_request_latency_seconds"].add(done.finished_s - done.arrival_s)
        if done.first_scheduled_s is not None:
            add["request_queue_time_seconds"].add(done.first_scheduled_s - done.arrival_s)
        add["request_generation_tokens"].add(done.num_output_tokens)
        times = done.token_times_s
        if not times:
            return
        if done.branch == 0:
            self._counters["prompt_tokens"] += done.num_prompt_tokens
            add["request_prompt_tokens"].add(done.num_prompt_tokens)
        first, last = times[0], times[-1]
        add["time_to_first_token_seconds"].add(first - done.arrival_s)
        if done.first_scheduled_s is not None:
            add["request_prefill_time_seconds"].add(first - done.first_scheduled_s)
            add["request_inference_time_seconds"].add(last - done.first_scheduled_s)
        add["request_decode_time_seconds"].add(last - first)
        if len(times) > 1:
            add["inter_token_latency_seconds"].add_all(np.diff(np.asarray(times)))
            add["request_time_per_output_token_seconds"].add((last - first) / (len(times) - 1))

    def render(self) -> bytes:
        """The text that ``/metrics`` answers with."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        stats = self._stats()
        with self._lock:
            yield from self._gauges(stats)
            for name, value in self._counters.items():
                counter = CounterMetricFamily(f"vllm:{name}", _COUNTERS[name], labels=["model_name"])
                counter.add_metric(self._labels, value)
                yield counter
            yield from self._kv()
            if self._classes:
                yield from self._by_class()
            success = CounterMetricFamily(
                "vllm:request_success", "Sequences that ended, by reason.", labels=["model_name", "finished_reason"]
            )
            for reason, count in self._finished.items():
                success.add_metric([*self._labels, reason], count)
            yield success
            for name, histogram in self._histograms.items():
                family = HistogramMetricFamily(f"vllm:{name}", _HISTOGRAMS[name][0], labels=["model_name"])
                family.add_metric(self._labels, histogram.buckets(), histogram.sum)
                yield family

    def _kv(self) -> Iterable[Metric]:
        """What this engine measures of its KV pool and vLLM does not: under a prefix of its own."""
        terms = GaugeMetricFamily(
            "quire:kv_tokens", "Tokens of the KV pool, by what they are.", labels=["model_name", "term"]
        )
        for term in _KV_TERMS:
            terms.add_metric([*self._labels, term], getattr(self._memory, term, 0))
        yield terms
        for name, text, value in (
            ("kv_copied_bytes", "Bytes of KV copied for branches that write (copy on write).", self._copied_bytes),
            ("forked_branches", "Branches that started from their parent's blocks.", self._forks),
        ):
            counter = CounterMetricFamily(f"quire:{name}", text, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter

    def _by_class(self) -> Iterable[Metric]:
        """Sequences of each of ``slo.classes``, and how many met its targets (``core.service``)."""
        labels = ["model_name", "service_class"]
        ended = CounterMetricFamily(
            "quire:service_class_requests", "Sequences that ended, refused included.", labels=labels
        )
        met = CounterMetricFamily("quire:service_class_requests_met", "Those that met their targets.", labels=labels)
        groups = self._service().classes if self._service is not None else {}
        for name in self._classes:
            group = groups.get(name)
            ended.add_metric(
                [*self._labels, name], 0 if group is None else group.finished + group.failed + group.refused
            )
            met.add_metric([*self._labels, name], 0 if group is None else group.met)
        yield from (ended, met)

    def _gauges(self, stats: dict[str, Any]) -> Iterable[Metric]:
        used = stats["num_blocks"] - stats["free_blocks"]
        values = {
            "num_requests_running": ("Sequences that hold a place in the batch.", stats["running"]),
            "num_requests_waiting": ("Sequences that wait for one.", stats["waiting"]),
            "kv_cache_usage_perc": ("KV blocks in use, 1 is all of them.", used / stats["num_blocks"]),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
