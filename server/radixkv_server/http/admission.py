"""Refuses requests for which there is no room, as soon as their headers are read. A pure ASGI middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send


class AdmissionMiddleware:
    """Asks `check` about each POST to one of `routes`, before its body is read or a router looks for it.

    A flood must not hold up others, so a refusal costs a fraction of what a route does.

    Args:
        routes: with plain paths; the access log and the metrics name them.
        check: raises the answer to a request that is refused. O(1).
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], check: Callable[[], None]) -> None:
        self.app = app
        self.check = check
        self.routes = {route.path: route for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self.routes.get(scope["path"])
            if route is not None:
                scope["route"] = route
                self.check()
        await self.app(scope, receive, send)
