"""A response as it is stored: what was answered, and the conversation that led to it. Never K/V."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv_server.apis.responses.items import response_of
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError
from radixkv_server.response_store import ResponseStore, StoreError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer of the Responses API.

    Args:
        response: as it was answered.
        input: all items that it was given, those of the turns before included.
    """

    response: Json
    input: Sequence[Json]

    @property
    def conversation(self) -> list[Json]:
        """What a next turn begins with."""
        return [*self.input, *self.response["output"]]

    def find(self, item_id: str) -> Json | None:
        """The item with this id."""
        return next((item for item in self.conversation if item["id"] == item_id), None)

    def encode(self) -> bytes:
        return dump({"response": self.response, "input": list(self.input)})


class StoredResponses:
    """The stored responses of one tenant."""

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    async def add(self, stored: StoredResponse) -> None:
        """Keep it under its id.

        Raises:
            StoreError: the store fails.
        """
        await self._store.put(self._tenant, stored.response["id"], stored.encode())

    async def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """A response of the tenant's.

        Raises:
            ApiError: 404; there is none, or no longer.
            StoreError: the store fails.
        """
        data = await self._read(response_id)
        if data is None:
            raise _not_found("Response", response_id, param)
        return _decode(data)

    async def item(self, item_id: str) -> Json:
        """An item of one of the tenant's responses.

        Raises:
            ApiError: 404; there is none, or no longer.
        """
        data = await self._read(response_of(item_id))
        item = None if data is None else _decode(data).find(item_id)
        if item is None:
            raise _not_found("Item", item_id, "input")
        return item

    async def delete(self, response_id: str) -> None:
        """Forget a response of the tenant's.

        Raises:
            ApiError: 404; there is none, or no longer.
        """
        if not _is_id(response_id) or not await self._store.delete(self._tenant, response_id):
            raise _not_found("Response", response_id, None)

    async def _read(self, response_id: str) -> bytes | None:
        return await self._store.get(self._tenant, response_id) if _is_id(response_id) else None


def _is_id(response_id: str) -> bool:
    """Whether it may be a response's: the store also keeps what is none."""
    return response_id.startswith("resp_")


def _decode(data: bytes) -> StoredResponse:
    """What `encode` gave."""
    try:
        return StoredResponse(**json.loads(data))
    except (ValueError, TypeError):
        raise StoreError("The store of responses has it, but damaged.", may_pass=False) from None


def _not_found(what: str, name: str, param: str | None) -> ApiError:
    code = "previous_response_not_found" if param == "previous_response_id" else "not_found"
    return ApiError(
        404,
        f"{what} with id {name[:200]!r} not found: it was not stored, or it has been deleted, or others have "
        "been used since and took its place.",
        param=param,
        code=code,
    )
