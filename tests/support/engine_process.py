# SPDX-License-Identifier: Apache-2.0
"""Engines and servers in processes of their own, for tests; one starts in a tenth of a second.

An engine over the paged model runs elsewhere and its tests here. Server tests hold and look at their engine:
it stays here, and the server runs elsewhere. What goes between the two is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from paged_language_model import LetterTokenizer, make_engine

from radixkv.channel import Channel
from radixkv.cluster.remote.engine import RemoteEngine
from radixkv.cluster.remote.host import serve_engine
from radixkv.cluster.remote.process import start_engine
from radixkv.engine.client import EngineClient
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv_server.app import make_server
from radixkv_server.settings import ServerSettings

# What takes seconds to import is imported once, in the process that the others are copies of.
multiprocessing.set_forkserver_preload(
    [
        "radixkv.entrypoints.async_engine",
        "radixkv.cluster.remote.process",
        "radixkv.model.device_paths",
        "radixkv_server.app",
    ]
)


def paged_engine(**options: Any) -> AsyncEngine:
    """An engine over the paged model, with text."""
    return AsyncEngine(make_engine(tokenizer=LetterTokenizer(), **options)[0])


def paged_engine_elsewhere(**options: Any) -> EngineClient:
    """The same in another process."""
    return start_engine(partial(paged_engine, **options), method="forkserver")


@contextlib.asynccontextmanager
async def served_in_a_thread(
    engine: EngineClient, *, max_bytes: int | None = None
) -> AsyncIterator[EngineClient]:
    """A client of an engine that a thread serves over a pipe; closed with it."""
    ours, theirs = multiprocessing.Pipe()
    host = threading.Thread(
        target=lambda: asyncio.run(serve_engine(engine, Channel(theirs, max_bytes=max_bytes)))
    )
    host.start()
    client = await asyncio.to_thread(RemoteEngine, Channel(ours, max_bytes=max_bytes))
    try:
        yield client
    finally:
        await client.close()
        await asyncio.to_thread(host.join, 60)
        assert not host.is_alive()


@contextlib.contextmanager
def server_elsewhere(engine: EngineClient, sock: socket.socket, settings: ServerSettings) -> Iterator[None]:
    """An HTTP server of `engine` in another process, on this socket, until the block is left."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    ready, go_on = context.Event(), context.Event()
    process = context.Process(target=_serve, args=(theirs, sock, settings, ready, go_on), daemon=True)
    host = threading.Thread(
        target=lambda: asyncio.run(serve_engine(engine, Channel(ours))), name="engine-host"
    )
    process.start()
    theirs.close()
    host.start()
    try:
        assert ready.wait(120), "the server did not start"
        yield
    finally:
        go_on.set()
        process.join(120)
        host.join(120)
        assert process.exitcode == 0, "the server did not stop"
        assert not host.is_alive(), "the server's end was not noticed"


def _serve(
    connection: Connection, sock: socket.socket, settings: ServerSettings, ready: Event, go_on: Event
) -> None:
    server = make_server(RemoteEngine(Channel(connection)), settings, on_ready=lambda host, port: ready.set())

    def end() -> None:
        go_on.wait()
        server.should_exit = True

    threading.Thread(target=end, daemon=True).start()
    asyncio.run(server.serve(sockets=[sock]))
