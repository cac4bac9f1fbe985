# SPDX-License-Identifier: Apache-2.0
"""`truncation: auto`: drop the oldest items of a conversation that does not fit into its prompt.

System and developer messages stay, and so does the last message of a user with all items after it. A call is
dropped together with its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixkv.errors import ContextLengthExceededError
from radixkv.scheduling.request import Request
from radixkv_server.chats.chat import Chat
from radixkv_server.chats.render import chat_prompt
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json
from radixkv_server.tenants.tenant import Tenant

#: Fraction 1/8 of the context, for an answer without a given length.
_ROOM = 8


async def fit(
    context: ServerContext,
    items: Sequence[Json],
    make_chat: Callable[[Sequence[Json]], Chat],
    room: int | None,
    caller: Tenant,
    salt: str,
) -> Sequence[Json]:
    """Return the items whose prompt fits: all, or as many of the latest as leave `room` for the answer.

    O(log(items)) renderings of the chat.

    Args:
        room: tokens of the answer; None: an eighth of the context.
        caller, salt: owner of the cache quota that the prompt must fit into.
    """
    limit = context.engine.limits.max_model_len

    async def fits(kept: Sequence[Json], answer: int) -> bool:
        try:
            prompt = await chat_prompt(context, make_chat(kept))
            ids = prompt.ids
            whole = [*map(int, ids), *[int(ids[-1])] * (answer - 1)]
            request = Request(whole, tenant=caller.name, salt=salt, images=prompt.images)
            await context.engine.check_quota([request])
        except ContextLengthExceededError:
            return False
        return len(ids) <= limit - answer

    if await fits(items, 1):
        return items
    answer = min(limit // 2, room or limit // _ROOM)
    order = _oldest_first(items)
    few, many = 0, len(order)  # leaving out `few` is too little
    while many - few > 1:
        middle = (few + many) // 2
        if await fits(_without(items, order[:middle]), answer):
            many = middle
        else:
            few = middle
    return _without(items, order[:many])


def _without(items: Sequence[Json], left_out: Sequence[list[int]]) -> list[Json]:
    gone = {index for group in left_out for index in group}
    return [item for index, item in enumerate(items) if index not in gone]


def _oldest_first(items: Sequence[Json]) -> list[list[int]]:
    """Return the groups of item indices that may be dropped, oldest first."""
    last = max((i for i, item in enumerate(items) if item.get("role") == "user"), default=len(items) - 1)
    groups: dict[object, list[int]] = {}
    for index, item in enumerate(items[:last]):
        if item.get("role") in ("system", "developer"):
            continue
        groups.setdefault(item.get("call_id", index), []).append(index)
    after = {item.get("call_id") for item in items[last:]} - {None}
    return [group for key, group in groups.items() if key not in after]
