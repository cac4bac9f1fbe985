"""The conversation that a body of the Responses API stands for, and how it becomes a chat."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from radixkv_server.apis.common.cache_controls import MarkedPart, marked_parts
from radixkv_server.apis.common.chats import template_options
from radixkv_server.apis.common.fields import plain_choice
from radixkv_server.apis.responses.items import (
    CallOutputItem,
    ItemReference,
    MessageItem,
    item_id,
    messages_of,
)
from radixkv_server.apis.responses.schemas import ConversationFields, ResponsePromptFields
from radixkv_server.apis.responses.stored import StoredResponses
from radixkv_server.apis.responses.tools import Toolbox
from radixkv_server.chats.chat import Chat
from radixkv_server.chats.structured import tool_choice
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.tenants.tenant import Tenant


async def items_of(
    body: ConversationFields, stored: StoredResponses, response_id: str
) -> tuple[list[Json], list[Json]]:
    """The items of the turns before, and those of the body's input; in their plain forms.

    Args:
        response_id: what the ids of items without one are made of.

    Raises:
        ApiError: 404; a response or an item that the body names is not stored.
    """
    before: list[Json] = []
    if body.previous_response_id is not None:
        before = (await stored.get(body.previous_response_id, "previous_response_id")).conversation
    if body.input is None:
        return before, []
    given: Sequence[Any] = body.input if not isinstance(body.input, str) else _said_by_user(body.input)
    new = []
    for number, item in enumerate(given):
        if isinstance(item, ItemReference):
            new.append(await stored.item(item.id))
        else:
            new.append(item.plain(item.id or item_id(response_id, item.type, number)))
    return before, new


def _said_by_user(text: str) -> list[MessageItem]:
    return [MessageItem(role="user", content=text)]


def chat_of(
    context: ServerContext, body: ResponsePromptFields, items: Sequence[Json], tools: Toolbox, caller: Tenant
) -> Chat:
    """The chat of a conversation's items."""
    options = template_options(context, body.chat_template_kwargs, body.chat_template)
    if body.reasoning is not None and body.reasoning.effort is not None:
        options.setdefault("reasoning_effort", body.reasoning.effort)
    choice, allowed = tool_choice(tools.choice(plain_choice(body.tool_choice)))

    recall = functools.partial(context.calls.recall, caller.name)
    return Chat(
        source=[body.instructions, *items],
        convert=lambda: messages_of(body.instructions, items, tools, recall)[0],
        param="input",
        tools=tools.functions,
        tool_choice=choice,
        allowed_tools=allowed,
        tool_inputs=tools.inputs,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        options=options,
    )


def marked_items(
    body: ConversationFields, new: Sequence[Json], shown: Sequence[Json], tools: Toolbox
) -> list[tuple[int, MarkedPart]]:
    """The parts of a body's input that end with a breakpoint, each with the index of its message in the chat.

    Args:
        new: the plain forms of the input's items.
        shown: the items that the chat is of, which may lack some.
    """
    marked = {}
    for plain, item in zip(new, body.input or (), strict=False):
        if isinstance(item, MessageItem | CallOutputItem):
            content = item.content if isinstance(item, MessageItem) else item.output
            marked[id(plain)] = list(marked_parts(content))
    if not any(marked.values()):
        return []
    _, places = messages_of(body.instructions, shown, tools, lambda _, given: given)
    return [
        (place, part) for item, place in zip(shown, places, strict=True) for part in marked.get(id(item), ())
    ]
