# SPDX-License-Identifier: Apache-2.0
"""Search for a prompt that is cached for another model: the base, or an adapter that the caller may use."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.reporting.explain import MissReport
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json

MAX_ADAPTERS = 64  # looked at, those in memory first


async def cached_under(
    context: ServerContext, caller: Caller, ids: Sequence[int], report: MissReport
) -> Json | None:
    """Return the caller's own model under which more of a prompt is cached than a report found; None: none.

    Other tenants' prompts, and adapters that the caller may not use, are not looked at.
    """
    if report.reason == "hit" or not context.engine.adapters.is_enabled:
        return None
    cards = sorted(context.adapters_of(caller.as_tenant), key=lambda card: not card.in_memory)
    models = {card.namespace_part: card.name for card in cards[:MAX_ADAPTERS]}
    models[""] = context.model_names[0]
    models.pop(caller.adapter, None)
    best, most = None, report.num_hit_tokens
    for adapter, name in models.items():
        cached = await context.engine.cache.match(ids, caller.owner._replace(adapter=adapter))
        if cached > most:
            best, most = name, cached
    return None if best is None else {"model": best, "cached_tokens": most}
