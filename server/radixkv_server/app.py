# SPDX-License-Identifier: Apache-2.0
"""The server: `create_app` joins routes and middlewares, `serve` loads, listens and shuts down cleanly.

The life of a request in here:
1. `protocol` reads the headers within limits and a deadline; uvicorn starts the app.
2. `ObserveMiddleware` opens its record, `ErrorBoundary` stands ready, `HostOriginMiddleware`,
   `AuthMiddleware` and `AdmissionMiddleware` let it in or not.
3. A route hands it to `respond`, which reads the JSON strictly, within the limits of its size, and has the
   API make a `Generation` of it: engine requests of token ids and sampling parameters, and a renderer.
4. `Generation` runs them on the engine while `run_until_disconnect` watches the client.
5. The renderer makes the answer, whole or as server-sent events; the record is logged and counted.

An API is a folder under `apis`: bodies (`schemas`), `serving`, `render`, a `Dialect` for errors and framing,
routes, and an `Api` that `APIS` lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException

import radixkv
from radixkv.engine.client import EngineClient
from radixkv.engine.config import EngineConfig
from radixkv.engine.interpreter import settle_process
from radixkv_server.apis.adapters_api.routes import API as ADAPTERS_API
from radixkv_server.apis.anthropic.routes import API as ANTHROPIC_API
from radixkv_server.apis.batches_api.routes import API as BATCHES_API
from radixkv_server.apis.cache_api.routes import API as CACHE_API
from radixkv_server.apis.llama_cpp.routes import API as LLAMA_CPP_API
from radixkv_server.apis.ollama.routes import API as OLLAMA_API
from radixkv_server.apis.openai.routes import API as OPENAI_API
from radixkv_server.apis.rerank.routes import API as RERANK_API
from radixkv_server.apis.responses.conversation_routes import API as CONVERSATIONS_API
from radixkv_server.apis.responses.routes import API as RESPONSES_API
from radixkv_server.apis.rollouts_api.routes import API as ROLLOUTS_API
from radixkv_server.apis.service.routes import API as SERVICE_API
from radixkv_server.apis.sglang.routes import API as SGLANG_API
from radixkv_server.concurrency import off_loop
from radixkv_server.console.routes import console_api
from radixkv_server.context import ServerContext
from radixkv_server.dialect import Api, Dialects
from radixkv_server.http.listener import HttpServer, bind_socket, check_port_is_free, uvicorn_config
from radixkv_server.http.middleware import (
    AdmissionMiddleware,
    AuthMiddleware,
    ErrorBoundary,
    HostOriginMiddleware,
    ObserveMiddleware,
    raise_router_error,
)
from radixkv_server.openapi import add_openapi
from radixkv_server.settings import ServerSettings, make_settings
from radixkv_server.tenants.registry import TenantRegistry

logger = logging.getLogger("radixkv.server")

#: Seconds that threads get to end once the engine is closed.
STUCK_THREADS_S = 10.0

OnReady = Callable[[str, int], None]

APIS = (
    OPENAI_API,
    RESPONSES_API,
    CONVERSATIONS_API,
    ANTHROPIC_API,
    SERVICE_API,
    LLAMA_CPP_API,
    OLLAMA_API,
    RERANK_API,
    SGLANG_API,
    BATCHES_API,
    ADAPTERS_API,
    ROLLOUTS_API,
    CACHE_API,
)


def create_app(
    engine: EngineClient, settings: ServerSettings | None = None, apis: Sequence[Api] = APIS
) -> FastAPI:
    """Make an ASGI app that serves `engine`. The caller closes the engine after the app.

    Args:
        apis: APIs to serve; one of them has the dialect of `/`.

    Raises:
        ConfigError: an API key or the keys file is malformed, or a key is given to two tenants; the
            response store can't be opened.
    """
    settings = settings or ServerSettings()
    context = ServerContext.for_engine(engine, settings)
    if settings.console:
        apis = (*apis, console_api())

    app = FastAPI(
        title="radixkv",
        lifespan=lambda app: _running(app, context),
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: raise_router_error},
    )
    app.state.context = context
    for api in apis:
        app.include_router(api.router)
    add_openapi(app, apis, dialects_of(apis), radixkv.__version__)
    _add_middlewares(app, context, apis)
    return app


@contextlib.asynccontextmanager
async def _running(app: FastAPI, context: ServerContext) -> AsyncIterator[None]:
    """Run start-up work, background tasks and shutdown around the app's requests."""
    await context.tenants.apply_quotas(context.engine.cache)
    probe = asyncio.create_task(context.metrics.probe_event_loop())
    context.batches.start(app, lambda: context.is_ready)
    try:
        with reloading(context.settings, context):
            yield
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        await context.batches.close()
        context.cache_feed.close()
        context.images.close()
        await context.background.close()
        await context.responses.close()
        if context.tracing is not None:
            await off_loop(context.tracing.close)


def _add_middlewares(app: FastAPI, context: ServerContext, apis: Sequence[Api]) -> None:
    """Add the middlewares that every request passes. The last one added is the outermost."""
    settings, dialects = context.settings, dialects_of(apis)
    routes = [
        route for api in apis for route in api.router.routes if getattr(route, "path", "") in api.generating
    ]
    app.add_middleware(AdmissionMiddleware, routes=routes, check=context.check_admission)
    open_paths = frozenset[str]().union(*(api.open_paths for api in apis))
    app.add_middleware(AuthMiddleware, keys=context.tenants, open_paths=open_paths)
    app.add_middleware(
        HostOriginMiddleware,
        host=settings.host,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
    )
    app.add_middleware(ErrorBoundary, dialects=dialects)
    app.add_middleware(
        ObserveMiddleware,
        observer=context.observer,
        dialects=dialects,
    )


