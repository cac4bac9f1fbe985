# SPDX-License-Identifier: Apache-2.0
"""GET /v1/cache/events: additions to the cache and removals, as server-sent events.

A stream begins with a snapshot, in the form of GET /v1/cache/tree; changes follow. Each event has an id,
from which a disconnected client resumes (Last-Event-ID) as long as the server remembers it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable

from radixkv_server.activity.cache_feed import CacheFeed, Change
from radixkv_server.activity.node_names import NodeNames
from radixkv_server.apis.cache_api.caller import Caller
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Json, dump

LOOK_S = 0.2  # how often a stream looks for changes
EVENT_CHANGES = 500  # most in one event

_ID = re.compile(r"([0-9a-f]{12})-([0-9]{1,15})")


async def event_frames(
    context: ServerContext,
    caller: Caller,
    snapshot: Callable[[], Awaitable[Json]],
    last_id: str | None,
) -> AsyncGenerator[bytes, None]:
    """Yield frames until the client leaves or reads too slowly, or the server or the engine ends.

    Raises:
        ApiError: the server is about to end.
        EngineStoppedError: the engine has been closed or has failed.
    """
    feed, owner = context.cache_feed, (caller.tenant, caller.salt)
    await feed.join()
    try:
        found = _ID.fullmatch(last_id or "")
        epoch, cursor = feed.epoch, int(found[2]) if found else 0
        if found is None or found[1] != epoch or _is_lost(feed, caller, cursor):
            cursor = feed.cursor(owner, caller.is_admin)
            yield _frame("snapshot", epoch, cursor, await snapshot())
        while True:
            context.check_serving()
            if feed.error is not None:
                raise feed.error
            changes = feed.since(cursor, owner, caller.is_admin, EVENT_CHANGES)
            if changes is None or feed.epoch != epoch:
                yield _dropped()
                return
            if changes:
                last = changes[-1]
                cursor = last.number if caller.is_admin else last.cursor
                yield _frame("changes", epoch, cursor, _changes(changes, caller, context.names))
            if len(changes) < EVENT_CHANGES:
                await asyncio.sleep(LOOK_S)
    finally:
        feed.unsubscribe()


def _is_lost(feed: CacheFeed, caller: Caller, cursor: int) -> bool:
    owner = (caller.tenant, caller.salt)
    if cursor > feed.cursor(owner, caller.is_admin):
        return True
    return feed.since(cursor, owner, caller.is_admin, 0) is None


def _changes(changes: list[Change], caller: Caller, names: NodeNames) -> Json:
    shown = []
    for change in changes:
        one: Json = {"type": "stored" if change.is_stored else "removed", "block": names.of(change.block)}
        if change.is_stored:
            one["tokens"] = change.num_tokens
        if caller.is_admin:
            one["tenant"], one["cache_salt"] = change.owner or (None, None)
        shown.append(one)
    return {"changes": shown}


def _dropped() -> bytes:
    message = "You ask for events older than the server remembers: connect again without Last-Event-ID."
    return b"event: dropped\ndata: " + dump({"message": message}) + b"\n\n"


def _frame(event: str, epoch: str, cursor: int, data: Json) -> bytes:
    return f"id: {epoch}-{cursor}\nevent: {event}\ndata: ".encode() + dump(data) + b"\n\n"
