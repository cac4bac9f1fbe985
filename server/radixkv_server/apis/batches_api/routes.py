# SPDX-License-Identifier: Apache-2.0
"""The routes of files and batches, in the shapes of OpenAI's.

Everything belongs to the tenant of the key; to others it does not exist.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from radixkv_server.apis.batches_api.schemas import BatchBody
from radixkv_server.apis.batches_api.upload import read_upload
from radixkv_server.apis.common.pages import page_of
from radixkv_server.context import context_of
from radixkv_server.dialect import Api
from radixkv_server.generation.generation import json_response
from radixkv_server.http.request_record import record_of

router = APIRouter()

#: Most files in a page: OpenAI's, whose default it is, too.
FILES_IN_A_PAGE = 10_000


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
}


@router.post(
    "/v1/files",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload_file(request: Request) -> Response:
    """Keep a file of requests for a batch."""
    context, tenant = context_of(request), record_of(request.scope).tenant
    async with read_upload(request, context.settings.max_file_bytes) as upload:
        add, given = context.batches.folder.add_file, (upload.file, upload.filename, upload.purpose)
        return json_response(await asyncio.to_thread(add, tenant, *given))


@router.get("/v1/files")
async def list_files(request: Request) -> Response:
    """List the files, the latest first; of one `purpose`, if the query has it."""
    tenant, purpose = record_of(request.scope).tenant, request.query_params.get("purpose")
    files = await asyncio.to_thread(context_of(request).batches.folder.files, tenant)
    found = [one for one in reversed(files) if purpose in (None, one["purpose"])]
    return json_response(page_of(found, request.query_params, usual=FILES_IN_A_PAGE, most=FILES_IN_A_PAGE))


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> Response:
    """Describe a file."""
    folder, tenant = context_of(request).batches.folder, record_of(request.scope).tenant
    return json_response((await asyncio.to_thread(folder.file, tenant, file_id))[1])


@router.get("/v1/files/{file_id}/content")
async def get_content(request: Request, file_id: str) -> Response:
    """Return a file's bytes."""
    folder, tenant = context_of(request).batches.folder, record_of(request.scope).tenant
    path, _ = await asyncio.to_thread(folder.file, tenant, file_id)
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Forget a file."""
    folder, tenant = context_of(request).batches.folder, record_of(request.scope).tenant
    await asyncio.to_thread(folder.delete_file, tenant, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


@router.post("/v1/batches")
async def create_batch(request: Request) -> Response:
    """Have the requests of a file answered, behind all other requests."""
    context, caller = context_of(request), record_of(request.scope).caller
    body = await context.bodies.read(request, BatchBody, context.max_body_bytes())
    asked = {
        "endpoint": body.endpoint,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "metadata": body.metadata,
    }
    batch = await asyncio.to_thread(context.batches.folder.add_batch, caller, asked, body.window_s)
    context.batches.notify()
    return json_response(batch)


@router.get("/v1/batches")
async def list_batches(request: Request) -> Response:
    """List the batches, the latest first."""
    tenant = record_of(request.scope).tenant
    batches = await asyncio.to_thread(context_of(request).batches.folder.batches, tenant)
    return json_response(page_of(batches[::-1], request.query_params))


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> Response:
    """Return a batch's state, counts and files."""
    folder, tenant = context_of(request).batches.folder, record_of(request.scope).tenant
    return json_response(await asyncio.to_thread(folder.batch, tenant, batch_id))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """End a batch; the answers so far become its output."""
    context, tenant = context_of(request), record_of(request.scope).tenant
    batch = await asyncio.to_thread(context.batches.folder.cancel, tenant, batch_id)
    context.batches.notify()
    return json_response(batch)


API = Api(
    router,
    bodies={"POST /v1/batches": BatchBody},
    queries={
        "GET /v1/files": ("after", "limit", "order", "purpose"),
        "GET /v1/batches": ("after", "limit", "order"),
    },
)
