# SPDX-License-Identifier: Apache-2.0
"""A server whose answers a scripted parser reads, for a file's tests, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import live_server as servers
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine
from scripted_parser import ScriptedParser

from radixkv_server.apis.anthropic import parse
from radixkv_server.chats.chat import AnswerReaders, chat_request


async def request_with_readers(*args: Any, **options: Any) -> Any:
    asking, facts, _ = await chat_request(*args, **options)
    return asking, facts, AnswerReaders(ScriptedParser)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    if servers.ALWAYS_ELSEWHERE:
        pytest.skip("it changes the process that its server runs in")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parse, "chat_request", request_with_readers)
        with live_server(ScriptedEngine(), api_keys=("ada=key-a", "bob=key-b")) as running:
            yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with server.anthropic("key-a") as one:
        yield one
