# SPDX-License-Identifier: Apache-2.0
"""Fleet: several upstreams of a proxy, with their states and cached blocks, and the choice among them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from radixkv.cluster.events.block_keys import BlockKeys
from radixkv.cluster.events.follower import Follower
from radixkv.cluster.events.spec import EventsSpec, parse_events
from radixkv.cluster.routing.learned_blocks import LearnedBlocks
from radixkv.cluster.routing.replica import Replica
from radixkv.cluster.routing.router import Route, Router
from radixkv.entrypoints.extras import install_command
from radixkv.errors import ConfigError
from radixkv_server.proxy.fleet_state import Choice, Health, UpstreamState
from radixkv_server.proxy.routed_prompt import PromptReader, RoutedPrompt
from radixkv_server.proxy.upstream import Upstream

if TYPE_CHECKING:
    from radixkv.cluster.events.subscriber import Subscriber

logger = logging.getLogger(__name__)

#: Seconds between two looks at an upstream's health (the latter: after a request failed), and that it may
#: take to answer.
HEALTH_S = 1.0
_HEALTH_TIMEOUT_S = 2.0
MIN_HEALTH_S = 0.1
# httpx walks all connections of its pool for each request.
_LIMITS = httpx.Limits(max_connections=64, max_keepalive_connections=8)
# Text pieces per block, where an upstream tells no events.
_LEARNED_BLOCK = 16
#: Names of answers whose upstream is remembered.
MAX_NAMES = 100_000


@dataclass(frozen=True, slots=True)
class FleetMember:
    """An `--upstream` among several."""

    upstream: Upstream
    events: EventsSpec | None = None

    @classmethod
    def parse(cls, text: str) -> FleetMember:
        """Parse `URL[,events=tcp://HOST:PORT[,OPTION=VALUE...]]`.

        Raises:
            ConfigError: not of that form.
        """
        url, separator, events = text.partition(",events=")
        if "," in url:
            raise ConfigError(
                f"--upstream {text[:200]!r}: after the URL only ,events=tcp://HOST:PORT can follow"
            )
        return cls(Upstream.parse(url), parse_events(events, reads=True) if separator else None)


class _Member:
    """Upstream of a running proxy."""

    def __init__(self, member: FleetMember) -> None:
        self.upstream = member.upstream
        self.events = member.events
        self.address = str(member.upstream)
        self.replica = Replica(self.address, block_size=_LEARNED_BLOCK)
        self.follower: Follower | None = None
        self.learned = LearnedBlocks(self.replica) if member.events is None else None
        self.health: Health = "healthy"
        self.look_now = asyncio.Event()  # at its health

    def state(self, now: float) -> UpstreamState:
        """Return the upstream's state now."""
        replica = self.replica
        return UpstreamState(
            self.address,
            self.health,
            "guess" if self.follower is None else "exact" if self.follower.is_exact else "incomplete",
            replica.num_blocks,
            round(replica.queue_s(now), 4),
            replica.num_running,
            round(replica.prefill_rate, 1),
        )


@dataclass(eq=False, slots=True)
class Sent:
    """Request sent to an upstream, with its accounting."""

    fleet: Fleet
    member: _Member
    prompt: RoutedPrompt
    route: Route
    choice: Choice

    def is_elsewhere(self, status: int) -> bool:
        """Tell whether, by an answer's status, another upstream may serve the request."""
        return status == 503 or (status == 404 and bool(self.prompt.goes_on_from))

    def keeps(self, name: str) -> None:
        """Note an answer's id: requests that continue it go to the same upstream."""
        self.fleet.remember(name, self.member.address)

    def begun(self) -> None:
        """Note the first byte of the answer's body: the prompt is computed."""
        Router.computed(self.route, time.monotonic())
        if self.member.learned is not None and self.prompt.num_units:
            self.member.learned.computed(self.prompt.blocks)

    def ended(self, share: float | None = None) -> None:
        """Note the end of the answer. Called once.

        Args:
            share: cached share of its prompt, if the answer reports it.
        """
        Router.ended(self.route, time.monotonic())
        learned, blocks = self.member.learned, self.prompt.blocks
        if share is not None and learned is not None and self.prompt.num_units:
            learned.reported(blocks, self.route.found.resident, share)


