# SPDX-License-Identifier: Apache-2.0
"""A server with two tenants whose engine remembers prompts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(caches=True, num_blocks=4000)
    names = ("one", "two")
    with live_server(engine, api_keys=("ada=key-a", "bob=key-b"), served_model_names=names) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty_cache(server: LiveServer) -> Iterator[None]:
    """Nothing is cached, and no request is left waiting."""
    server.engine.prefix_cache.reset()
    yield
    server.engine.gate.set()
