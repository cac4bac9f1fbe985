# SPDX-License-Identifier: Apache-2.0
"""A server with two tenants for a file's tests, and clients of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from scripted_engine import Asked, ScriptedEngine
from scripted_parser import ScriptedParser

from radixkv.errors import EngineOverloadedError, RequestFailedError
from radixkv.scheduling.request import Request
from radixkv_server.apis.responses import parse
from radixkv_server.chats.chat import AnswerReaders, chat_request
from radixkv_server.generation.request import PromptFacts


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

    async def request_with_readers(*args: Any, **options: Any) -> tuple[Request, PromptFacts, AnswerReaders]:
        request, facts, _ = await chat_request(*args, **options)
        return request, facts, AnswerReaders(ScriptedParser)

    monkeypatch.setattr(parse, "chat_request", request_with_readers)
