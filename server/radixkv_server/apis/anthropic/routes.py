"""Anthropic's routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from radixkv_server.apis.anthropic.errors import AnthropicDialect
from radixkv_server.apis.anthropic.parse import count_tokens, parse_messages
from radixkv_server.apis.anthropic.render import MessageRenderer
from radixkv_server.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Api
from radixkv_server.generation.exchange import json_response, respond
from radixkv_server.generation.request import GenerationRequest
from radixkv_server.http.request_record import record_of

router = APIRouter()

ANTHROPIC = AnthropicDialect()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    tenant = record_of(request.scope).tenant

    async def parse(
        context: ServerContext, body: MessagesRequest
    ) -> tuple[GenerationRequest, MessageRenderer]:
        return await parse_messages(context, body, tenant)

    return await respond(request, ANTHROPIC, MessagesRequest, parse)


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(request: Request) -> Response:
    """How many tokens /v1/messages would send to the model."""
    context = context_of(request)
    body = await context.bodies.read(request, CountTokensRequest, context.max_body_bytes())
    tokens = await count_tokens(context, body, record_of(request.scope).tenant)
    return json_response({"input_tokens": tokens})


API = Api(
    router,
    {"/v1/messages": ANTHROPIC},
    {"POST /v1/messages": MessagesRequest, "POST /v1/messages/count_tokens": CountTokensRequest},
    generating=frozenset({"/v1/messages"}),
)
