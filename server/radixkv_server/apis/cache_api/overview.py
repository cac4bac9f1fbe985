# SPDX-License-Identifier: Apache-2.0
"""GET /v1/cache: hits, misses with their reasons, and the pool's use by tenants."""

from __future__ import annotations

from radixkv.cache.accounts import QuotaUsage
from radixkv_server.activity.hit_windows import history_json
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json

MAX_SEEN_NODES = 20_000  # of a user's, to sum up its blocks


async def overview(context: ServerContext, caller: Caller) -> Json:
    """Return the figures of the caller's tenant, or, for an admin, of all tenants and each."""
    engine, activity = context.engine, context.activity
    quotas = await engine.cache.quotas()
    shown: Json = {
        "object": "cache",
        "tenant": caller.tenant,
        "cache_salt": caller.salt or None,
        "role": "admin" if caller.is_admin else "user",
        "enabled": engine.config.enable_prefix_caching,
        "block_size": engine.config.block_size,
        "windows": _windows(context, caller.scope),
        "history": history_json(activity.history(caller.scope)),
        "missed_tokens": activity.missed(caller.scope),
        "running_requests": activity.num_running(caller.scope),
        "quota": _quota(quotas, caller.tenant),
        "adapters": _adapters(context, caller),
    }
    if caller.is_admin:
        shown |= _of_all(context, quotas)
    else:
        shown["pool"] = await _own_blocks(context, caller)
    return shown


def _windows(context: ServerContext, tenant: str | None) -> Json:
    return {name: counts.to_json() for name, counts in context.activity.windows(tenant).items()}


def _quota(quotas: list[QuotaUsage], tenant: str) -> Json | None:
    for quota in quotas:
        if quota.namespace == (tenant,):
            return {
                "floor_blocks": quota.floor,
                "ceiling_blocks": quota.ceiling,
                "used_blocks": quota.used_blocks,
            }
    return None


def _adapters(context: ServerContext, caller: Caller) -> list[Json]:
    """Return the adapters that the caller may use, and how much of their prompts was found."""
    shown = []
    for card in context.adapters_of(caller.as_tenant):
        counts = context.activity.of_adapter(caller.scope, card.name)
        one: Json = {"name": card.name, "rank": card.rank, **counts.to_json()}
        if caller.is_admin:
            one |= {"identity": card.identity, "in_memory": card.in_memory}
            one |= {"bytes": card.nbytes, "reads": card.num_reads}
        shown.append(one)
    return shown


def _of_all(context: ServerContext, quotas: list[QuotaUsage]) -> Json:
    """Return the fields that only admins see."""
    stats, activity = context.engine.stats(), context.activity
    cache = stats.cache
    shown: Json = {
        "eviction_policy": context.engine.config.eviction_policy,
        "pool": {
            "total_blocks": cache.total_blocks,
            "free_blocks": cache.free_blocks,
            "cached_blocks": cache.cached_blocks,
            "held_blocks": cache.held_blocks,
            "pinned_blocks": cache.pinned_blocks,
        },
        "counters": {
            "nodes": cache.num_nodes,
            "pins": cache.num_pins,
            "pins_given_way": cache.pins_given_way,
            "evicted_blocks": cache.evicted_blocks,
            "out_of_blocks": cache.out_of_blocks,
            "resets": cache.resets,
            "waiting_requests": stats.num_waiting,
            "running_requests": stats.num_running,
            "prompts_waiting_for_turn": stats.prompts_waiting_for_turn,
            "reserved_tokens": stats.reserved_tokens,
            "preemptions": stats.num_preemptions,
        },
        "tenants": [
            {
                "tenant": tenant,
                "windows": _windows(context, tenant),
                "missed_tokens": activity.missed(tenant),
                "running_requests": activity.num_running(tenant),
                "quota": _quota(quotas, tenant),
            }
            for tenant in sorted({*activity.tenants, *(quota.namespace[0] for quota in quotas)})
        ],
    }
    checkpoints = {
        "checkpoints": cache.checkpoints,
        "superseded_checkpoints": cache.superseded_checkpoints,
        "evicted_checkpoints": cache.evicted_checkpoints,
    }
    if cache.state_slots:
        slots = {"total_slots": cache.state_slots, "free_slots": cache.free_state_slots}
        shown["states"] = slots | checkpoints
    if cache.window_blocks:
        blocks = {"total_blocks": cache.window_blocks, "free_blocks": cache.free_window_blocks}
        shown["freed_windows"] = blocks | checkpoints
        if cache.state_slots:
            shown["freed_windows"]["evicted_for_windows"] = cache.evicted_for_windows
    if stats.replicas:
        shown["replicas"] = [
            {
                "name": replica.name,
                "takes_requests": replica.is_open,
                "blocks": replica.blocks,
                "queue_s": round(replica.queue_s, 4),
                "running_requests": replica.running,
                "prefill_tokens_per_s": round(replica.prefill_rate, 1),
                "requests": replica.requests,
                "retries": replica.retries,
            }
            for replica in stats.replicas
        ]
    return shown


async def _own_blocks(context: ServerContext, caller: Caller) -> Json:
    """Return the caller's own blocks by state, without revealing how full the pool is."""
    snapshot = await context.engine.cache.nodes(
        tenant=caller.tenant, salt=caller.salt, max_nodes=MAX_SEEN_NODES
    )
    blocks = {"cached_blocks": 0, "held_blocks": 0, "pinned_blocks": 0}
    for node in snapshot.nodes:
        if node.tenant is not None:
            state = "pinned" if node.is_pinned else "held" if node.is_held else "cached"
            blocks[f"{state}_blocks"] += node.num_blocks
    return {**blocks, "complete": snapshot.is_complete}
