# SPDX-License-Identifier: Apache-2.0
"""Background requests: the server's own, made to its own app in the name of a tenant, for work that can wait.

They need no key and count for no limit of the tenant's, and the engine computes them behind all others. A
client can't make one: they are marked in the scope of a request, where only code of this process writes.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv_server.tenants.tenant import Tenant

_CALLER = "radixkv.background_caller"


def background_caller(scope: MutableMapping[str, Any]) -> Tenant | None:
    """Return the tenant in whose name the server itself asks; None: the request is a client's."""
    caller = scope.get(_CALLER)
    assert caller is None or isinstance(caller, Tenant)
    return caller


def background_client(app: ASGIApp, tenant: Tenant) -> httpx.AsyncClient:
    """Make a client of the app, in this process, whose requests are the tenant's background requests."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, _CALLER: tenant}, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(marked), base_url="http://127.0.0.1", timeout=None)
