# SPDX-License-Identifier: Apache-2.0
"""Start an engine in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Literal

from radixkv.channel import Channel, as_sent
from radixkv.cluster.remote.engine import RemoteEngine
from radixkv.cluster.remote.host import serve_engine
from radixkv.engine.client import EngineClient
from radixkv.engine.interpreter import settle_process
from radixkv.errors import EngineStoppedError
from radixkv.helper_process import safe_helpers


def start_engine(
    make: Callable[[], EngineClient], *, method: Literal["spawn", "forkserver"] = "spawn"
) -> EngineClient:
    """Make an engine in a new process; blocks until it is ready. It ends when it is closed, or with this one.

    Args:
        make: makes the engine there; must be picklable, as a function of a module is, or a `partial` of one.
        method: how the process is started, see `multiprocessing`.

    Raises:
        EngineStoppedError: the process ended too soon; and what `make` raises.
    """
    get_context = multiprocessing.get_context
    context = get_context("spawn") if method == "spawn" else get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(make, theirs), name="radixkv-engine", daemon=True)
    with safe_helpers():
        process.start()
    theirs.close()  # so that its end is noticed
    channel = Channel(ours)
    try:
        return RemoteEngine(channel, on_close=process.join)
    except BaseException:
        channel.close()  # one that is well, but can't be understood, ends now
        process.join()
        raise


def _run(make: Callable[[], EngineClient], connection: Connection) -> None:
    """In the new process, until the connection ends."""
    channel = Channel(connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this decides when it ends
    try:
        engine = make()
    except BaseException as error:
        channel.send_object(as_sent(error, EngineStoppedError))
        return
    settle_process()
    asyncio.run(_serve(engine, channel))


async def _serve(engine: EngineClient, channel: Channel) -> None:
    try:
        await serve_engine(engine, channel)
    finally:
        await engine.close()
