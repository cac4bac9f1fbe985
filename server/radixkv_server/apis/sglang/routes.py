# SPDX-License-Identifier: Apache-2.0
"""SGLang's routes of sessions, which need no opening here, and end what they alone have cached."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from radixkv_server.apis.sglang.schemas import CloseSessionBody, OpenSessionBody
from radixkv_server.context import context_of
from radixkv_server.dialect import Api, dump
from radixkv_server.generation.generation import json_response
from radixkv_server.generation.request import new_id
from radixkv_server.http.request_record import record_of

router = APIRouter()


@router.post("/open_session")
async def open_session(request: Request) -> Response:
    """Return the id of a session: the given one, or a new one."""
    context = context_of(request)
    body = await context.bodies.read(request, OpenSessionBody, context.max_body_bytes())
    return Response(dump(body.session_id or new_id("session-")), media_type="application/json")


@router.post("/close_session")
async def close_session(request: Request) -> Response:
    """Have what only this session has cached evicted first."""
    context = context_of(request)
    body = await context.bodies.read(request, CloseSessionBody, context.max_body_bytes())
    tokens = await context.sessions.end(record_of(request.scope).tenant, body.session_id)
    return json_response({"session_id": body.session_id, "done": tokens > 0, "cached_tokens": tokens})


API = Api(router, bodies={"POST /open_session": OpenSessionBody, "POST /close_session": CloseSessionBody})
