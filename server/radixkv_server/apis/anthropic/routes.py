"""Anthropic's routes."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response

from radixkv_server.apis.anthropic.errors import AnthropicDialect
from radixkv_server.apis.anthropic.parse import count_tokens, parse_messages
from radixkv_server.apis.anthropic.render import MessageRenderer
from radixkv_server.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from radixkv_server.apis.anthropic.threads import Threads
from radixkv_server.context import ServerContext, context_of
from radixkv_server.dialect import Api
from radixkv_server.generation.request import GenerationRequest
from radixkv_server.generation.serve_generation import json_response, respond
from radixkv_server.generation.usage import Usage
from radixkv_server.http.request_record import record_of
from radixkv_server.response_store import StoreError

router = APIRouter()

logger = logging.getLogger("radixkv.server")

ANTHROPIC = AnthropicDialect()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    tenant = record_of(request.scope).tenant
    threads = Threads(context_of(request).responses, tenant)
    asked: list[tuple[MessagesRequest, MessageRenderer]] = []

    async def parse(
        context: ServerContext, body: MessagesRequest
    ) -> tuple[GenerationRequest, MessageRenderer]:
        whole = await threads.whole(body)
        wanted, renderer = await parse_messages(context, whole, tenant)
        asked.append((whole, renderer))
        return wanted, renderer

    async def keep(_: Usage) -> None:
        ((whole, renderer),) = asked
        try:
            await threads.keep(renderer.message_id, whole, renderer.content)
        except StoreError as error:  # the answer goes out; whoever builds on it is told that it is not there
            logger.error("the thread of %s is not kept: %s", renderer.message_id, error)

    return await respond(request, ANTHROPIC, MessagesRequest, parse, before_end=keep)


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(request: Request) -> Response:
    """How many tokens /v1/messages would send to the model."""
    context = context_of(request)
    body = await context.bodies.read(request, CountTokensRequest, context.max_body_bytes())
    return json_response(await count_tokens(context, body, record_of(request.scope).tenant))


API = Api(
    router,
    {"/v1/messages": ANTHROPIC},
    {"POST /v1/messages": MessagesRequest, "POST /v1/messages/count_tokens": CountTokensRequest},
    generating=frozenset({"/v1/messages"}),
)
