# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server in a thread of the test process, on a free port, and raw sockets to attack it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn.server
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from radixkv_server.app import APIS, make_server
from radixkv_server.dialect import Api
from radixkv_server.http.listener import bind_socket
from radixkv_server.settings import ServerSettings

# Reading the certificates of all authorities takes each client of httpx 40 ms, more than most tests take: all
# clients share them, for addresses that begin with http://.
for _name in ("httpx", "httpx2"):
    if (_transports := sys.modules.get(f"{_name}._transports.default")) is not None:
        _transports.create_ssl_context = functools.cache(_transports.create_ssl_context)


class _Impatient:
    """asyncio for uvicorn, which looks every 0.1 s whether a server is to end and whether its answers have:
    twenty times as often here, where thousands of servers end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = _Impatient()  # type: ignore[attr-defined]


@dataclass
class LiveServer:
    """A running server and ways to talk to it."""

    port: int
    engine: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def openai(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def async_openai(self, key: str = "none") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def anthropic(self, key: str = "none", **options: Any) -> Anthropic:
        return Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=60, **options)

    def async_anthropic(self, key: str = "none") -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)


def raw_request(path: str, body: Any, *, method: str = "POST") -> bytes:
    """An HTTP/1.1 request as bytes."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    return data


#: Set by `pytest --server-process`: every server runs in another process than its engine.
ALWAYS_ELSEWHERE = False


@contextlib.contextmanager
def live_server(
    engine: Any, *, apis: Sequence[Api] = APIS, port: int = 0, elsewhere: bool = False, **options: Any
) -> Iterator[LiveServer]:
    """Serve `engine` while the block runs; the server has ended when it is left.

    Args:
        port: 0: a free one.
        elsewhere: in another process, which asks for everything over a connection.
    """
    settings = ServerSettings(port=0, **{"shutdown_grace_s": 5, "access_log": False, **options})
    if elsewhere or ALWAYS_ELSEWHERE:
        if apis is not APIS:
            pytest.skip("its routes are made in this process")
        from engine_process import server_elsewhere

        sock = bind_socket("127.0.0.1", port)
        with sock, server_elsewhere(engine, sock, settings):
            try:
                yield LiveServer(sock.getsockname()[1], engine)
            finally:
                if hasattr(engine, "release"):
                    engine.release()
        return
    sock = bind_socket("127.0.0.1", port)
    ready = threading.Event()
    server = make_server(engine, settings, on_ready=lambda host, port: ready.set(), apis=apis)

    def run() -> None:
        asyncio.run(server.serve(sockets=[sock]))

    thread = threading.Thread(target=run, name="live-server")
    thread.start()
    try:
        assert ready.wait(120), "the server did not start"
        yield LiveServer(sock.getsockname()[1], engine)
    finally:
        if hasattr(engine, "release"):
            engine.release()
        server.should_exit = True
        thread.join(120)
        sock.close()
        assert not thread.is_alive(), "the server did not stop"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat completion: one message of the user's, and further fields."""
    return {"messages": [{"role": "user", "content": text}], **fields}
