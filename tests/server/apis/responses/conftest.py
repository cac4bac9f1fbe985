# SPDX-License-Identifier: Apache-2.0
"""A server with two tenants for a file's tests, and clients of one of them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from scripted_engine import Asked, ScriptedEngine
from scripted_parser import ScriptedParser

from radixkv.errors import EngineOverloadedError, RequestFailedError
from radixkv_server.chats.chat import AnswerReaders, ChatPrompt


def fail(asked: Asked, given: int) -> BaseException | None:
    last = asked.text.rpartition("user\n")[2]
    if "overload" in last:
        return EngineOverloadedError("full", retry_after_s=2)
    return RequestFailedError("broke") if "break" in last and given == 2 else None


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=4096, fail=fail)
    with live_server(engine, api_keys=("ada=key-a", "bob=key-b")) as running:
        yield running


@pytest.fixture
def ada(server: LiveServer) -> Iterator[OpenAI]:
    with server.openai("key-a") as client:
        yield client


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": "key-a"}) as client:
        yield client


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are read by a scripted parser."""
    monkeypatch.setattr(ChatPrompt, "readers", lambda _: AnswerReaders(ScriptedParser))
