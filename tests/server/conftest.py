# SPDX-License-Identifier: Apache-2.0
"""A scripted engine and a server of it, new for each test that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(engine: ScriptedEngine) -> Iterator[LiveServer]:
    with live_server(engine) as running:
        yield running