class Fleet:
    """Upstreams of a proxy: chooses one per request, follows their events and checks their health."""

    def __init__(self, members: Sequence[FleetMember]) -> None:
        stream_secrets = [
            member.events.secret for member in members if member.events and member.events.secret
        ]
        if len(set(stream_secrets)) > 1:
            raise ConfigError("--upstream: the secrets of all events must be the same")
        if any(member.events for member in members):
            try:  # optional: the extra `events`
                import radixkv.cluster.events.subscriber  # noqa: F401
            except ImportError as error:
                raise ConfigError(f"--upstream ...,events=: {error}; {install_command('events')}") from None
        self._keys = BlockKeys(stream_secrets[0] if stream_secrets else secrets.token_bytes(32))
        self._router = Router(self._keys)
        self._members = {str(member.upstream): _Member(member) for member in members}
        if len(self._members) < len(members):
            raise ConfigError("--upstream: one of them is given twice")
        for member in self._members.values():
            self._router.add(member.replica)
        # Name of an answer -> address of its upstream, the latest last.
        self._keepers: OrderedDict[str, str] = OrderedDict()
        self._client = httpx.AsyncClient(trust_env=False, limits=_LIMITS)
        learns = any(member.learned is not None for member in self._members.values())
        self._reader = PromptReader(self._client, self._router.prompt, _LEARNED_BLOCK if learns else 0)

    def __str__(self) -> str:
        return ", ".join(self._members)

    @property
    def addresses(self) -> Collection[str]:
        """Addresses of all upstreams."""
        return self._members.keys()

    @property
    def host(self) -> str:
        """Host of the first upstream; all are of the same kind."""
        return next(iter(self._members.values())).upstream.host

    async def run(self) -> None:
        """Follow events and check health until cancelled."""
        subscriber = self._subscribe()
        try:
            async with self._client, asyncio.TaskGroup() as group:
                for member in self._members.values():
                    group.create_task(self._watch(member))
        finally:
            self._reader.close()
            if subscriber is not None:
                subscriber.close()

    def _subscribe(self) -> Subscriber | None:
        streams = {}
        for member in self._members.values():
            if member.events is not None:
                member.follower = Follower(self._keys, member.replica)
                streams[member.address] = (member.events, member.follower)
        if not streams:
            return None
        from radixkv.cluster.events.subscriber import Subscriber  # optional: the extra `events`

        return Subscriber(streams)

    async def _watch(self, member: _Member) -> None:
        while True:
            try:
                member.health = await self._health(member)
            except Exception:  # of this look alone
                logger.exception("the health of %s can't be seen", member.address)
                member.health = "failed"
            is_well = member.health == "healthy"
            if is_well != member.replica.is_open:
                logger.warning("%s %s", member.address, "is back" if is_well else "takes no requests")
                if is_well and member.learned is not None:
                    member.learned.forget()
                if is_well:
                    self._reader.forget(member.address)
                member.replica.is_open = is_well
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(member.look_now.wait(), HEALTH_S)
                await asyncio.sleep(MIN_HEALTH_S)
            member.look_now.clear()

    async def _health(self, member: _Member) -> Health:
        """Check whether an upstream takes requests; during its shutdown it answers health checks with 503."""
        for path in ("/health/ready", "/health"):
            try:
                answer = await self._client.get(member.address + path, timeout=_HEALTH_TIMEOUT_S)
            except httpx.HTTPError:
                return "failed"
            if answer.status_code not in (401, 403, 404, 405):
                if answer.status_code == 503:
                    return "draining"
                return "failed" if answer.status_code >= 500 else "healthy"
        return "healthy"  # it has no such route, and answers

    def states(self) -> list[UpstreamState]:
        """Return the states of all upstreams."""
        now = time.monotonic()
        return [member.state(now) for member in self._members.values()]

    # ------------------------------------------------------------------ requests

    async def read(self, path: str, headers: dict[str, str], body: bytes | bytearray) -> RoutedPrompt:
        """Return the prompt of a request."""
        tokenizers = [
            member.address
            for member in self._members.values()
            if member.events is not None and member.replica.is_open
        ]
        return await self._reader.read(path, headers, body, tokenizers)

    def send(self, prompt: RoutedPrompt, excluded: Collection[str], failed: Sequence[str] = ()) -> Sent:
        """Choose an upstream for a request.

        Args:
            excluded: addresses of upstreams that can't take it.
            failed: addresses of upstreams that failed with it.

        Raises:
            EngineOverloadedError: no upstream is left.
        """
        for member in self._members.values():
            if member.follower is not None and member.follower.block_size:
                member.replica.block_size = member.follower.block_size
                member.replica.keeps_prefixes = member.follower.has_heartbeat
        keeper = self._keeper(prompt, excluded)
        route = self._router.route_prompt(
            prompt.blocks,
            time.monotonic(),
            session=prompt.session,
            excluded=excluded if keeper is None else self._members.keys() - {keeper},
            tells_first_token=prompt.streams,
        )
        member = self._members[route.replica.name]
        choice = Choice(
            route.reason if keeper is None else "keeps",
            prompt.is_exact,
            prompt.num_units,
            route.found.resident,
            route.found.expected,
            round(route.queue_s, 4),
            tuple(failed),
        )
        return Sent(self, member, prompt, route, choice)

    def _keeper(self, prompt: RoutedPrompt, excluded: Collection[str]) -> str | None:
        """Return the upstream that stores a request's conversation, if it is known and takes requests."""
        kept_by = next((self._keepers[name] for name in prompt.goes_on_from if name in self._keepers), None)
        if kept_by is None or kept_by in excluded or not self._members[kept_by].replica.is_open:
            return None
        return kept_by

    def remember(self, name: str, address: str) -> None:
        """Note an upstream's answer of this name, which it may store."""
        self._keepers[name] = address
        self._keepers.move_to_end(name)
        if len(self._keepers) > MAX_NAMES:
            self._keepers.popitem(last=False)

    def has_others(self, tried: Collection[str]) -> bool:
        """Tell whether another upstream beside these takes requests."""
        return any(
            member.replica.is_open for address, member in self._members.items() if address not in tried
        )

    def failed(self, sent: Sent) -> None:
        """Note an upstream's failure: it gets no requests until a health check succeeds, if others do."""
        member = sent.member
        if member.replica.is_open and self.has_others({member.address}):
            logger.warning("%s failed at a request", member.address)
            member.replica.is_open = False
            member.health = "failed"
        member.look_now.set()
