# SPDX-License-Identifier: Apache-2.0
"""The cache's routes: contents, reasons for misses, pins, public prefixes, reset."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from radixkv_server.activity.activity import KEPT_REQUESTS
from radixkv_server.apis.cache_api.advice import advice_json
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.apis.cache_api.events import event_frames
from radixkv_server.apis.cache_api.explain import prompt_comparison, prompt_explanation
from radixkv_server.apis.cache_api.overview import overview
from radixkv_server.apis.cache_api.pins import list_pins, prompt_of_node, set_pin
from radixkv_server.apis.cache_api.pool_advice import pool_advice
from radixkv_server.apis.cache_api.prompt_ids import prompt_ids, prompt_of
from radixkv_server.apis.cache_api.queries import caller_of, number_in, query_of
from radixkv_server.apis.cache_api.requests import request_frames, request_json, requests_json
from radixkv_server.apis.cache_api.schemas import (
    DEFAULT_TTL_S,
    CachePromptFields,
    ExplainBody,
    PinBody,
    PromptBody,
    SessionBody,
    UnpinBody,
)
from radixkv_server.apis.cache_api.state_advice import state_advice
from radixkv_server.apis.cache_api.tree import TreeJson
from radixkv_server.apis.common.openai_errors import OPENAI
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Api, Json, dump
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.generation.generation import json_response
from radixkv_server.http.middleware import require_admin
from radixkv_server.http.request_record import record_of
from radixkv_server.http.streaming import EventStream

DEFAULT_NODES = 200
MAX_NODES = 2000
MAX_DEPTH = 1000
MAX_SEEN_NODES = 20_000  # whatever lies below is left out, and the answer says so
SHOWN_TOKENS = 48  # of a node, in its text
MAX_SEARCHED_TOKENS = 1_000_000
MAX_SEARCH_CHARS = 200
DEFAULT_ADVICE = 10
MAX_ADVICE = 100

router = APIRouter()

B = TypeVar("B", bound=CachePromptFields)


def _asked(request: Request, *names: str) -> tuple[ServerContext, Caller, dict[str, str]]:
    """Return the context of a GET, its caller, and its query, which may have `names` and a salt."""
    query = query_of(request, *names, "cache_salt")
    return context_of(request), caller_of(request, query.get("cache_salt")), query


async def _sent(request: Request, model: type[B], num_prompts: int = 1) -> tuple[ServerContext, B, Caller]:
    """Return the context of a request about prompts, its body and its caller."""
    context = context_of(request)
    body = await context.bodies.read(request, model, context.max_body_bytes(num_prompts))
    caller = caller_of(request, body.cache_salt, body.model)
    query_of(request)
    return context, body, caller


@router.get("/v1/cache")
async def get_overview(request: Request) -> Response:
    """Return hit rates, misses by reason, the pool and the tenants."""
    context, caller, _ = _asked(request)
    return json_response(await overview(context, caller))


@router.get("/v1/cache/requests")
async def get_requests(request: Request) -> Response:
    """Return the latest requests, as a stream if the client accepts one."""
    context, caller, query = _asked(request, "limit")
    limit = number_in(query, "limit", KEPT_REQUESTS, 1, KEPT_REQUESTS)
    if "text/event-stream" in request.headers.get("accept", ""):
        return _stream(request, request_frames(context, caller, limit))
    return json_response({"object": "list", "data": requests_json(context, caller, limit)})


@router.get("/v1/cache/requests/{name}")
async def get_request(request: Request, name: str) -> Response:
    """Return one of the latest requests, with the explanation of its miss."""
    context, caller, _ = _asked(request)
    return json_response(await request_json(context, caller, name))


@router.get("/v1/cache/events")
async def get_events(request: Request) -> Response:
    """Stream the tree, then its changes, until the client disconnects."""
    context, caller, query = _asked(request, "limit")
    limit = number_in(query, "limit", DEFAULT_NODES, 1, MAX_NODES)

    async def snapshot() -> Json:
        return await _tree(context, caller, limit, MAX_DEPTH)

    last_id = request.headers.get("last-event-id")
    return _stream(request, event_frames(context, caller, snapshot, last_id))


def _stream(request: Request, frames: AsyncGenerator[bytes, None]) -> Response:
    settings = context_of(request).settings
    return EventStream(frames, OPENAI, record_of(request.scope), settings.ping_interval_s)


@router.get("/v1/cache/tree")
async def get_tree(request: Request) -> Response:
    """Return the heaviest nodes; with `search`, the nodes that contain a text."""
    context, caller, query = _asked(request, "depth", "limit", "search")
    depth = number_in(query, "depth", MAX_DEPTH, 1, MAX_DEPTH)
    limit = number_in(query, "limit", DEFAULT_NODES, 1, MAX_NODES)
    search = query.get("search")
    if search is not None:
        return json_response(await _search(context, caller, search, limit))
    tree = await _tree(context, caller, limit, depth)
    return Response(await off_loop(lambda: dump(tree)), media_type="application/json")


async def _tree(context: ServerContext, caller: Caller, limit: int, depth: int) -> Json:
    cache = context.engine.cache
    snapshot = await cache.nodes(
        tenant=caller.scope, salt=caller.salt, shown_tokens=SHOWN_TOKENS, max_nodes=MAX_SEEN_NODES
    )
    adapters = context.adapter_names(caller.as_tenant)
    return await off_loop(
        lambda: TreeJson(snapshot, caller, context.names, context.text_of, adapters).heaviest(limit, depth)
    )


async def _search(context: ServerContext, caller: Caller, text: str, limit: int) -> Json:
    if not 1 <= len(text) <= MAX_SEARCH_CHARS:
        message = f"search must have 1 to {MAX_SEARCH_CHARS} characters, not {len(text)}."
        raise bad_request(message, param="search")
    # Even for admins, only the caller's own space is searched.
    snapshot = await context.engine.cache.nodes(
        tenant=caller.tenant,
        salt=caller.salt,
        shown_tokens=-1,
        max_nodes=MAX_SEEN_NODES,
        max_tokens=MAX_SEARCHED_TOKENS,
    )
    adapters = context.adapter_names(caller.as_tenant)
    return await off_loop(
        lambda: TreeJson(snapshot, caller, context.names, context.text_of, adapters).search(text, limit)
    )


@router.post("/v1/cache/explain")
async def explain_prompt(request: Request) -> Response:
    """Report how much of a prompt would be found, and why not the rest, without running the model."""
    context, body, caller = await _sent(request, ExplainBody, 2)
    if body.compare is not None:
        one, other = body.compared()
        prompt = await prompt_of(context, one)
        return json_response(await prompt_comparison(context, prompt, await prompt_of(context, other)))
    return json_response(await prompt_explanation(context, caller, await prompt_of(context, body)))


@router.get("/v1/cache/pins")
async def get_pins(request: Request) -> Response:
    """List the caller's pins."""
    context, caller, _ = _asked(request)
    return json_response(await list_pins(context, caller))


