# SPDX-License-Identifier: Apache-2.0
"""The console of a proxy: the page of the servers' console, and the read-only routes that it uses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from radixkv.observe.audit.prices import Prices
from radixkv_server.console.routes import PAGE, StaticFile, static_files
from radixkv_server.dialect import Json, dump
from radixkv_server.proxy.views import Views
from radixkv_server.proxy.watched import KEPT_REQUESTS, Watched

LOOK_S = 0.5  # how often a stream looks for what has changed
_VIEWS = b'<body data-views="overview tree requests">'  # those that need no model


def _page_files() -> list[StaticFile]:
    """Return the page's files, with the list of a proxy's views in the page."""
    page = next(file for file in static_files() if file.path == "/")
    return [
        StaticFile.of(PAGE, page.body.replace(b"<body>", _VIEWS, 1)),
        *(file for file in static_files() if file.path != "/"),
    ]


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, "")
    return min(most, max(1, int(text))) if text.isdecimal() and len(text) < 10 else default


def make_app(watched: Watched, prices: Prices | None, host: str) -> FastAPI:
    """Make the routes. Host names other than loopback's and the host's are refused, against foreign pages."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(
        TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", host], www_redirect=False
    )
    views = Views(watched, prices)
    for file in _page_files():
        app.add_api_route(file.path, file.answer, methods=["GET", "HEAD"])

    @app.get("/v1/cache")
    async def overview() -> Response:
        return _json(await asyncio.to_thread(views.overview))

    @app.get("/v1/cache/requests")
    async def requests(request: Request) -> Response:
        limit = _number(request, "limit", KEPT_REQUESTS, KEPT_REQUESTS)
        if "text/event-stream" in request.headers.get("accept", ""):
            return StreamingResponse(_frames(watched, views, limit), media_type="text/event-stream")
        data = await asyncio.to_thread(views.requests, limit)
        return _json({"object": "list", "data": data})

    @app.get("/v1/cache/requests/{name}")
    async def request(name: str) -> Response:
        found = await asyncio.to_thread(views.request, name)
        if found is not None:
            return _json(found)
        return _error(404, "No such request is among the latest ones.", "request_not_found")

    @app.get("/v1/cache/tree")
    async def tree(request: Request) -> Response:
        limit = _number(request, "limit", 200, 2000)
        search = request.query_params.get("search")
        if search is None:
            depth = _number(request, "depth", 1000, 1000)
            return _json(await asyncio.to_thread(views.tree, limit, depth))
        if not 1 <= len(search) <= 200:
            return _error(400, "search must have 1 to 200 characters.", "invalid_value")
        return _json(await asyncio.to_thread(views.search, search, limit))

    @app.get("/v1/cache/advice")
    async def advice(request: Request) -> Response:
        data = await asyncio.to_thread(views.advice, _number(request, "limit", 10, 100))
        return _json({"object": "list", "data": data})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(views.metrics), media_type="text/plain; version=0.0.4")

    return app


async def _frames(watched: Watched, views: Views, limit: int) -> AsyncIterator[bytes]:
    version = watched.version
    yield _frame("snapshot", views.requests(limit))
    while True:
        if watched.version != version:
            changed, version = views.requests(limit, after=version), watched.version
            yield _frame("requests", changed)
        await asyncio.sleep(LOOK_S)


def _frame(event: str, requests: list[Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), dump({"requests": requests}))


def _json(value: Json, status: int = 200) -> Response:
    return Response(dump(value), status, media_type="application/json")


def _error(status: int, message: str, code: str) -> Response:
    return _json({"error": {"message": message, "code": code}}, status)


def start_console(watched: Watched, prices: Prices | None, host: str, port: int) -> None:
    """Serve the console from a thread of its own, until the process ends."""
    app = make_app(watched, prices, host)
    config = uvicorn.Config(app, host=host, port=port, log_level="error", lifespan="off")
    threading.Thread(target=uvicorn.Server(config).run, name="console", daemon=True).start()
