# SPDX-License-Identifier: Apache-2.0
"""Pins over HTTP: set, listed and ended within a tenant's part of the cache."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.pins import PinInfo
from radixkv.cache.reporting.tree_walk import CachedNode
from radixkv_server.activity.node_names import NodeNames
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.errors import ApiError

MAX_PINS = 256  # of one tenant
SHOWN_TOKENS = 64


async def set_pin(context: ServerContext, caller: Caller, ids: list[int], ttl: float) -> Json:
    """Pin the cached prefix of a prompt.

    Raises:
        ApiError: 409 if none of it is cached; 507 if the budget of pins is spent, or the tenant has too many.
    """
    cache = context.engine.cache
    cached = await cache.match(ids, caller.owner)
    if not cached:
        raise ApiError(
            409,
            "Nothing of this prompt is cached, so there is nothing to pin: send it in a request first "
            "(max_tokens 1 is enough), with the same key and cache_salt.",
            code="not_cached",
        )
    others = await cache.pins(tenant=caller.tenant, max_tokens=0)
    if len(others) >= MAX_PINS:
        raise ApiError(
            507, f"At most {MAX_PINS} pins are allowed; end some of yours first.", code="too_many_pins"
        )
    pin = await cache.pin(ids[:cached], caller.owner, ttl=ttl)
    if pin is None:
        raise ApiError(
            507,
            "The blocks that pins may protect are all taken: end pins that are not needed any more, wait for "
            "one to expire, or have the server started with a larger pin budget.",
            code="pin_budget_full",
        )
    shown = pin_json(context, pin, caller)
    counts = {"prompt_tokens": len(ids), "cached_tokens": cached, "pinned_tokens": pin.num_tokens}
    return {**shown, **counts}


async def prompt_of_node(context: ServerContext, caller: Caller, name: str) -> tuple[list[int], str]:
    """Return the tokens from the root to the end of one of the caller's own nodes, and its adapter.

    Raises:
        ApiError: 404; there is no such node of the caller's (any more).
    """
    snapshot = await context.engine.cache.nodes(tenant=caller.tenant, salt=caller.salt, shown_tokens=-1)
    found = await off_loop(lambda: _path_tokens(snapshot.nodes, context.names, name))
    if found is None:
        raise ApiError(
            404,
            "There is no such node in your part of the cache (any more): GET /v1/cache/tree tells those "
            "that are there, and a node with a cache_salt needs it here, too.",
            param="node",
            code="node_not_found",
        )
    return found


def _path_tokens(nodes: Sequence[CachedNode], names: NodeNames, name: str) -> tuple[list[int], str] | None:
    by_id = {node.id: node for node in nodes}
    node = next((one for one in nodes if one.tenant is not None and names.of(one.id) == name), None)
    if node is None:
        return None
    parts, adapter = [node.token_ids], node.adapter
    while node.parent is not None:
        node = by_id[node.parent]
        parts.append(node.token_ids)
    return [token for part in reversed(parts) for token in part], adapter


def pin_json(context: ServerContext, pin: PinInfo, caller: Caller) -> Json:
    """Return a pin as JSON for its owner or an admin."""
    may_read = caller.may_read(pin.tenant, pin.salt)
    shown: Json = {
        "object": "cache.pin",
        "id": pin.id,
        "node": context.names.of(pin.node),
        "tokens": pin.num_tokens,
        "expires_in_s": None if pin.expires_in_s is None else round(pin.expires_in_s, 1),
        "text": context.text_of(pin.token_ids[:SHOWN_TOKENS]) if may_read else None,
        "cache_salt": pin.salt or None,
    }
    if caller.is_admin:
        shown["tenant"] = pin.tenant
    return shown


async def list_pins(context: ServerContext, caller: Caller) -> Json:
    """List the caller's pins, or, for an admin, all pins."""
    pins = await context.engine.cache.pins(tenant=caller.scope, max_tokens=SHOWN_TOKENS)
    if not caller.is_admin:
        pins = [pin for pin in pins if pin.salt == caller.salt]
    return {"object": "list", "data": [pin_json(context, pin, caller) for pin in pins]}
