# SPDX-License-Identifier: Apache-2.0
"""EngineCollector: the engine's counters as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import radixkv
from radixkv.cache.cache_stats import CacheStats
from radixkv.cache.reporting.ages import AGE_BOUNDS
from radixkv.engine.adapters import Adapters
from radixkv.engine.client import EngineClient
from radixkv.engine.counts import EventCounts, ReplicaCounts, SpeculationCounts, TierCounts


class EngineCollector(Collector):
    """Reads `engine.stats()` at each scrape, so that metrics cost the engine nothing in between."""

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
        turn = "Of the requests in the queue, long prompts that begin after those in progress."
        yield gauge("prompts_waiting_for_turn", turn, stats.prompts_waiting_for_turn)
        reserved = "Tokens of running prompts that have KV blocks and are not computed."
        yield gauge("reserved_tokens", reserved, stats.reserved_tokens)
        yield counter("preemptions", "Requests preempted to free KV blocks.", stats.num_preemptions)
        yield counter("computed_prompt_tokens", "Prompt tokens computed.", stats.computed_prompt_tokens)
        yield counter("engine_queried_tokens", "Tokens looked up in the prefix cache.", cache.queried_tokens)
        yield counter("engine_hit_tokens", "Of these, found there.", cache.hit_tokens)
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
        yield gauge("kv_blocks_pinned", "Held blocks that pins protect.", cache.pinned_blocks)
        yield gauge("kv_cache_usage_ratio", "Held over all blocks.", cache.held_blocks / cache.total_blocks)
        yield counter("evicted_blocks", "Cached KV blocks evicted.", cache.evicted_blocks)
        yield from _states(cache)
        yield from self._speculation(stats.speculation)
        yield from _adapters(self.engine.adapters)
        yield from _tiers(stats.tiers)
        yield from _events(stats.events)
        yield from _replicas(stats.replicas)
        ages = HistogramMetricFamily(
            "radixkv_evicted_block_age_seconds", "From a block's latest use to its eviction."
        )
        bounds = [*map(str, AGE_BOUNDS), "+Inf"]
        counts = accumulate(cache.evicted_by_age)
        ages.add_metric([], list(zip(bounds, counts, strict=True)), cache.evicted_age_s)
        yield ages

    @staticmethod
    def _speculation(counts: SpeculationCounts) -> Iterator[Metric]:
        """Counters of drafted and accepted tokens."""
        for name, text, value in (
            ("drafts", "Guesses of a request's next tokens, one or several at once.", counts.num_drafts),
            ("draft_tokens", "Tokens guessed.", counts.num_draft_tokens),
            ("accepted_tokens", "Tokens guessed rightly.", counts.num_accepted_tokens),
        ):
            yield CounterMetricFamily(f"radixkv_spec_decode_{name}", text, value=value)
        positions = CounterMetricFamily(
            "radixkv_spec_decode_accepted_tokens_per_position",
            "Tokens guessed rightly, by their position in the draft, from 0.",
            labels=["position"],
        )
        for position, count in enumerate(counts.accepted_per_pos):
            positions.add_metric([str(position)], count)
        yield positions


def _states(cache: CacheStats) -> Iterator[Metric]:
    """States of a model with state layers, blocks of windows of one that frees them; empty for others."""
    if cache.state_slots:
        slots = GaugeMetricFamily(
            "radixkv_state_slots",
            "States by what holds them; their sum is the memory for states.",
            labels=["state"],
        )
        slots.add_metric(["free"], cache.free_state_slots)
        slots.add_metric(["cached"], cache.checkpoints)
        slots.add_metric(["held"], cache.state_slots - cache.free_state_slots - cache.checkpoints)
        yield slots
        capacity = "States that there is memory for."
        yield GaugeMetricFamily("radixkv_state_slots_capacity", capacity, value=cache.state_slots)
    if cache.window_blocks:
        blocks = GaugeMetricFamily(
            "radixkv_window_blocks",
            "Blocks of layers with a sliding window; their sum is the memory for them.",
            labels=["state"],
        )
        blocks.add_metric(["free"], cache.free_window_blocks)
        blocks.add_metric(["used"], cache.window_blocks - cache.free_window_blocks)
        yield blocks
        kept = "Windows kept in the tree, with which requests can go on."
        yield GaugeMetricFamily("radixkv_checkpoints", kept, value=cache.checkpoints)
    if cache.state_slots and cache.window_blocks:
        text = "Of the evicted states with their windows, those that made room for blocks of windows."
        yield CounterMetricFamily(
            "radixkv_checkpoints_evicted_for_windows", text, value=cache.evicted_for_windows
        )
    if cache.state_slots or cache.window_blocks:
        yield from _checkpoints(cache)


def _checkpoints(cache: CacheStats) -> Iterator[Metric]:
    superseded = "Of the cached states or windows, those that deeper ones have taken the place of."
    yield GaugeMetricFamily("radixkv_superseded_checkpoints", superseded, value=cache.superseded_checkpoints)
    evicted = "Cached states or windows that made room for others."
    yield CounterMetricFamily("radixkv_evicted_checkpoints", evicted, value=cache.evicted_checkpoints)


def _events(counts: EventCounts | None) -> Iterator[Metric]:
    """Counters of published block events; empty where none are published."""
    if counts is None:
        return
    for name, text, value in (
        ("batches", "Batches published, heartbeats included.", counts.batches),
        ("blocks", "Blocks stored and removed that were published.", counts.blocks),
        ("dropped_blocks", "Blocks not published one by one, since too many waited.", counts.dropped_blocks),
        ("replays", "Replays that followers asked for.", counts.replays),
    ):
        yield CounterMetricFamily(f"radixkv_kv_events_{name}", text, value=value)
    waiting = "Blocks stored or removed that wait to be published."
    yield GaugeMetricFamily("radixkv_kv_events_waiting_blocks", waiting, value=counts.waiting_blocks)


def _adapters(adapters: Adapters) -> Iterator[Metric]:
    """State of the LoRA adapters; empty where an engine takes none."""
    if not adapters.is_enabled:
        return
    cards = adapters.cards()
    in_memory = {card.identity: card.nbytes for card in cards if card.in_memory}
    yield GaugeMetricFamily("radixkv_adapters", "LoRA adapters registered.", value=len(cards))
    text = "Of these, adapters in memory; equal weights count once."
    yield GaugeMetricFamily("radixkv_adapters_in_memory", text, value=len(in_memory))
    yield GaugeMetricFamily("radixkv_adapter_bytes", "Memory of these.", value=sum(in_memory.values()))
    reads = sum(card.num_reads for card in cards)
    yield GaugeMetricFamily("radixkv_adapter_reads", "Times that the registered ones were read.", value=reads)


def _replicas(replicas: Sequence[ReplicaCounts]) -> Iterator[Metric]:
    """State of each replica; empty for a single engine."""
    for name, text, attribute in (
        ("up", "1 while requests are sent to the replica.", "is_open"),
        ("blocks", "Whole blocks that it holds.", "blocks"),
        ("queue_seconds", "Until it has computed all prompts that were sent there.", "queue_s"),
        ("requests_running", "Requests that were sent there and have not ended.", "running"),
        ("prefill_tokens_per_second", "Prompt tokens a second, as measured.", "prefill_rate"),
    ):
        gauge = GaugeMetricFamily(f"radixkv_replica_{name}", text, labels=["replica"])
        for replica in replicas:
            gauge.add_metric([replica.name], float(getattr(replica, attribute)))
        if replicas:
            yield gauge
    for name, text, attribute in (
        ("requests", "Requests sent to the replica.", "requests"),
        (
            "retries",
            "Of these, requests retried elsewhere, since it failed before the first token.",
            "retries",
        ),
    ):
        counter = CounterMetricFamily(f"radixkv_replica_{name}", text, labels=["replica"])
        for replica in replicas:
            counter.add_metric([replica.name], getattr(replica, attribute))
        if replicas:
            yield counter


def _tiers(tiers: Sequence[TierCounts]) -> Iterator[Metric]:
    """Counters of each tier below the cache; empty without tiers."""
    if not tiers:
        return
    up = GaugeMetricFamily("radixkv_tier_up", "1 while the tier is asked for blocks.", labels=["tier"])
    for tier in tiers:
        up.add_metric([tier.name], float(tier.is_up))
    yield up
    for name, text in (
        ("hits", "Lookups that found blocks in the tier, one for each piece of a prefix."),
        ("misses", "Lookups that found none there."),
        ("loads", "Loads asked for."),
        ("loaded_blocks", "Blocks loaded."),
        ("loaded_bytes", "Bytes loaded."),
        ("load_seconds", "From asking for blocks to their arrival."),
        ("offered_blocks", "Blocks that were worth saving, and not in the tier."),
        ("saved_blocks", "Blocks given to the tier."),
        ("dropped_blocks", "Blocks offered that were not saved: their memory was needed, or time lacked."),
        ("saved_bytes", "Bytes given to the tier."),
        ("loaded_states", "States of a model's state layers loaded."),
        ("saved_states", "States given to the tier."),
    ):
        family = CounterMetricFamily(f"radixkv_tier_{name}", text, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier.name], getattr(tier, name))
        yield family
    errors = CounterMetricFamily("radixkv_tier_errors", "Calls that failed.", labels=["tier", "call"])
    refused = CounterMetricFamily(
        "radixkv_tier_refused", "Blocks of the tier were computed, by reason.", labels=["tier", "reason"]
    )
    for tier in tiers:
        for call, count in tier.errors.items():
            errors.add_metric([tier.name, call], count)
        for reason, count in tier.refused.items():
            refused.add_metric([tier.name, reason], count)
    yield errors
    yield refused