@router.post("/v1/cache/pins")
async def create_pin(request: Request) -> Response:
    """Keep the cached prefix of a prompt for some time."""
    context, body, caller = await _sent(request, PinBody)
    if body.node is not None:
        ids, adapter = await prompt_of_node(context, caller, body.node)
        caller = replace(caller, adapter=adapter)
    else:
        ids = await prompt_ids(context, body, add_generation_prompt=False)
    return json_response(await set_pin(context, caller, ids, body.ttl or DEFAULT_TTL_S), 201)


@router.delete("/v1/cache/pins")
async def delete_pin(request: Request) -> Response:
    """End a pin, by its id or its prompt."""
    context, body, caller = await _sent(request, UnpinBody)
    cache = context.engine.cache
    if body.id is not None:
        ended = await cache.unpin_id(body.id, caller.owner)
    else:
        ids = await prompt_ids(context, body, add_generation_prompt=False)
        ended = await cache.unpin(ids, caller.owner)
        if not ended:  # it was pinned as far as it was cached
            cached = await cache.match(ids, caller.owner)
            ended = await cache.unpin(ids[:cached], caller.owner)
    if not ended:
        raise ApiError(404, "There is no such pin of yours.", code="pin_not_found")
    return json_response({"object": "cache.pin", "deleted": True})


