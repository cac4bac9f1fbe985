# SPDX-License-Identifier: Apache-2.0
"""Main function of the proxy: listens for clients, and gives each a relay."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.errors import ConfigError
from radixkv_server.proxy.connections import ClientSide, refusal
from radixkv_server.proxy.feed import Feed
from radixkv_server.proxy.fleet import Fleet
from radixkv_server.proxy.observer import ObserverSettings
from radixkv_server.proxy.passage import Passage, RelaySettings
from radixkv_server.proxy.relay import Relay
from radixkv_server.proxy.routed_relay import RoutedRelay
from radixkv_server.proxy.upstream import READ_BYTES, Upstream

STATES_S = 0.5  # between two reports of the upstreams' states
MAX_WAITING_BYTES = 256 * 1024 * 1024  # for the observer
MAX_CONNECTIONS = 4096
_TOO_MANY = refusal(
    503,
    b"Service Unavailable",
    b"too many connections; try again later",
    b"proxy_error",
    b"Retry-After: 1\r\n",
)


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Settings of the proxy.

    Attributes:
        upstream: address of the upstream; several form a fleet, which chooses.
        max_body_bytes: longest request body; longer ones are refused; None: any length.
        max_kept_bytes: longest body to pass to the observer.
        max_connections: most connections of clients; more are refused.
    """

    upstream: Upstream | Fleet
    host: str
    port: int
    max_body_bytes: int | None
    max_kept_bytes: int
    max_connections: int = MAX_CONNECTIONS


async def serve(
    settings: ProxySettings,
    observing: ObserverSettings,
    on_ready: Callable[[int], None],
    *,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, or `stop`.

    Args:
        on_ready: called with the port once it is open.

    Raises:
        ConfigError: the port can't be had.
    """
    feed = Feed(observing, MAX_WAITING_BYTES)
    is_needed = observing.is_needed
    relaying = RelaySettings(
        on_begin=feed.begin if observing.console_port is not None else _pass_over,
        on_passage=feed.put if is_needed else _pass_over,
        max_body_bytes=settings.max_body_bytes,
        max_kept_bytes=settings.max_kept_bytes if is_needed else 0,
    )
    connections: set[asyncio.Task[None]] = set()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        client, upstream = ClientSide(reader, writer), settings.upstream
        try:
            if len(connections) > settings.max_connections:
                await client.refuse(_TOO_MANY)
            elif isinstance(upstream, Fleet):
                await RoutedRelay(upstream, client, relaying).run()
            else:
                await Relay(upstream, client, relaying).run()
        except asyncio.CancelledError:
            pass  # the proxy ends
        finally:
            client.close()
            connections.discard(task)

    stopped = stop or asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # another thread's, or Windows
            asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    try:
        server = await asyncio.start_server(
            join, settings.host, settings.port, limit=READ_BYTES, backlog=1024
        )
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or error
        raise ConfigError(f"can't listen on {settings.host}:{settings.port}: {reason}") from error
    beside = [asyncio.create_task(feed.run())] if is_needed else []
    if isinstance(settings.upstream, Fleet):
        beside.append(asyncio.create_task(settings.upstream.run()))
        beside.append(asyncio.create_task(_tell_states(settings.upstream, feed)))
    gc.freeze()  # what is here stays: collections, which hold up all streams, need not look at it
    on_ready(server.sockets[0].getsockname()[1])
    try:
        await stopped.wait()
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


def _pass_over(passage: Passage) -> None:
    """Ignore a passage, where nothing is recorded or shown."""


async def _tell_states(fleet: Fleet, feed: Feed) -> None:
    """Pass the states of upstreams to the console, again and again."""
    while True:
        feed.put_states(fleet.states())
        await asyncio.sleep(STATES_S)
