# SPDX-License-Identifier: Apache-2.0
"""Members: which engines there are, and which of them gets a request. Any thread."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple, TypeVar

from radixkv.cache.keys import TokenIds
from radixkv.cluster.events.block_keys import BlockKeys
from radixkv.cluster.replicas.member import Member
from radixkv.cluster.replicas.totals import left_by, total
from radixkv.cluster.routing.router import Route, Router
from radixkv.engine.calls import Call
from radixkv.engine.client import EngineClient
from radixkv.engine.counts import EngineStats
from radixkv.errors import ConfigError, EngineStoppedError

T = TypeVar("T")

# Prefill rates that differ by less are taken for the same.
_ALIKE = 1.5


class SentRequest(NamedTuple):
    """A request on its way to an engine."""

    member: Member
    route: Route


class Members:
    """The engines and the router's books on them.

    Attributes:
        is_closed: there are none any more, and there will be none.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._keys = BlockKeys(secrets.token_bytes(32))
        self._lock = threading.Lock()  # around all that follows
        self._router = Router(self._keys)
        self._members: dict[str, Member] = {}
        self._left: list[EngineStats] = []  # one: the sum over the engines that have gone

    def present(self) -> list[Member]:
        """All of them.

        Raises:
            EngineStoppedError: they have been closed.
        """
        if self.is_closed:
            raise EngineStoppedError("the engine has been closed")
        with self._lock:
            return list(self._members.values())

    async def ask(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """Collect the answers of all engines; those that have ended are left out.

        Raises:
            EngineStoppedError: none answers. Also the error of the first one that refuses.
        """
        answers: list[T] = []
        stopped = EngineStoppedError("no replica is there", retry_after_s=1.0)
        asked = [call(member.engine) for member in self.present()]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, EngineStoppedError):
                stopped = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers.append(answer)
        if not answers:
            raise stopped
        return answers

    async def perform(
        self, call: Call, args: tuple[Any, ...], options: dict[str, Any], part: Callable[[EngineClient], Any]
    ) -> Any:
        """Make a call that has a rule on all engines, or on a part of each, and merge the answers."""
        assert call.merge is not None, f"{call.name} has no rule for several engines"
        given = call.signature.bind(*args, **options)
        if call.divided:
            given.apply_defaults()
            num_members = max(1, len(self.present()))
            for name in call.divided:
                given.arguments[name] = max(1, given.arguments[name] // num_members)
        answers = await self.ask(lambda engine: getattr(part(engine), call.name)(*given.args, **given.kwargs))
        return call.merge(answers)

    def has(self, member: Member) -> bool:
        """Return True if an engine has not left."""
        return self._members.get(member.name) is member

    def add(self, name: str, engine: EngineClient) -> Member:
        """An engine comes. It gets no requests before `open`.

        Raises:
            ConfigError: the name is taken.
        """
        member = Member(name, engine, self._keys)
        member.replica.is_open = False
        with self._lock:
            if name in self._members:
                raise ConfigError(f"there is a replica {name} already")
            self._members[name] = member
            self._router.add(member.replica)
        return member

    def open(self, member: Member, is_open: bool) -> bool:
        """Give an engine requests, or no more; whether it gets some now, which a draining one never does."""
        with self._lock:
            member.replica.is_open = is_open and not member.is_draining
            return member.replica.is_open

    def drain(self, name: str) -> None:
        """An engine gets no more requests."""
        with self._lock:
            member = self._members.get(name)
            if member is not None:
                member.is_draining = True
                member.replica.is_open = False

    def remove(self, name: str) -> bool:
        """An engine is gone; False: it was so before."""
        with self._lock:
            member = self._members.pop(name, None)
            if member is None:
                return False
            member.replica.is_open = False
            self._router.remove(name)
            self._left = [total([*self._left, left_by(member.engine.stats())])]
            return True

    def send(
        self, token_ids: TokenIds, namespace: tuple[str, ...], session: str | None, excluded: Collection[str]
    ) -> SentRequest:
        """Choose an engine for a prompt, and charge it.

        Raises:
            EngineOverloadedError: no engine takes it.
            EngineStoppedError: they have been closed.
        """
        self.present()
        with self._lock:
            route = self._router.route(
                token_ids, time.monotonic(), namespace=namespace, session=session, excluded=excluded
            )
            member = self._members[route.replica.name]
            member.num_requests += 1
            return SentRequest(member, route)

    def computed(self, sent: SentRequest, at: float) -> None:
        """The first token of a request came at that time."""
        with self._lock:
            self._router.computed(sent.route, at)
            self._even_out()

    def _even_out(self) -> None:
        """Merge rates that differ by noise alone: else the seemingly quickest engine would get all prompts
        that are cached on no engine, and only its part of the joint memory would be used.
        """
        replicas = [member.replica for member in self._members.values()]
        rates = [replica.prefill_rate for replica in replicas]
        if rates and max(rates) < _ALIKE * min(rates):
            for replica in replicas:
                replica.prefill_rate = sum(rates) / len(rates)

    def ended(self, sent: SentRequest) -> None:
        """A request has ended, however that was."""
        with self._lock:
            self._router.ended(sent.route, time.monotonic())

    @property
    def queue_s(self) -> float:
        """Seconds until the sent prompts are computed, on average over the engines that get requests."""
        with self._lock:
            now = time.monotonic()
            queues = [
                member.replica.queue_s(now) for member in self._members.values() if not member.is_draining
            ]
            return sum(queues) / max(1, len(queues))

    def stats(self) -> EngineStats:
        """Over all that are and were there."""
        with self._lock:
            now = time.monotonic()
            stats = [*(member.engine.stats() for member in self._members.values()), *self._left]
            summed = total(stats)
            summed.replicas = tuple([member.counts(now) for member in self._members.values()])
            return summed