@router.delete("/v1/cache/sessions")
async def end_session(request: Request) -> Response:
    """Have the end of a finished conversation evicted first."""
    context, body, caller = await _sent(request, SessionBody)
    ids = await prompt_ids(context, body, add_generation_prompt=False)
    tokens = await context.engine.cache.put_first(ids, caller.owner)
    return json_response({"object": "cache.session", "done": tokens > 0, "cached_tokens": tokens})


@router.post("/v1/cache/public")
async def publish(request: Request) -> Response:
    """Let all tenants share a prefix."""
    require_admin(request.scope)
    ids, adapter = await _public_ids(request)
    shared = await context_of(request).engine.cache.publish(ids, adapter=adapter)
    if not shared:
        message = "A public prefix needs at least one whole block of tokens; this one is shorter."
        raise bad_request(message, param="prompt", code="too_short")
    return json_response({"object": "cache.public", "tokens": shared}, 201)


@router.delete("/v1/cache/public")
async def unpublish(request: Request) -> Response:
    """Stop sharing a prefix with new requests."""
    require_admin(request.scope)
    ids, adapter = await _public_ids(request)
    if not await context_of(request).engine.cache.unpublish(ids, adapter=adapter):
        raise ApiError(404, "This prefix is not public.", code="not_public")
    return json_response({"object": "cache.public", "deleted": True})


async def _public_ids(request: Request) -> tuple[list[int], str]:
    context = context_of(request)
    body = await context.bodies.read(request, PromptBody, context.max_body_bytes())
    query_of(request)
    if body.cache_salt is not None:
        raise bad_request("A public prefix belongs to no cache_salt.", param="cache_salt")
    adapter = caller_of(request, model=body.model).adapter
    return await prompt_ids(context, body, add_generation_prompt=False), adapter


@router.get("/v1/cache/images/{name}")
async def get_image(request: Request) -> Response:
    """Show a small picture of an image in the caller's prompts, by the name in their text."""
    context, caller, _ = _asked(request)
    found = context.shown_images.find(request.path_params["name"], caller.tenant)
    if found is None:
        raise ApiError(404, "No image of this name was in the latest prompts.", code="image_not_found")
    return json_response(found)


@router.post("/v1/cache/reset")
async def reset(request: Request) -> Response:
    """Empty the cache of all tenants."""
    require_admin(request.scope)
    query_of(request)
    await context_of(request).engine.cache.reset()
    return json_response({"object": "cache.reset", "reset": True})


@router.get("/v1/cache/advice")
async def get_advice(request: Request) -> Response:
    """Report where prompts break, and what to move."""
    context, caller, query = _asked(request, "limit")
    limit = number_in(query, "limit", DEFAULT_ADVICE, 1, MAX_ADVICE)
    points = await context.engine.cache.advice(limit, tenant=caller.scope, salt=caller.salt)
    data = [await advice_json(context, point, caller) for point in points]
    pool = await pool_advice(context) if caller.is_admin else None
    states = state_advice(context) if caller.is_admin else None
    return json_response({"object": "list", "data": data, "pool": pool, "states": states})


API = Api(
    router,
    bodies={
        "POST /v1/cache/explain": ExplainBody,
        "POST /v1/cache/pins": PinBody,
        "DELETE /v1/cache/pins": UnpinBody,
        "DELETE /v1/cache/sessions": SessionBody,
        "POST /v1/cache/public": PromptBody,
        "DELETE /v1/cache/public": PromptBody,
    },
    queries={
        "GET /v1/cache": ("cache_salt",),
        "GET /v1/cache/requests": ("limit", "cache_salt"),
        "GET /v1/cache/requests/{name}": ("cache_salt",),
        "GET /v1/cache/events": ("limit", "cache_salt"),
        "GET /v1/cache/tree": ("depth", "limit", "search", "cache_salt"),
        "GET /v1/cache/pins": ("cache_salt",),
        "GET /v1/cache/images/{name}": ("cache_salt",),
        "GET /v1/cache/advice": ("limit", "cache_salt"),
    },
)
