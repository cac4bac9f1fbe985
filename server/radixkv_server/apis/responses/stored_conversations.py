# SPDX-License-Identifier: Apache-2.0
"""StoredConversations: the conversations of one tenant, lists of items that grow turn by turn. Never K/V.

Each change is one transaction of the store: two turns that end at once are both kept, one after the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixkv_server.apis.responses.schemas import MAX_INPUT_ITEMS
from radixkv_server.apis.responses.stored import not_found
from radixkv_server.concurrency import off_loop
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import bad_request
from radixkv_server.response_store import ResponseStore, StoreError


@dataclass(slots=True)
class StoredConversation:
    """A conversation and its items.

    Attributes:
        num_added: number of items added so far, for the ids of new ones.
    """

    id: str
    created_at: int = field(default_factory=lambda: int(time.time()))
    metadata: dict[str, str] = field(default_factory=dict)
    items: list[Json] = field(default_factory=list)
    num_added: int = 0

    def plain(self) -> Json:
        """Return the conversation object of the API."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }

    def find(self, item_id: str) -> Json:
        """Return the item with this id.

        Raises:
            ApiError: 404; there is none.
        """
        found = next((item for item in self.items if item["id"] == item_id), None)
        if found is None:
            raise not_found("Item", item_id, "item_id")
        return found

    def add(self, items: Sequence[Json]) -> None:
        """Append items; those whose ids it has already stay where they are.

        Raises:
            ApiError: 400; it would have too many items.
        """
        known = {item["id"] for item in self.items}
        new = [item for item in items if item["id"] not in known]
        if len(self.items) + len(new) > MAX_INPUT_ITEMS:
            message = f"A conversation has at most {MAX_INPUT_ITEMS} items: delete some, or begin another."
            raise bad_request(message, param="items", code="conversation_too_long")
        self.items += new
        self.num_added += len(new)

    def encode(self) -> bytes:
        return dump({name: getattr(self, name) for name in self.__slots__})


class StoredConversations:
    """The conversations of one tenant."""

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    async def create(self, conversation: StoredConversation) -> None:
        """Keep a new conversation.

        Raises:
            StoreError: the store fails.
        """
        await self._store.put(self._tenant, conversation.id, conversation.encode())

    async def get(self, conversation_id: str, param: str | None = None) -> StoredConversation:
        """Return a conversation of the tenant's.

        Raises:
            ApiError: 404; there is none, or no longer.
            StoreError: the store fails.
        """
        data = await self._store.get(self._tenant, conversation_id) if _is_id(conversation_id) else None
        if data is None:
            raise not_found("Conversation", conversation_id, param)
        return await off_loop(lambda: _decode(data), num_bytes=len(data))

    async def change(
        self, conversation_id: str, change: Callable[[StoredConversation], None]
    ) -> StoredConversation:
        """Apply `change` to a conversation of the tenant's; if it raises, nothing changes.

        Raises:
            ApiError: 404; there is none, or no longer. And errors of `change`.
            StoreError: the store fails.
        """

        def changed(data: bytes) -> bytes:
            conversation = _decode(data)
            change(conversation)
            return conversation.encode()

        data = None
        if _is_id(conversation_id):
            data = await self._store.update(self._tenant, conversation_id, changed)
        if data is None:
            raise not_found("Conversation", conversation_id, None)
        return _decode(data)

    async def delete(self, conversation_id: str) -> None:
        """Forget a conversation of the tenant's; the responses of its turns stay.

        Raises:
            ApiError: 404; there is none, or no longer.
        """
        if not _is_id(conversation_id) or not await self._store.delete(self._tenant, conversation_id):
            raise not_found("Conversation", conversation_id, None)


def check_ids(present: Sequence[Json], items: Sequence[Json], param: str) -> None:
    """Make sure that no two items have one id. `param` names the field of the new items.

    Raises:
        ApiError: 400; an item has the id of another one.
    """
    seen = {item["id"] for item in present}
    for index, item in enumerate(items):
        if item["id"] in seen:
            message = f"Duplicate item: the conversation has an item {item['id'][:200]!r} already."
            raise bad_request(message, param=f"{param}[{index}].id", code="duplicate_item")
        seen.add(item["id"])


def _is_id(conversation_id: str) -> bool:
    """Return whether this may be the id of a conversation: the store keeps other entries, too."""
    return conversation_id.startswith("conv_")


def _decode(data: bytes) -> StoredConversation:
    """Read the result of `encode`."""
    try:
        return StoredConversation(**json.loads(data))
    except (ValueError, TypeError):
        raise StoreError("The stored conversation is damaged.", may_pass=False) from None
