# SPDX-License-Identifier: Apache-2.0
"""Threads: conversations stored by the server, so that clients send only new messages.

create      the body is a whole conversation; it is stored with its answer under the answer's id
continue    the body holds the messages after a stored answer; the rest comes from the store

The store holds the conversation in the form of its clients, among the tenant's stored responses and within
their bounds: never token ids or K/V. Each answer of a thread is stored separately, so that clients may
continue one twice, and a repeated request finds the same conversation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from radixkv_server.apis.anthropic.schemas import MessagesRequest
from radixkv_server.chats.image_marks import ImageSource, with_parts
from radixkv_server.dialect import Json, dump
from radixkv_server.errors import ApiError, bad_request
from radixkv_server.http.body import as_data, validation_error
from radixkv_server.http.fields import Ignored
from radixkv_server.response_store import ResponseStore, StoreError

logger = logging.getLogger("radixkv.server")

_KEY = "thread:"


class Threads:
    """The threads of one tenant."""

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant

    async def whole(self, body: MessagesRequest, ignored: Ignored) -> MessagesRequest:
        """Return the body of the whole conversation, as if the client had sent that. O(text).

        Args:
            ignored: context for the check of that body.

        Raises:
            ApiError: 404; the answer to be continued was not kept, or no longer is. 400; the body sends again
                what belongs to the thread, or does not fit after it.
        """
        wanted = body.thread
        if wanted is None or wanted.type == "create":
            return body
        for name in ("system", "tools"):
            if getattr(body, name):
                message = f"{name}: a thread keeps what it was created with; leave it out, or create another."
                raise bad_request(message, param=name)
        thread = await self._get(wanted.previous_message_id)
        fields = {name: value for name, value in as_data(body).items() if value is not None}
        fields |= {
            **thread,
            "messages": [*thread["messages"], *fields["messages"]],
            "thread": {"type": "create"},
        }
        ignored.sources.update(body.image_sources)  # the new messages have their marks already
        try:
            return MessagesRequest.model_validate(fields, context=ignored)
        except ValidationError as error:
            raise validation_error(error, MessagesRequest) from None

    async def keep(self, message_id: str, body: MessagesRequest, content: Sequence[Json]) -> None:
        """Store an answer with its whole conversation, if they belong to a thread.

        Where that fails the answer goes out; whoever builds on it is told that it is not there.
        """
        if body.thread is None:
            return
        messages = [
            _with_images(_without_breakpoints(as_data(message)), body.image_sources)
            for message in body.messages
        ]
        answer = {"role": "assistant", "content": list(content)}
        kept = {
            "system": as_data(body.system),
            "tools": as_data(body.tools),
            "messages": [*messages, answer],
        }
        try:
            await self._store.put(self._tenant, _KEY + message_id, dump(kept))
        except StoreError as error:
            logger.error("the thread of %s is not kept: %s", message_id, error)

    async def _get(self, message_id: str) -> Json:
        """Return the thread's first `system` and `tools`, and all its `messages`, without breakpoints."""
        data = await self._store.get(self._tenant, _KEY + message_id)
        if data is None:
            raise ApiError(
                404,
                f"thread: there is no thread with the message {message_id[:200]!r}: it was not created by "
                "thread, or could not be kept, or others have been used since and took its place. Send the "
                'whole conversation with thread {"type": "create"}.',
                param="thread",
                code="thread_not_found",
            )
        thread: Json = json.loads(data)
        return thread


def _with_images(value: Json, sources: Mapping[str, ImageSource]) -> Json:
    """Return a message or block with a block of its own for each image, also of blocks in it."""
    content = value.get("content")
    if isinstance(content, list):
        content = [_with_images(block, sources) for block in content]
    content = with_parts(content, sources, lambda text: {"type": "text", "text": text}, _image_block)
    return value if content is None else {**value, "content": content}


def _image_block(source: ImageSource) -> Json:
    if source.is_address:
        return {"type": "image", "source": {"type": "url", "url": source.data}}
    # The media type is not read: the file says what it is.
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": source.data}}


def _without_breakpoints(value: Json) -> Json:
    """Return a message or block without `cache_control`, also of blocks in it, and without nulls."""
    kept = {name: item for name, item in value.items() if name != "cache_control" and item is not None}
    if isinstance(kept.get("content"), list):
        kept["content"] = [_without_breakpoints(block) for block in kept["content"]]
    return kept
