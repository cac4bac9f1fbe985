# SPDX-License-Identifier: Apache-2.0
"""A server whose answers a scripted parser reads, for a file's tests, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import live_server as servers
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine
from scripted_parser import ScriptedParser

from radixkv_server.chats.chat import AnswerReaders, ChatPrompt


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    if servers.ALWAYS_ELSEWHERE:
        pytest.skip("it changes the process that its server runs in")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatPrompt, "readers", lambda _: AnswerReaders(ScriptedParser))
        with live_server(ScriptedEngine(), api_keys=("ada=key-a", "bob=key-b")) as running:
            yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with server.anthropic("key-a") as one:
        yield one
