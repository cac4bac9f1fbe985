# SPDX-License-Identifier: Apache-2.0
"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for admins."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from radixkv.errors import ConfigError, ModelLoadError
from radixkv_server.concurrency import off_loop
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Api
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.generation.generation import json_response
from radixkv_server.http.body import StrictModel
from radixkv_server.http.middleware import require_admin

router = APIRouter()

Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoadAdapterRequest(StrictModel):
    """Body of POST /v1/load_lora_adapter.

    Attributes:
        lora_path: a folder below `--lora-dir`; a relative one begins there.
        load_inplace: replace the adapter of that name, if there is one.
    """

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(StrictModel):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Name


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Register an adapter under a name, from a folder below --lora-dir."""
    require_admin(request.scope)
    context = context_of(request)
    body = await context.bodies.read(request, LoadAdapterRequest, context.max_body_bytes())
    folder = await off_loop(partial(_folder, context, body.lora_path))
    adapters, name = context.engine.adapters, body.lora_name
    if name in context.model_names:
        raise bad_request(f"{name!r} is the base model's name; give the adapter another.", param="lora_name")
    if adapters.card(name) is not None and not body.load_inplace:
        raise bad_request(
            f"The adapter {name!r} is loaded already; unload it first, or set load_inplace.",
            param="lora_name",
        )
    try:
        card = await off_loop(partial(adapters.load, name, str(folder)))
    except ModelLoadError as error:
        raise bad_request(str(error), param="lora_path") from None
    except ConfigError as error:
        raise bad_request(str(error), param="lora_name") from None
    parent = context.model_names[0]
    return json_response(
        {"object": "adapter", "id": card.name, "parent": parent, "rank": card.rank, "identity": card.identity}
    )


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Forget an adapter; running requests finish with it."""
    require_admin(request.scope)
    context = context_of(request)
    body = await context.bodies.read(request, UnloadAdapterRequest, context.max_body_bytes())
    if not await off_loop(partial(context.engine.adapters.unload, body.lora_name)):
        raise ApiError(
            404,
            f"There is no adapter {body.lora_name!r}.",
            param="lora_name",
            code="model_not_found",
        )
    return json_response({"object": "adapter", "id": body.lora_name, "deleted": True})


def _folder(context: ServerContext, given: str) -> Path:
    """Return the folder that a path names.

    Raises:
        ApiError: it is not below --lora-dir, or there is no such setting.
    """
    root = context.engine.config.lora_dir
    if root is None or not context.engine.adapters.is_enabled:
        raise bad_request("This server loads no adapters while it runs: start it with --lora-dir DIR.")
    try:
        own = Path(root).resolve()
        folder = (own / given).resolve()
    except (OSError, ValueError, RuntimeError):
        raise bad_request("lora_path is no path.", param="lora_path") from None
    if not folder.is_relative_to(own):
        raise bad_request("lora_path must lie below the server's --lora-dir.", param="lora_path")
    return folder


API = Api(
    router,
    bodies={
        "POST /v1/load_lora_adapter": LoadAdapterRequest,
        "POST /v1/unload_lora_adapter": UnloadAdapterRequest,
    },
)
