# SPDX-License-Identifier: Apache-2.0
"""Anthropic's routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from radixkv_server.apis.anthropic.errors import AnthropicDialect
from radixkv_server.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from radixkv_server.apis.anthropic.serving import count_tokens, prepare_messages
from radixkv_server.context import context_of
from radixkv_server.dialect import Api
from radixkv_server.generation.generation import json_response, respond, respond_with_tokens
from radixkv_server.http.request_record import record_of

router = APIRouter()

ANTHROPIC = AnthropicDialect()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    return await respond(request, ANTHROPIC, MessagesRequest, prepare_messages)


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(request: Request) -> Response:
    """Count the tokens that /v1/messages would send to the model."""
    context = context_of(request)
    body = await context.bodies.read(request, CountTokensRequest, context.max_body_bytes())
    return json_response(await count_tokens(context, body, record_of(request.scope).caller))


@router.post("/tokenize/v1/messages")
async def tokenize_message(request: Request) -> Response:
    """Return the tokens that /v1/messages would send to the model, and their cache namespace."""
    return await respond_with_tokens(request, MessagesRequest, prepare_messages)


API = Api(
    router,
    {"/v1/messages": ANTHROPIC},
    {
        "POST /v1/messages": MessagesRequest,
        "POST /v1/messages/count_tokens": CountTokensRequest,
        "POST /tokenize/v1/messages": MessagesRequest,
    },
    generating=frozenset({"/v1/messages"}),
)
