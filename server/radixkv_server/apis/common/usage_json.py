# SPDX-License-Identifier: Apache-2.0
"""Usage as JSON, in the form of several APIs: the cache's work for the prompts."""

from __future__ import annotations

from radixkv.cache.reporting.explain import MissReport
from radixkv_server.dialect import Json
from radixkv_server.generation.progress import Usage


def usage_details(usage: Usage) -> Json:
    """Return the cache's work for the prompts: tokens found, written and pinned, and reasons for misses.

    `cache_miss` is an object per prompt, in order (a single one not in a list). It reveals nothing of the
    contents of other requests' prompts.
    """
    misses = [miss_json(*miss) for miss in usage.misses]
    details: Json = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}
    if misses:
        details["cache_miss"] = misses[0] if len(misses) == 1 else misses
    if usage.pinned_tokens is not None:
        details["pinned_tokens"] = usage.pinned_tokens
    return details | tier_details(usage)


def tier_details(usage: Usage) -> Json:
    """Return cached tokens by memory, with the milliseconds that each took; empty without tiers."""
    by_tier = usage.by_tier
    if by_tier is None:
        return {}
    return {
        "cached_tokens_by_tier": {tier: tokens for tier, (tokens, _) in by_tier.items()},
        "tier_wait_ms": {
            tier: round(1000 * seconds, 1) for tier, (_, seconds) in by_tier.items() if tier != "memory"
        },
    }


def miss_json(report: MissReport, hint: str | None) -> Json:
    """Return the reason for a miss, the position of the first missing token, and the known cause."""
    miss: Json = {"reason": report.reason}
    if report.tier is not None:
        miss["tier"], miss["tier_tokens"] = report.tier, report.num_tier_tokens
    if report.reason != "hit":
        miss["position"] = report.num_hit_tokens
    if report.num_kv_tokens is not None:
        miss["kv_tokens"] = report.num_kv_tokens
    if report.age_s is not None:
        miss["age_s"] = round(report.age_s, 3)
        miss["evicted_by"] = report.evicted_by
    if report.skipped is not None:
        miss["skipped"] = report.skipped
    if hint is not None:
        miss["hint"] = hint
    return miss
