# SPDX-License-Identifier: Apache-2.0
"""The routes of the Conversations API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from radixkv_server.apis.common.openai_errors import OpenAIDialect
from radixkv_server.apis.common.pages import listed
from radixkv_server.apis.responses.conversation import find_references, plain_items
from radixkv_server.apis.responses.pages import PAGE_QUERY, check_include, page_of
from radixkv_server.apis.responses.schemas import ConversationItems, ConversationRequest, ConversationUpdate
from radixkv_server.apis.responses.stored import StoredResponses
from radixkv_server.apis.responses.stored_conversations import (
    StoredConversation,
    StoredConversations,
    check_ids,
)
from radixkv_server.context import context_of
from radixkv_server.dialect import Api, Json
from radixkv_server.generation.generation import json_response
from radixkv_server.generation.request import new_id
from radixkv_server.http.request_record import record_of

router = APIRouter()

URL = "/v1/conversations"


@router.post(URL)
async def create_conversation(request: Request) -> Response:
    """Begin a conversation, with items or without."""
    context = context_of(request)
    body = await context.bodies.read(request, ConversationRequest, context.max_body_bytes())
    responses, conversations = _stores(request)
    conversation = StoredConversation(new_id("conv_"), metadata=body.metadata or {})
    found = await find_references(body.items or (), responses, conversations)
    new = plain_items(body.items or (), found, conversation.id)
    check_ids((), new, "items")
    conversation.add(new)
    await conversations.create(conversation)
    return json_response(conversation.plain())


@router.get(f"{URL}/{{conversation_id}}")
async def get_conversation(request: Request, conversation_id: str) -> Response:
    """Answer with a conversation, without its items."""
    return json_response((await _stores(request)[1].get(conversation_id)).plain())


@router.post(f"{URL}/{{conversation_id}}")
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replace the metadata of a conversation."""
    context = context_of(request)
    body = await context.bodies.read(request, ConversationUpdate, context.max_body_bytes())

    def update(conversation: StoredConversation) -> None:
        conversation.metadata = body.metadata or {}

    return json_response((await _stores(request)[1].change(conversation_id, update)).plain())


@router.delete(f"{URL}/{{conversation_id}}")
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Forget a conversation."""
    await _stores(request)[1].delete(conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get(f"{URL}/{{conversation_id}}/items")
async def list_items(request: Request, conversation_id: str) -> Response:
    """Answer with a page of a conversation's items."""
    items = (await _stores(request)[1].get(conversation_id)).items
    return json_response(page_of(items, request.query_params))


@router.post(f"{URL}/{{conversation_id}}/items")
async def add_items(request: Request, conversation_id: str) -> Response:
    """Append items to a conversation."""
    context = context_of(request)
    check_include(request.query_params)
    body = await context.bodies.read(request, ConversationItems, context.max_body_bytes())
    responses, conversations = _stores(request)
    found = await find_references(body.items, responses, conversations)
    new: list[Json] = []

    def add(conversation: StoredConversation) -> None:
        new[:] = plain_items(body.items, found, conversation.id, conversation.num_added)
        check_ids(conversation.items, new, "items")
        conversation.add(new)

    await conversations.change(conversation_id, add)
    return json_response(listed(new))


@router.get(f"{URL}/{{conversation_id}}/items/{{item_id}}")
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Answer with one item of a conversation."""
    check_include(request.query_params)
    return json_response((await _stores(request)[1].get(conversation_id)).find(item_id))


@router.delete(f"{URL}/{{conversation_id}}/items/{{item_id}}")
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Take an item out of a conversation; answers with the conversation."""

    def remove(conversation: StoredConversation) -> None:
        conversation.items.remove(conversation.find(item_id))

    return json_response((await _stores(request)[1].change(conversation_id, remove)).plain())


def _stores(request: Request) -> tuple[StoredResponses, StoredConversations]:
    store, tenant = context_of(request).responses, record_of(request.scope).tenant
    return StoredResponses(store, tenant), StoredConversations(store, tenant)


API = Api(
    router,
    {URL: OpenAIDialect()},
    {
        f"POST {URL}": ConversationRequest,
        f"POST {URL}/{{conversation_id}}": ConversationUpdate,
        f"POST {URL}/{{conversation_id}}/items": ConversationItems,
    },
    {
        f"GET {URL}/{{conversation_id}}/items": PAGE_QUERY,
        f"POST {URL}/{{conversation_id}}/items": ("include",),
        f"GET {URL}/{{conversation_id}}/items/{{item_id}}": ("include",),
    },
)