@contextlib.contextmanager
def reloading(settings: ServerSettings, context: ServerContext) -> Iterator[None]:
    """Reload the keys file, if there is one, at each SIGHUP while the block runs.

    Only the main thread is told of signals: on another, nothing happens.
    """
    if not _reloads_on_hangup(settings):
        yield
        return
    before = signal.getsignal(signal.SIGHUP)
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def reload() -> None:
        task = loop.create_task(context.tenants.reload(context.engine.cache))
        tasks.add(task)  # the loop itself does not hold it
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def _no_hangups(settings: ServerSettings) -> Iterator[None]:
    """Ignore SIGHUP before the server runs, if there is a keys file, instead of exiting."""
    if not _reloads_on_hangup(settings):
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _reloads_on_hangup(settings: ServerSettings) -> bool:
    return settings.keys_file is not None and threading.current_thread() is threading.main_thread()


def dialects_of(apis: Sequence[Api]) -> Dialects:
    """Return the dialects of paths."""
    return Dialects({prefix: dialect for api in apis for prefix, dialect in api.dialects.items()})


def make_server(
    engine: EngineClient,
    settings: ServerSettings,
    *,
    on_ready: OnReady | None = None,
    apis: Sequence[Api] = APIS,
) -> HttpServer:
    """Make an HTTP server of `create_app`'s app; `serve(sockets=[...])` runs it.

    Args:
        on_ready: called with host and port once requests are accepted.
    """
    app = create_app(engine, settings, apis)
    context: ServerContext = app.state.context
    config = uvicorn_config(app, settings, dialects_of(apis))
    server = HttpServer(config, settings, on_ready, on_drain=context.drain)
    server.server_state.tasks = context.tasks
    return server


def serve(
    config: EngineConfig,
    *,
    on_ready: OnReady | None = None,
    engine_factory: Callable[[EngineConfig], EngineClient] | None = None,
    **options: Any,
) -> None:
    """Load the model and serve it until SIGINT or SIGTERM.

    The port is taken before the model is loaded, so that a port in use is known at once.

    Args:
        config: the engine's settings.
        on_ready: called with host and port once requests are accepted.
        engine_factory: makes the engine; None: `AsyncEngine.from_config`.
        options: see `make_settings`.

    Raises:
        ConfigError: a setting is wrong, or the port can't be had.
        ModelLoadError: the model can't be served.
    """
    settings = make_settings(**options)
    with _no_hangups(settings), contextlib.closing(bind_socket(settings.host, settings.port)) as sock:
        if engine_factory is None:
            # Heavy: it loads torch.
            from radixkv.entrypoints.async_engine import AsyncEngine

            engine_factory = AsyncEngine.from_config
        serve_engine(engine_factory(with_tenants(config, settings)), settings, on_ready=on_ready, sock=sock)


def with_tenants(config: EngineConfig, settings: ServerSettings) -> EngineConfig:
    """Return the engine's settings for these tenants: with several, `auto` schedules fairly among them.

    Raises:
        ConfigError: the keys file can't be read or says something wrong, or its floors together exceed the
            pool, as far as the settings say how large that is.
    """
    TenantRegistry(settings).check_floors(config.num_blocks)
    if config.scheduling_policy == "auto" and settings.has_several_tenants:
        return replace(config, scheduling_policy="fair")
    return config


def serve_engine(
    engine: EngineClient,
    settings: ServerSettings,
    *,
    on_ready: OnReady | None = None,
    sock: socket.socket | None = None,
) -> None:
    """Serve a loaded engine until SIGINT or SIGTERM, finish running requests, and close the engine.

    The process is taken to serve and nothing else: see `settle_process`.

    Args:
        on_ready: called with host and port once requests are accepted.
        sock: a bound socket; None: one is bound to the settings' address.

    Raises:
        ConfigError: the port can't be had, or the floors of the keys file exceed the pool.
    """
    with contextlib.closing(sock or bind_socket(settings.host, settings.port)) as bound:
        server = make_server(engine, settings, on_ready=on_ready)
        settle_process()
        with server.handled_signals():
            asyncio.run(_serve_and_close(server, bound, engine, settings))


async def _serve_and_close(
    server: HttpServer, sock: socket.socket, engine: EngineClient, settings: ServerSettings
) -> None:
    try:
        # The app does so again at its start; here a mistake is reported as our error, not uvicorn's.
        await TenantRegistry(settings).apply_quotas(engine.cache)
        await server.serve(sockets=[sock])
    finally:
        await engine.close()
        if server.is_ending:
            _end_without_stuck_threads()


def _end_without_stuck_threads() -> None:
    """End the process soon even if a thread waits for good, for a file of a lost network share, say."""

    def end() -> None:
        logger.warning("threads still wait for the file system: the server ends without them")
        os._exit(1)

    timer = threading.Timer(STUCK_THREADS_S, end)
    timer.daemon = True
    timer.start()


__all__ = ["check_port_is_free", "create_app", "make_settings", "serve", "serve_engine", "with_tenants"]
