# SPDX-License-Identifier: Apache-2.0
"""HttpServer: listening sockets, uvicorn's settings, readiness and signals."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from radixkv.errors import ConfigError
from radixkv_server.dialect import Dialects
from radixkv_server.http.protocol import MAX_UNSENT_BYTES, guarded_protocol
from radixkv_server.http.websocket import guarded_socket
from radixkv_server.settings import ServerSettings

logger = logging.getLogger("radixkv.server")

BACKLOG = 2048


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket to the address, without listening yet.

    Raises:
        ConfigError: the name can't be resolved, or the address is in use, forbidden or not ours.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the host {host!r} can't be resolved: {reason} (flag --host)") from None
    # A name may stand for an IPv6 and an IPv4 address: clients that get only one listen to expect IPv4.
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, proto)
    # Connections inherit it. The kernel's own choice would be megabytes, thousands of tokens, for a client
    # that reads nothing.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_UNSENT_BYTES)
    try:
        if os.name == "posix":
            # Allows a restart while old connections linger; a socket that listens still conflicts.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise bind_error(host, port, error) from None
    return sock


def check_port_is_free(host: str, port: int) -> None:
    """Check, before a model is loaded, that a port is free.

    Raises:
        ConfigError: see `bind_socket`.
    """
    bind_socket(host, port).close()


def bind_error(host: str, port: int, error: OSError) -> ConfigError:
    """Describe the fault of the address, and the flag that changes it."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use by another program; stop that one, or choose another port "
            "with --port (0 picks a free one)"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"no permission to listen on port {port}; choose one above 1023 with --port")
    reason = error.strerror or str(error)
    return ConfigError(f"can't listen on {host} port {port}: {reason} (flags --host and --port)")


def uvicorn_config(app: ASGIApp, settings: ServerSettings, dialects: Dialects) -> uvicorn.Config:
    """Make uvicorn's settings for `app`: our protocols and limits, our access log instead of its own."""
    return uvicorn.Config(
        app,
        http=guarded_protocol(settings, dialects),
        ws=guarded_socket(settings),
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,  # a small frame could be a bomb
        ws_ping_interval=settings.ping_interval_s,
        ws_ping_timeout=settings.slow_client_timeout_s,
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=_whole_seconds(settings.shutdown_grace_s),
        h11_max_incomplete_event_size=settings.max_header_bytes,
    )


def _whole_seconds(seconds: float) -> int:
    return max(0, round(seconds))


class HttpServer(uvicorn.Server):
    """uvicorn's server that reports when it listens and ends quietly on a signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        settings: ServerSettings,
        on_ready: Callable[[str, int], None] | None = None,
        on_drain: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._on_drain = on_drain
        self._ends_at: float | None = None
        self._settings = settings
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "bind_socket gives the socket"
        try:
            await super().startup(sockets=sockets)
        except OSError as error:
            # Two servers can bind at the same time; the second one to listen learns it here.
            await self.lifespan.shutdown()
            port = sockets[0].getsockname()[1]
            raise bind_error(self._settings.host, port, error) from None
        if self.started and self._on_ready is not None:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(host, port)

    async def on_tick(self, counter: int) -> bool:
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets=sockets)
        if self.force_exit:
            # uvicorn would leave the app's lifespan to be cancelled, which is logged with a traceback.
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: `handled_signals` has set the handlers, and does not raise the signals again."""
        yield

    @contextlib.contextmanager
    def handled_signals(self) -> Iterator[None]:
        """Turn signals into a graceful shutdown; a second one of any kind exits at once.

        uvicorn raises a captured signal again when it has finished, so that a supervisor would see a
        process that was killed. Here a graceful end is a normal return.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def is_ending(self) -> bool:
        """True once a signal has asked the process to end."""
        return self._ends_at is not None

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._ends_at is not None:
            self.should_exit = self.force_exit = True
            return
        # Whoever stops it by hand need not wait for a load balancer.
        delay = self._settings.shutdown_delay_s if number == signal.SIGTERM else 0.0
        self._ends_at = time.monotonic() + delay
        if self._on_drain is not None:
            self._on_drain()
        running = len(self.server_state.tasks)
        if running:
            grace = self._settings.shutdown_grace_s
            name = signal.Signals(number).name
            print(
                f"{name}: finishing {running} request(s), at most {grace:g} s; again to stop at once",
                file=sys.stderr,
            )
