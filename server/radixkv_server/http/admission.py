# SPDX-License-Identifier: Apache-2.0
"""AdmissionMiddleware: refuse requests without room for them as soon as their headers are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send


class AdmissionMiddleware:
    """Calls `check` for each POST to one of `routes`, before its body is read or a router looks for it.

    A flood must not hold up other requests: a refusal here costs a fraction of a route's work.

    Args:
        routes: with plain paths; the access log and the metrics name them.
        check: raises the error that refuses a request. O(1).
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
