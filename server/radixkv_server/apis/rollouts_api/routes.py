# SPDX-License-Identifier: Apache-2.0
"""The routes of training loops, with vLLM's names: weights, pauses, sleep. For admins."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from radixkv.errors import WeightUpdateError
from radixkv_server.apis.cache_api.queries import number_in, query_of
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Api
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.generation.generation import json_response
from radixkv_server.http.body import StrictModel
from radixkv_server.http.middleware import require_admin

router = APIRouter()

_NO_TRANSFER = (
    "This server takes weights as a folder of safetensors that it can read, and not over NCCL or CUDA IPC: "
    'POST /update_weights with {"update_info": {"path": "/folder"}}, without /init_weight_transfer_engine.'
)


class UpdateInfo(StrictModel):
    """Place of new weights.

    Attributes:
        path: a folder with config.json and safetensors, as `save_pretrained` writes it.
        mode: what becomes of running requests; of no effect between start and finish, which keep them.
        names, dtype_names, shapes, ipc_handles_pickled, packed: of vLLM's transfers, which are refused.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    mode: Literal["abort", "wait", "keep"] = "keep"
    names: Any = None
    dtype_names: Any = None
    shapes: Any = None
    ipc_handles_pickled: Any = None
    packed: Any = None


class UpdateWeightsRequest(StrictModel):
    """Body of POST /update_weights."""

    update_info: UpdateInfo


async def _admin(request: Request, *query: str) -> tuple[ServerContext, dict[str, str]]:
    require_admin(request.scope)
    return context_of(request), query_of(request, *query)


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Take no requests until /resume, and abort those that run, wait for them, or keep them."""
    context, query = await _admin(request, "mode", "clear_cache")
    if query.get("clear_cache", "true") != "true":
        raise bad_request(
            "clear_cache has no effect: /update_weights clears what it must.", param="clear_cache"
        )
    await context.engine.pause(mode=query.get("mode", "abort"))  # type: ignore[arg-type]
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Go on after /pause."""
    context, _ = await _admin(request)
    await context.engine.resume()
    return json_response({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Return whether the engine is paused, or sleeps."""
    context, _ = await _admin(request)
    return json_response({"is_paused": await context.engine.is_paused()})


@router.post("/start_weight_update")
async def start_weight_update(request: Request) -> Response:
    """Begin an update that /finish_weight_update applies."""
    context, _ = await _admin(request)
    context.weight_update.start()
    return json_response({"message": "Weight update started"})


@router.post("/update_weights")
async def update_weights(request: Request) -> Response:
    """Serve the weights of a folder: at once, or after /start_weight_update at the update's end."""
    context, _ = await _admin(request)
    body = await context.bodies.read(request, UpdateWeightsRequest, context.max_body_bytes())
    info = body.update_info
    if info.path is None:
        raise bad_request(_NO_TRANSFER, param="update_info", code="unsupported_weight_transfer")
    if context.weight_update.is_open:
        context.weight_update.add(info.path)
        return json_response({"message": "Weights received"})
    fingerprint = await _applied(context.engine.update_weights(info.path, mode=info.mode))
    return json_response({"message": "Weights updated", "model_fingerprint": fingerprint})


@router.post("/finish_weight_update")
async def finish_weight_update(request: Request) -> Response:
    """Apply the update; running requests go on with the new weights."""
    context, _ = await _admin(request)
    fingerprint = await _applied(context.engine.update_weights(context.weight_update.finish()))
    return json_response({"message": "Weight update finished", "model_fingerprint": fingerprint})


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(request: Request) -> Response:
    """Refuse: there is no transfer between GPUs."""
    await _admin(request)
    raise bad_request(_NO_TRANSFER, param="init_info", code="unsupported_weight_transfer")


@router.get("/get_world_size")
async def get_world_size(request: Request) -> Response:
    """Return the number of processes that compute the model."""
    context, _ = await _admin(request, "include_dp")
    return json_response({"world_size": context.engine.config.tensor_parallel})


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Return the settings that training loops ask for, by vLLM's names."""
    context, _ = await _admin(request, "config_format")
    engine = context.engine
    config = {
        "model_config": {
            "model": engine.model_name,
            "max_model_len": engine.limits.max_model_len,
            "logprobs_mode": "raw_logprobs",
        },
        "parallel_config": {"tensor_parallel_size": engine.config.tensor_parallel},
        "weight_transfer_config": None,
    }
    return json_response({"vllm_config": config})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes, as /v1/cache/reset does."""
    context, _ = await _admin(request)
    await context.engine.cache.reset()
    return json_response({"success": True})


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Give memory back until /wake_up."""
    context, query = await _admin(request, "level", "mode")
    level = number_in(query, "level", 1, 0, 2)
    await _applied(context.engine.sleep(level, mode=query.get("mode", "abort")))  # type: ignore[arg-type]
    return json_response({"status": "sleeping", "level": level})


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Take the memory again, or the parts of it that `tags` name."""
    require_admin(request.scope)
    context = context_of(request)
    tags: Any = request.query_params.getlist("tags") or None
    await _applied(context.engine.wake_up(tags))
    is_asleep = await context.engine.is_sleeping()
    return json_response({"status": "sleeping" if is_asleep else "awake", "tags": tags})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps: from /sleep, at whichever level, until all is awake."""
    context, _ = await _admin(request)
    return json_response({"is_sleeping": await context.engine.is_sleeping()})


async def _applied(change: Awaitable[Any]) -> Any:
    """Wait for a change of the engine, whose refusal is the caller's mistake."""
    try:
        return await change
    except WeightUpdateError as error:
        raise ApiError(400, str(error), code="weights_not_changed") from None


API = Api(
    router,
    bodies={"POST /update_weights": UpdateWeightsRequest},
    queries={
        "POST /pause": ("mode", "clear_cache"),
        "POST /sleep": ("level", "mode"),
        "POST /wake_up": ("tags",),
        "GET /get_world_size": ("include_dp",),
        "GET /server_info": ("config_format",),
    },
)
