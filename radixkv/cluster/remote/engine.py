# SPDX-License-Identifier: Apache-2.0
"""RemoteEngine: the `EngineClient` of an engine in another process.

Each call is sent by its name with its arguments and comes back as its result, an error, or item by item.
Nothing is shared: results are copies, and times are durations.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

from radixkv.cache.accounts import Quota, QuotaUsage
from radixkv.cache.keys import NOBODY, Owner, TokenIds
from radixkv.cache.pins import PinInfo
from radixkv.cache.reporting.divergence import BreakPoint
from radixkv.cache.reporting.events import BlockChanges
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.tree_walk import TreeSnapshot
from radixkv.cluster.remote.adapters import RemoteAdapters
from radixkv.cluster.remote.channel import (
    WINDOW,
    Ask,
    AskStatus,
    Cancel,
    Channel,
    End,
    Facts,
    Failed,
    Item,
    Reply,
    Status,
    Took,
)
from radixkv.engine.cache_client import CacheClient
from radixkv.engine.counts import EngineStats
from radixkv.engine.outputs import OutputDelta, RequestOutput
from radixkv.errors import EngineStoppedError, InvalidRequestError
from radixkv.scheduling.request import Request

Event = Reply | Item | End | Failed


class _Pending:
    """A call that was not answered yet, and the event loop that waits for it."""

    def __init__(self, call_id: int) -> None:
        self.id = call_id
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Event) -> bool:
        """Call from any thread; False: the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:
            return False
        return True


class Link:
    """Makes calls over a connection, for any number of event loops.

    Args:
        connection: to a process that runs `radixkv.cluster.remote.host.serve_engine`.

    Attributes:
        facts: of the engine there.
        status: the latest that is known of it.
    """

    def __init__(self, connection: Connection) -> None:
        self.facts: Facts
        self.status: Status
        self._ids = itertools.count()
        self._lock = threading.Lock()  # around the next two: no call may slip in after the last one
        self._pending: dict[int, _Pending] = {}
        self._ended: EngineStoppedError | None = None
        self._channel = Channel(connection, self._take, self._lose)
        for _ in range(2):
            try:
                first = self._channel.receive()
            except (EOFError, OSError):
                raise EngineStoppedError("the engine's process ended before its engine was ready") from None
            if isinstance(first, Failed):
                raise first.error
            self._take(first)
        self._channel.start()

    @property
    def is_open(self) -> bool:
        return self._ended is None

    def ask_status(self) -> None:
        """Have the status renewed, for the next look at it."""
        if self.is_open:
            self._channel.send(AskStatus())

    async def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the method of that name there; return or raise its result. Cancelling it cancels it there."""
        with self._asking(name, args, options, streams=False) as pending:
            event = await pending.events.get()
            if isinstance(event, Failed):
                raise event.error
            assert isinstance(event, Reply)
            return event.value

    async def iterate(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> AsyncGenerator[Any]:
        """Yield the items of the method of that name there. Closing the iterator closes the remote one."""
        with self._asking(name, args, options, streams=True) as pending:
            num_taken = 0
            while not isinstance(event := await pending.events.get(), End):
                if isinstance(event, Failed):
                    raise event.error
                assert isinstance(event, Item)
                yield event.value
                num_taken += 1
                if num_taken == WINDOW // 2:
                    self._channel.send(Took(pending.id, num_taken))
                    num_taken = 0

    @contextlib.contextmanager
    def _asking(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], *, streams: bool
    ) -> Iterator[_Pending]:
        pending = _Pending(next(self._ids))
        with self._lock:
            if self._ended is not None:
                raise EngineStoppedError(str(self._ended))
            self._pending[pending.id] = pending  # first: the answer may be here before this thread goes on
            try:
                self._channel.send(Ask(pending.id, name, args, options, streams))
            except InvalidRequestError:
                del self._pending[pending.id]
                raise
        try:
            yield pending
        finally:
            if self._pending.pop(pending.id, None) is not None:  # it goes on there
                self._channel.send(Cancel(pending.id))

    def _take(self, message: Facts | Status | Event) -> None:
        """On the channel's thread."""
        if isinstance(message, Status):
            self.status = message
        elif isinstance(message, Facts):
            self.facts = message
        else:
            has_ended = not isinstance(message, Item)
            pending = (self._pending.pop if has_ended else self._pending.get)(message.id, None)
            if pending is not None and not pending.put(message) and not has_ended:
                self._pending.pop(message.id, None)
                self._channel.send(Cancel(message.id))

    def _lose(self) -> None:
        """End, on the channel's thread: the other process has gone, or the channel was closed."""
        with self._lock:
            self._ended = self._ended or EngineStoppedError("the engine's process has ended")
            left, self._pending = self._pending, {}
        for pending in left.values():
            pending.put(Failed(pending.id, EngineStoppedError(str(self._ended))))

    async def close(self) -> None:
        """Take no more calls, and fail all pending ones."""
        with self._lock:
            self._ended = EngineStoppedError("the engine has been closed")
        self._channel.close()
        await asyncio.to_thread(self._channel.join)


