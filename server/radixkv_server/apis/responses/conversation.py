# SPDX-License-Identifier: Apache-2.0
"""From a body of the Responses API to the items of its conversation, and from these to a chat."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.text.chat_formats.thinking import Thinking
from radixkv_server.apis.common.answer_formats import tool_choice
from radixkv_server.apis.common.chat_messages import MarkedPart, marked_parts
from radixkv_server.apis.common.fields import plain_choice
from radixkv_server.apis.responses.items import (
    CallOutputItem,
    ItemReference,
    MessageItem,
    item_id,
    messages_of,
    owner_of,
    with_images,
    with_marks,
)
from radixkv_server.apis.responses.provider_items import since_compaction
from radixkv_server.apis.responses.schemas import ConversationFields, ResponsePromptFields
from radixkv_server.apis.responses.stored import StoredResponses
from radixkv_server.apis.responses.stored_conversations import StoredConversations, check_ids
from radixkv_server.apis.responses.tools import Toolbox
from radixkv_server.chats.chat import Chat
from radixkv_server.chats.image_marks import ImageSource
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.errors import ApiError
from radixkv_server.tenants.tenant import Tenant


async def items_of(
    body: ConversationFields, stored: StoredResponses, conversations: StoredConversations, response_id: str
) -> tuple[list[Json], list[Json]]:
    """Return the items of the earlier turns and the items of the input, in their plain forms.

    Args:
        response_id: names the new items that have no id.

    Raises:
        ApiError: 404; a response, a conversation or an item that the body names is not stored. 400; the
            conversation has an item with the id of a new one.
    """
    before: list[Json] = []
    if body.previous_response_id is not None:
        before = await stored.before(body.previous_response_id)
    elif body.conversation_id is not None:
        before = (await conversations.get(body.conversation_id, "conversation")).items
    given: Sequence[Any] = body.input or ()
    if isinstance(body.input, str):
        given = [MessageItem(role="user", content=body.input)]
    found = await find_references(given, stored, conversations)
    new = [with_images(item, body.image_sources) for item in plain_items(given, found, response_id)]
    if body.conversation_id is not None:
        check_ids(before, [item for item in new if item["id"] not in found], "input")
    return before, new


async def find_references(
    given: Sequence[Any], stored: StoredResponses, conversations: StoredConversations
) -> dict[str, Json]:
    """Return the items that references among `given` name, by id.

    Raises:
        ApiError: 404; one is not stored.
    """
    names = [item.id for item in given if isinstance(item, ItemReference)]
    return {name: await _find(name, stored, conversations) for name in names}


async def _find(name: str, stored: StoredResponses, conversations: StoredConversations) -> Json:
    try:
        return await stored.item(name)
    except ApiError as error:
        with contextlib.suppress(ApiError):
            return (await conversations.get(owner_of(name, "conv_"))).find(name)
        raise error


def plain_items(given: Sequence[Any], found: Mapping[str, Json], owner_id: str, first: int = 0) -> list[Json]:
    """Return the plain forms of items.

    Args:
        found: see `find_references`.
        owner_id: the response or conversation that names the items without an id.
        first: number of the first item among the owner's.
    """
    return [
        found[item.id]
        if isinstance(item, ItemReference)
        else item.plain(item.id or item_id(owner_id, item.type, first + number))
        for number, item in enumerate(given)
    ]


def chat_of(
    context: ServerContext, body: ResponsePromptFields, items: Sequence[Json], tools: Toolbox, caller: Tenant
) -> Chat:
    """Make the chat of a conversation's items, without items that a compaction replaced."""
    images: dict[str, ImageSource] = dict(body.image_sources)
    items = [with_marks(item, images) for item in since_compaction(items)]
    options = body.template_options(trusted=context.settings.trust_request_chat_template)
    choice, allowed = tool_choice(tools.choice(plain_choice(body.tool_choice)))

    recall = functools.partial(context.calls.recall, caller.name)
    return Chat(
        source=[body.instructions, *items],
        convert=lambda: messages_of(body.instructions, items, tools, recall)[0],
        param="input",
        images=images,
        tools=tools.functions,
        unlisted_tools=tools.unlisted,
        tool_choice=choice,
        allowed_tools=allowed,
        tool_inputs=tools.inputs,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        options=options,
        thinking=Thinking(effort=None if body.reasoning is None else body.reasoning.effort),
    )


def marked_items(
    body: ConversationFields, new: Sequence[Json], shown: Sequence[Json], tools: Toolbox
) -> list[tuple[int, MarkedPart]]:
    """Return the parts of a body's input that end with a breakpoint, each with the index of its message.

    Args:
        new: the plain forms of the input's items.
        shown: the chat's items, which may lack some of them.
    """
    marked = {}
    for plain, item in zip(new, body.input or (), strict=False):
        if isinstance(item, MessageItem | CallOutputItem):
            content = item.content if isinstance(item, MessageItem) else item.output
            marked[plain["id"]] = list(marked_parts(content))
    if not any(marked.values()):
        return []
    _, places = messages_of(body.instructions, shown, tools, lambda _, given: given)
    return [
        (place, part)
        for item, place in zip(shown, places, strict=True)
        for part in marked.get(item["id"], ())
    ]
