# SPDX-License-Identifier: Apache-2.0
"""The routes of the Responses API."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response, WebSocket

from radixkv_server.apis.responses.background import (
    answer_in_background,
    cancel,
    retrieve,
    stored_responses,
)
from radixkv_server.apis.responses.compaction import prepare_compaction
from radixkv_server.apis.responses.errors import ResponsesDialect
from radixkv_server.apis.responses.pages import PAGE_QUERY, check_include, page_of
from radixkv_server.apis.responses.schemas import CompactRequest, InputTokensRequest, ResponseRequest
from radixkv_server.apis.responses.serving import count_input_tokens, prepare_response
from radixkv_server.apis.responses.socket import ResponsesSocket
from radixkv_server.context import context_of
from radixkv_server.dialect import Api
from radixkv_server.generation.generation import answer, begin, json_response, respond, respond_with_tokens
from radixkv_server.http.request_record import record_of

router = APIRouter()

RESPONSES = ResponsesDialect()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer a conversation, whole, as a stream of typed events or in the background, and keep the answer."""
    context = context_of(request)
    read = partial(context.bodies.read, request, ResponseRequest, context.max_body_bytes())
    begun = await begin(context, record_of(request.scope), read, prepare_response)
    if begun.renderer.response["background"]:
        return await answer_in_background(request, begun)
    return await answer(request, RESPONSES, begun)


@router.websocket("/v1/responses")
async def connect(socket: WebSocket) -> None:
    """Answer conversations over a connection that stays open."""
    await ResponsesSocket(socket, context_of(socket)).run()


@router.post("/v1/responses/input_tokens")
async def count_tokens(request: Request) -> Response:
    """Count the tokens that the prompt of a response would have."""
    context = context_of(request)
    body = await context.bodies.read(request, InputTokensRequest, context.max_body_bytes())
    tokens = await count_input_tokens(context, body, record_of(request.scope).caller)
    return json_response({"object": "response.input_tokens", "input_tokens": tokens})


@router.post("/v1/responses/compact")
async def compact(request: Request) -> Response:
    """Answer with a shorter list of items in place of a conversation's: the model sums it up."""
    return await respond(request, RESPONSES, CompactRequest, prepare_compaction)


@router.post("/tokenize/v1/responses")
async def tokenize_response(request: Request) -> Response:
    """Answer with the tokens that /v1/responses would send to the model, and their cache namespace."""
    return await respond_with_tokens(request, ResponseRequest, prepare_response)


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """Answer with a response, or with the events of one in the background."""
    check_include(request.query_params)
    return await retrieve(request, response_id)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response, and end it if it runs; later ones that build on it stay."""
    await context_of(request).background.remove(record_of(request.scope).tenant, response_id)
    await stored_responses(request).delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """Answer with a page of a response's input items, earlier turns included."""
    stored = await stored_responses(request).get(response_id)
    return json_response(page_of(stored.input, request.query_params))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response in the background."""
    return await cancel(request, response_id)


API = Api(
    router,
    {"/v1/responses": RESPONSES},
    {
        "POST /v1/responses": ResponseRequest,
        "POST /v1/responses/input_tokens": InputTokensRequest,
        "POST /v1/responses/compact": CompactRequest,
        "POST /tokenize/v1/responses": ResponseRequest,
    },
    {
        "GET /v1/responses/{response_id}": ("include", "include_obfuscation", "starting_after", "stream"),
        "GET /v1/responses/{response_id}/input_items": PAGE_QUERY,
    },
    generating=frozenset({"/v1/responses", "/v1/responses/compact"}),
)
