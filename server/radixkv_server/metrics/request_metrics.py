# SPDX-License-Identifier: Apache-2.0
"""ServerMetrics: requests as Prometheus metrics, with bounded labels, as each value adds to every scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from radixkv.cache.reporting.explain import MissReport
from radixkv.engine.client import EngineClient
from radixkv.scheduling.request import RequestTimes
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.metrics.engine_collector import EngineCollector
from radixkv_server.metrics.vllm_names import under_vllm_names

MAX_VALUES = 100
OTHERS = "others"


class BoundedLabel:
    """Label of metrics with at most 100 values; later values count as `others`.

    Args:
        name: the label's.
        enabled: add the label to metrics.

    Attributes:
        names: the label's name, or nothing.
    """

    def __init__(self, name: str, enabled: bool = True) -> None:
        self.names: tuple[str, ...] = (name,) if enabled else ()
        self._seen: set[str] = set()

    def values(self, value: str) -> tuple[str, ...]:
        """Return the label for a value: the value itself, or `others` after the first 100. O(1)."""
        if not self.names:
            return ()
        if value == OTHERS:
            return (OTHERS,)
        if value not in self._seen:
            if len(self._seen) >= MAX_VALUES:
                return (OTHERS,)
            self._seen.add(value)
        return (value,)

    def own(self, value: str) -> str | None:
        """Return the label of this value alone; None: it has none of its own. O(1)."""
        return value if value in self._seen else None


#: Metrics that tell nothing about requests. Totals are not among them: a total minus one's own share tells
#: about the other tenants, and so do times and sizes of the process, of steps, blocks and queues.
_OF_NOBODY = ("radixkv", "radixkv_healthy")


def of_tenant(metrics: Iterable[Metric], tenant: str | None) -> Iterator[Metric]:
    """Return the samples with this `tenant`, and metrics that tell nothing about requests. O(samples).

    Args:
        tenant: result of `BoundedLabel.own`; None: there are no samples of its own.
    """
    for metric in metrics:
        if metric.name in _OF_NOBODY:
            yield metric
            continue
        own = [sample for sample in metric.samples if tenant and sample.labels.get("tenant") == tenant]
        if own:
            seen = Metric(metric.name, metric.documentation, metric.type)
            seen.samples = own
            yield seen


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_LENGTH_BUCKETS = tuple(float(2**power) for power in range(18))

LAG_PROBE_S = 0.05

#: Upper bounds of the cached share of a prompt, and their labels.
_HIT_CLASSES = ((0.0, "0"), (0.5, "0-50%"), (0.9, "50-90%"), (1.0, "90-100%"))


M = TypeVar("M", Counter, Histogram)


def hit_class(cached_tokens: int, prompt_tokens: int) -> str:
    """Return the label `hit` of a request: the cached share of its prompt, in four classes.

    >>> [hit_class(cached, 100) for cached in (0, 1, 50, 51, 90, 99)]
    ['0', '0-50%', '0-50%', '50-90%', '50-90%', '90-100%']
    """
    share = cached_tokens / prompt_tokens if prompt_tokens else 0.0
    return next(label for bound, label in _HIT_CLASSES if share <= bound)


class _Shown(Collector):
    """Metrics that have been collected."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class ServerMetrics:
    """The metrics of one app, in a registry of its own (two apps in one process do not mix).

    Args:
        by_tenant: label usage and waits by `tenant` (at most 100 of them).
        vllm_names: repeat the metrics under the names of vLLM's dashboards.
    """

    def __init__(self, engine: EngineClient, *, by_tenant: bool = False, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engine))
        ProcessCollector(registry=self.registry)
        self._model_name = engine.model_name
        self._has_vllm_names = vllm_names
        self._tenants = BoundedLabel("tenant", by_tenant)
        self._adapters = BoundedLabel("adapter")
        tenant = self._tenants.names

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"radixkv_{name}", text, labels, registry=self.registry)

        def histogram(
            name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()
        ) -> Histogram:
            return Histogram(f"radixkv_{name}", text, labels, buckets=buckets, registry=self.registry)

        self._http_requests = counter(
            "http_requests", "HTTP requests by route and status (499: the client left).", ["route", "status"]
        )
        self._failed_streams = counter("failed_streams", "Streams that an error ended after they had begun.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens, as in the answers' usage.", tenant)
        self._cached_tokens = counter("cached_prompt_tokens", "Of these, found in the cache.", tenant)
        self._written_tokens = counter("cache_write_tokens", "Of these, written to the cache.", tenant)
        self._generated_tokens = counter("generated_tokens", "Generated, as in the answers' usage.", tenant)
        self._missed_tokens = counter(
            "missed_prompt_tokens",
            "Prompt tokens not found in the cache, by the reason for the first of them.",
            ["reason", *tenant],
        )
        self._finished = counter(
            "finished_samples", "Samples by how they ended: stop, length, abort, error.", ["reason", *tenant]
        )
        adapter = self._adapters.names
        self._adapter_prompts = counter("adapter_prompts", "Prompts that a LoRA adapter answered.", adapter)
        self._adapter_prompt_tokens = counter("adapter_prompt_tokens", "Tokens of these prompts.", adapter)
        self._adapter_cached_tokens = counter(
            "adapter_cached_prompt_tokens", "Of these, found in the cache.", adapter
        )
        self._adapter_generated_tokens = counter(
            "adapter_generated_tokens", "Generated with the adapter.", adapter
        )
        by_hit = ["hit", *tenant]
        self._ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS, by_hit
        )
        self._itl = histogram("inter_token_latency_seconds", "Between tokens.", _ITL_BUCKETS, by_hit)
        self._e2e = histogram(
            "request_duration_seconds", "From arrival to the end of the answer.", _E2E_BUCKETS, by_hit
        )
        self._queue = histogram("queue_seconds", "Wait for the first step.", _QUEUE_BUCKETS, tenant)
        self._prefill = histogram(
            "prefill_seconds", "From a prompt's first step to its first token.", _TTFT_BUCKETS, by_hit
        )
        self._decode = histogram("decode_seconds", "From the first token to the last.", _E2E_BUCKETS, tenant)
        self._prompt_length = histogram("request_prompt_tokens", "Prompt lengths.", _LENGTH_BUCKETS, tenant)
        self._sample_length = histogram("sample_tokens", "Answer lengths.", _LENGTH_BUCKETS, tenant)
        self._lag = histogram("event_loop_lag_seconds", "How late timers fire.", _LAG_BUCKETS)

    def observe_request(self, route: str, record: RequestRecord) -> None:
        """Count a finished HTTP request with its usage."""
        status = "none" if record.status is None else str(record.status)
        self._http_requests.labels(route, status).inc()
        if record.failed:
            self._failed_streams.inc()
        self.observe_usage(record)

    def observe_usage(self, record: RequestRecord) -> None:
        """Count the tokens of a finished generation."""
        usage = record.usage
        if usage.prompt_tokens:
            tenant = self._tenants.values(record.tenant)
            _child(self._prompt_tokens, tenant).inc(usage.prompt_tokens)
            _child(self._cached_tokens, tenant).inc(usage.cached_tokens)
            _child(self._written_tokens, tenant).inc(usage.cache_write_tokens)
            _child(self._generated_tokens, tenant).inc(usage.completion_tokens)
            hit = hit_class(usage.cached_tokens, usage.prompt_tokens)
            self._e2e.labels(hit, *tenant).observe(record.age_s)

    def observe_adapter(self, name: str, prompt_tokens: int, cached_tokens: int, generated: int) -> None:
        """Count a prompt that an adapter answered."""
        label = self._adapters.values(name)
        _child(self._adapter_prompts, label).inc()
        _child(self._adapter_prompt_tokens, label).inc(prompt_tokens)
        _child(self._adapter_cached_tokens, label).inc(cached_tokens)
        _child(self._adapter_generated_tokens, label).inc(generated)

    def observe_cache_report(self, tenant: str, report: MissReport) -> None:
        """Count the missed tokens of a prompt (`hit`: the one token that is always computed)."""
        labels = self._tenants.values(tenant)
        self._missed_tokens.labels(report.reason, *labels).inc(report.num_missed_tokens)

    def observe_first_token(self, tenant: str, hit: str, seconds: float) -> None:
        """Count the time from arrival to the first token. `hit`: see `hit_class`."""
        self._ttft.labels(hit, *self._tenants.values(tenant)).observe(seconds)

    def observe_tokens(self, tenant: str, hit: str, seconds: float, num_tokens: int) -> None:
        """Count `num_tokens` new tokens of a sample, `seconds` after its previous ones: one latency each."""
        child = self._itl.labels(hit, *self._tenants.values(tenant))
        for _ in range(num_tokens):
            child.observe(seconds / num_tokens)

    def observe_prompt(self, tenant: str, hit: str, num_tokens: int, times: RequestTimes | None) -> None:
        """Count a prompt whose samples have all ended."""
        labels = self._tenants.values(tenant)
        _child(self._prompt_length, labels).observe(num_tokens)
        if times is None or times.first_scheduled is None:
            return
        _child(self._queue, labels).observe(times.first_scheduled)
        if times.first_token is None:
            return
        self._prefill.labels(hit, *labels).observe(max(0.0, times.first_token - times.first_scheduled))
        if times.finished is not None:
            _child(self._decode, labels).observe(max(0.0, times.finished - times.first_token))

    def observe_sample(self, tenant: str, reason: str, num_tokens: int) -> None:
        """Count a sample that ended for `reason`."""
        labels = self._tenants.values(tenant)
        self._finished.labels(reason, *labels).inc()
        _child(self._sample_length, labels).observe(num_tokens)

    def render(self, tenant: str | None = None) -> bytes:
        """Return the text that Prometheus scrapes.

        Args:
            tenant: show only this tenant's metrics; None: all.
        """
        metrics = list(self.registry.collect())
        if tenant is not None:
            metrics = list(of_tenant(metrics, self._tenants.own(tenant)))
        if self._has_vllm_names:
            metrics += under_vllm_names(metrics, self._model_name)
        return generate_latest(_Shown(metrics))

    async def probe_event_loop(self) -> None:
        """Run forever: measure the delay of timers, which all callbacks share."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self._lag.observe(max(0.0, loop.time() - due))


def _child(metric: M, labels: Sequence[str]) -> M:
    """Return the metric with these label values, if any."""
    return metric.labels(*labels) if labels else metric