class RemoteCache(CacheClient):
    """The prefix cache of that engine."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.facts.model_fingerprint)
        self._link = link

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        return await self._link.call(f"cache.{name}", args, options)

    async def match(self, token_ids: TokenIds, owner: Owner = NOBODY) -> int:
        return cast(int, await self._call("match", token_ids, owner))

    async def explain(self, token_ids: TokenIds, owner: Owner = NOBODY, *, admin: bool = False) -> MissReport:
        report = await self._call("explain", token_ids, owner, admin=admin)
        return cast(MissReport, report)

    async def pin(
        self, token_ids: TokenIds, owner: Owner = NOBODY, *, ttl: float | None = None
    ) -> PinInfo | None:
        pin = await self._call("pin", token_ids, owner, ttl=ttl)
        return cast(PinInfo | None, pin)

    async def unpin(self, token_ids: TokenIds, owner: Owner = NOBODY) -> bool:
        return cast(bool, await self._call("unpin", token_ids, owner))

    async def unpin_id(self, pin_id: str, owner: Owner = NOBODY) -> bool:
        return cast(bool, await self._call("unpin_id", pin_id, owner))

    async def put_first(self, token_ids: TokenIds, owner: Owner = NOBODY) -> int:
        return cast(int, await self._call("put_first", token_ids, owner))

    async def pins(self, *, tenant: str | None = None, max_tokens: int | None = None) -> list[PinInfo]:
        return cast(list[PinInfo], await self._call("pins", tenant=tenant, max_tokens=max_tokens))

    async def quotas(self) -> list[QuotaUsage]:
        return cast(list[QuotaUsage], await self._call("quotas"))

    async def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        await self._call("set_quotas", quotas)

    async def publish(self, token_ids: TokenIds, *, adapter: str = "") -> int:
        return cast(int, await self._call("publish", token_ids, adapter=adapter))

    async def unpublish(self, token_ids: TokenIds, *, adapter: str = "") -> bool:
        return cast(bool, await self._call("unpublish", token_ids, adapter=adapter))

    async def reset(self) -> None:
        await self._call("reset")

    async def advice(self, limit: int = 10, *, tenant: str | None = None, salt: str = "") -> list[BreakPoint]:
        return cast(list[BreakPoint], await self._call("advice", limit, tenant=tenant, salt=salt))

    async def continuation(self, token_ids: TokenIds, owner: Owner = NOBODY, *, limit: int = 64) -> list[int]:
        tokens = await self._call("continuation", token_ids, owner, limit=limit)
        return cast(list[int], tokens)

    async def path(self, token_ids: TokenIds, owner: Owner = NOBODY) -> list[int]:
        return cast(list[int], await self._call("path", token_ids, owner))

    async def nodes(
        self,
        *,
        tenant: str | None = None,
        salt: str = "",
        shown_tokens: int = 0,
        max_nodes: int = 20_000,
        max_tokens: int = 1_000_000,
    ) -> TreeSnapshot:
        most = {"shown_tokens": shown_tokens, "max_nodes": max_nodes, "max_tokens": max_tokens}
        return cast(TreeSnapshot, await self._call("nodes", tenant=tenant, salt=salt, **most))

    async def tree(self, max_lines: int = 50) -> str:
        return cast(str, await self._call("tree", max_lines))

    def events(self, *, replay: bool = True) -> AsyncGenerator[BlockChanges]:
        return self._link.iterate("cache.events", (), {"replay": replay})


class RemoteEngine:
    """The `EngineClient` of the engine at the other end of a connection.

    Args:
        connection: see `Link`. Blocks until the engine there is ready.
        on_close: called in a thread once it is closed.

    Raises:
        EngineStoppedError: nothing serves an engine there; and what making that engine raised.
    """

    def __init__(self, connection: Connection, on_close: Callable[[], None] = lambda: None) -> None:
        self._link = Link(connection)
        self._on_close = on_close
        facts = self._link.facts
        self.config = facts.config
        self.model_name = facts.model_name
        self.model_fingerprint = facts.model_fingerprint
        self.limits = facts.limits
        self.default_sampling = facts.default_sampling
        self.tokenizer = facts.tokenizer
        self.cache = RemoteCache(self._link)
        self.adapters = RemoteAdapters(self._link)

    @property
    def is_healthy(self) -> bool:
        return self._link.is_open and self._link.status.is_healthy

    @property
    def is_full(self) -> bool:
        return self._link.status.is_full

    def stats(self) -> EngineStats:
        self._link.ask_status()  # for the next caller
        return self._link.status.stats

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        options = {"add_special_tokens": add_special_tokens, "allow_special": allow_special}
        return cast(list[int], await self._link.call("tokenize", (text,), options))

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        options |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return cast(list[int], await self._link.call("render_chat", (messages,), options))

    async def check_quota(self, requests: Sequence[Request]) -> None:
        await self._link.call("check_quota", (requests,), {})

    def stream(self, request: Request) -> AsyncGenerator[OutputDelta]:
        return self._link.iterate("stream", (request,), {})

    async def generate(self, request: Request) -> RequestOutput:
        return cast(RequestOutput, await self._link.call("generate", (request,), {}))

    async def abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineStoppedError):
            await self._link.call("abort", (request_id,), {})

    async def close(self) -> None:
        with contextlib.suppress(EngineStoppedError):
            await self._link.call("close", (), {})
        await self._link.close()
        await asyncio.to_thread(self._on_close)
