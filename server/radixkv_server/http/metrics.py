"""Prometheus metrics of one app: request timings recorded here, engine counters read at each scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import radixkv
from radixkv.client import EngineClient
from radixkv_server.http.request_record import RequestRecord

if TYPE_CHECKING:
    from radixkv.cache.insight.explain import MissReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

LAG_PROBE_S = 0.05


class EngineCollector(Collector):
    """Reads `engine.stats()` when scraped, so that the engine never pays for metrics between scrapes."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        cache = stats.cache

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"radixkv_{name}", text, value=value)

        def counter(name: str, text: str, value: float) -> Metric:
            return CounterMetricFamily(f"radixkv_{name}", text, value=value)

        info = InfoMetricFamily("radixkv", "Version and model served.")
        info.add_metric([], {"version": radixkv.__version__, "model": self.engine.model_name})
        yield info
        yield gauge("healthy", "1 while the engine accepts requests.", float(self.engine.is_healthy))
        yield gauge("requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield gauge("requests_running", "Requests being computed.", stats.num_running)
        yield counter("preemptions", "Requests preempted to free KV blocks.", stats.num_preemptions)
        yield counter("prompt_tokens", "Prompt tokens admitted.", stats.prompt_tokens)
        yield counter("cached_prompt_tokens", "Prompt tokens found in the cache.", stats.cached_prompt_tokens)
        yield counter("computed_prompt_tokens", "Prompt tokens computed.", stats.computed_prompt_tokens)
        yield counter("generated_tokens", "Tokens generated.", stats.generated_tokens)
        yield counter("engine_steps", "Model calls.", stats.steps)
        yield counter("model_seconds", "Time in the model, sampling included.", stats.model_time_s)
        yield counter("step_gap_seconds", "Between model calls while work waited.", stats.gap_time_s)
        yield counter("cache_rebuilds", "Broken invariants repaired by a rebuild.", stats.num_rebuilds)
        ratio = stats.cached_prompt_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        yield gauge("prefix_cache_hit_ratio", "Cached over all prompt tokens, since the start.", ratio)
        blocks = GaugeMetricFamily(
            "radixkv_kv_blocks", "KV blocks by state; their sum is the pool.", labels=["state"]
        )
        blocks.add_metric(["free"], cache.free_blocks)
        blocks.add_metric(["cached"], cache.cached_blocks)
        blocks.add_metric(["held"], cache.held_blocks)
        yield blocks
        yield gauge("kv_blocks_capacity", "KV blocks in the pool.", cache.total_blocks)
        yield counter("evicted_blocks", "Cached KV blocks evicted.", cache.evicted_blocks)


class ServerMetrics:
    """The metrics of one app, in a registry of its own (two apps in one process do not mix)."""

    def __init__(self, engine: EngineClient) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engine))
        ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"radixkv_{name}_seconds", text, buckets=buckets, registry=self.registry)

        self.http_requests = Counter(
            "radixkv_http_requests",
            "HTTP requests by route and status (499: the client left first).",
            ["route", "status"],
            registry=self.registry,
        )
        self.missed_tokens = Counter(
            "radixkv_missed_prompt_tokens",
            "Prompt tokens not found in the cache, by the reason for the first of them.",
            ["reason"],
            registry=self.registry,
        )
        self.failed_streams = Counter(
            "radixkv_failed_streams",
            "Streams that ended with an error after they had begun.",
            registry=self.registry,
        )
        self.ttft = histogram("time_to_first_token", "From arrival to the first token.", _TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency", "Between tokens of one streamed sample.", _ITL_BUCKETS)
        self.e2e = histogram("request_duration", "From arrival to the end of the answer.", _E2E_BUCKETS)
        self.lag = histogram("event_loop_lag", "How late the event loop wakes up a timer.", _LAG_BUCKETS)

    def observe_request(self, route: str, record: RequestRecord) -> None:
        """Count a finished HTTP request."""
        status = "none" if record.status is None else str(record.status)
        self.http_requests.labels(route, status).inc()
        if record.failed:
            self.failed_streams.inc()
        if record.completion_tokens:
            self.e2e.observe(record.age_s)

    def observe_cache_report(self, report: MissReport) -> None:
        """Count what one prompt missed (`hit`: the one token that is always computed)."""
        self.missed_tokens.labels(report.reason).inc(report.num_missed_tokens)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    async def probe_event_loop(self) -> None:
        """Run forever: measure how late a timer fires, the delay every other callback sees too."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self.lag.observe(max(0.0, loop.time() - due))
