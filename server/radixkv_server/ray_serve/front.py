# SPDX-License-Identifier: Apache-2.0
"""Front: the ingress on Ray Serve, which is the single server's app over all replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from concurrent.futures import Future
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from radixkv.cluster.loop_thread import LoopThread
from radixkv.cluster.remote.tcp import connect_to
from radixkv.cluster.replicas.engine import ReplicatedEngine
from radixkv_server.app import create_app
from radixkv_server.log_format import configure_logging
from radixkv_server.ray_serve.directory import watch
from radixkv_server.settings import ServerSettings

logger = logging.getLogger("radixkv.server")

#: Seconds between two words to the replicas about how long prompts wait.
TELL_S = 1.0
_AGAIN_S = 1.0

#: The app of the front that is being made; Ray Serve asks a function for it.
_APP: ContextVar[Any] = ContextVar("radixkv_front_app")


def made_app() -> Any:
    """Return the app that the `Front` has just made."""
    return _APP.get()


class Front:
    """Front, complete once the first replica is available.

    Args:
        engines: the handle of the engines' deployment.
    """

    def __init__(self, engines: Any, settings: ServerSettings) -> None:
        configure_logging(settings.log_format, settings.log_level)
        self._thread = LoopThread("radixkv-front")
        self._joining = Joining(engines)
        self._thread.start(self._joining.keep_up())
        engine = self._joining.engine()
        self._thread.start(self._joining.tell_queues())
        _APP.set(_Served(create_app(engine, settings)))

    async def __del__(self) -> None:
        """Close after Ray Serve has drained it."""
        await asyncio.to_thread(self._thread.stop)
        await self._joining.engine().close()


class _Served:
    """App without a list of routes, as Ray Serve can't read all kinds of them."""

    routes = ()
    router = SimpleNamespace(redirect_slashes=False)

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.add_exception_handler = app.add_exception_handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class Joining:
    """Connections to the replicas that Ray Serve lists, closed once they are no longer listed."""

    def __init__(self, engines: Any) -> None:
        self._engines = engines
        self._name = uuid.uuid4().hex[:8]
        self._made: Future[ReplicatedEngine] = Future()
        self._names: frozenset[str] = frozenset()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def engine(self) -> ReplicatedEngine:
        """Return an engine client over all replicas; waits for the first."""
        return self._made.result()

    async def keep_up(self) -> None:
        """Follow the list of replicas until cancelled."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def take(names: frozenset[str]) -> None:
            self._names = names
            loop.call_soon_threadsafe(changed.set)

        watch(f"{self._engines.app_name}#{self._engines.deployment_name}", take)
        await self._engines.name.remote()  # the first call of all has Ray Serve find the replicas
        while True:
            await changed.wait()
            changed.clear()
            for name in self._names - self._tasks.keys():
                self._tasks[name] = asyncio.ensure_future(self._attend(name))
            for name in [
                name for name in self._tasks if self._tasks[name].done() and name not in self._names
            ]:
                del self._tasks[name]
            if self._made.done():
                for name in set(self._made.result().names) - self._names:
                    self._made.result().drain(name)

    async def _attend(self, name: str) -> None:
        """Serve with a replica until Ray Serve no longer lists it."""
        while name in self._names:
            try:
                await self._join(name)
            except Exception as error:  # it has died, or is about to; or Ray can't be asked now
                logger.info("the replica %s: %s", name, str(error).splitlines()[0] if str(error) else error)
            if self._made.done() and name not in self._names:
                break
            await asyncio.sleep(_AGAIN_S)

    async def _join(self, name: str) -> None:
        addresses = self._engines.options(stream=True).attach.remote(replica=name)
        try:
            async for address in addresses:
                engine = await asyncio.to_thread(connect_to, address)
                if self._made.done():
                    self._made.result().add(name, engine)
                else:
                    self._made.set_result(ReplicatedEngine({name: engine}))
                logger.info("the replica %s has joined", name)
        finally:
            # Drained ones have left by now; others are gone.
            if self._made.done():
                self._made.result().remove(name)

    async def tell_queues(self) -> None:
        """Report the waiting time of prompts to the replicas, for Ray Serve's autoscaler, until cancelled."""
        engine = self._made.result()
        while True:
            await asyncio.sleep(TELL_S)
            for member in engine.stats().replicas:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(
                        self._engines.note_queue.remote(self._name, member.queue_s, replica=member.name),
                        TELL_S,
                    )
