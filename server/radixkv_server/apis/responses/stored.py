# SPDX-License-Identifier: Apache-2.0
"""StoredResponses: the responses of one tenant, each with the conversation that led to it. Never K/V."""

from __future__ import annotations

import json
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from radixkv_server.apis.responses.items import owner_of
from radixkv_server.concurrency import off_loop
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.response_store import ResponseStore, StoreError

UNFINISHED = ("queued", "in_progress")

#: Responses of one connection, by id: the last of each stream.
Local = MutableMapping[str, "StoredResponse"]


@dataclass(frozen=True, slots=True)
class Running:
    """Mark of a response that is being answered in the background.

    Args:
        epoch: epoch of the store at its beginning.
        until: time of the clock at which it will have ended.
    """

    epoch: str
    until: float


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its conversation.

    Args:
        response: the response object.
        input: all items of its prompt, with the items of earlier turns.
        running: set while it is being answered.
    """

    response: Json
    input: Sequence[Json]
    running: Running | None = None

    @property
    def conversation(self) -> list[Json]:
        """The items that a next turn begins with."""
        return [*self.input, *self.response["output"]]

    def find(self, item_id: str) -> Json | None:
        """Return the item with this id."""
        return next((item for item in self.conversation if item["id"] == item_id), None)

    def encode(self) -> bytes:
        running = self.running and {"epoch": self.running.epoch, "until": self.running.until}
        return dump({"response": self.response, "input": list(self.input), "running": running})


class StoredResponses:
    """The stored responses of one tenant.

    Args:
        local: further responses that only one connection knows.
    """

    def __init__(self, store: ResponseStore, tenant: str, local: Local | None = None) -> None:
        self._store = store
        self._tenant = tenant
        self._local = local

    async def add(self, stored: StoredResponse, *, running_s: float | None = None) -> None:
        """Keep a response under its id.

        Args:
            running_s: seconds that it may still take, if it is unfinished.

        Raises:
            StoreError: the store fails.
        """
        if running_s is not None and stored.response["status"] in UNFINISHED:
            running = Running(self._store.epoch, time.time() + running_s)
            stored = StoredResponse(stored.response, stored.input, running)
        await self._store.put(self._tenant, stored.response["id"], stored.encode())

    async def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response of the tenant's.

        Raises:
            ApiError: 404; there is none, or no longer.
            StoreError: the store fails.
        """
        stored = await self._read(response_id)
        if stored is None:
            raise not_found("Response", response_id, param)
        return stored

    async def before(self, response_id: str) -> list[Json]:
        """Return the items that the turn after `previous_response_id` begins with.

        Raises:
            ApiError: 404; there is no such response, or no longer. 400; it has not ended, or failed.
            StoreError: the store fails.
        """
        name = "previous_response_id"
        stored = await self.get(response_id, name)
        status = stored.response["status"]
        if status in UNFINISHED:
            message = f"The response {response_id!r} is {status}: wait for its end, or cancel it."
            raise bad_request(message, param=name, code="previous_response_unfinished")
        if status == "failed":
            message = f"The response {response_id!r} failed: go on from the one before it."
            raise bad_request(message, param=name, code="previous_response_failed")
        return stored.conversation

    async def item(self, item_id: str) -> Json:
        """Return an item of one of the tenant's responses.

        Raises:
            ApiError: 404; there is none, or no longer.
        """
        stored = await self._read(owner_of(item_id, "resp_"))
        item = None if stored is None else stored.find(item_id)
        if item is None:
            raise not_found("Item", item_id, "input")
        return item

    async def delete(self, response_id: str) -> None:
        """Forget a response of the tenant's.

        Raises:
            ApiError: 404; there is none, or no longer.
        """
        if not _is_id(response_id) or not await self._store.delete(self._tenant, response_id):
            raise not_found("Response", response_id, None)

    async def _read(self, response_id: str) -> StoredResponse | None:
        if self._local is not None and response_id in self._local:
            return self._local[response_id]
        data = await self._store.get(self._tenant, response_id) if _is_id(response_id) else None
        if data is None:
            return None
        return await off_loop(lambda: self._decode(data), num_bytes=len(data))

    def _decode(self, data: bytes) -> StoredResponse:
        """Read the result of `encode`; a response whose server is gone has failed."""
        try:
            fields = json.loads(data)
            running = fields.get("running") and Running(**fields["running"])
            stored = StoredResponse(fields["response"], fields["input"], running)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StoreError("The stored response is damaged.", may_pass=False) from None
        if running is not None and (running.epoch != self._store.epoch or time.time() > running.until):
            message = "The server was restarted before the response was complete: send the request again."
            error = {"code": "server_error", "message": message}
            return StoredResponse({**stored.response, "status": "failed", "error": error}, stored.input)
        return stored


def _is_id(response_id: str) -> bool:
    """Return whether this may be the id of a response: the store keeps other entries, too."""
    return response_id.startswith("resp_")


def not_found(what: str, name: str, param: str | None) -> ApiError:
    """Make the 404 of a response, item or conversation."""
    code = "previous_response_not_found" if param == "previous_response_id" else "not_found"
    return ApiError(
        404,
        f"{what} with id {name[:200]!r} not found: it was not stored, or it has been deleted, or others have "
        "been used since and took its place.",
        param=param,
        code=code,
    )
