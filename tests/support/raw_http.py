# SPDX-License-Identifier: Apache-2.0
"""Requests to a scripted upstream byte by byte, and what comes back of them."""

from __future__ import annotations

import socket

#: Scripts whose answers break.
ENDINGS = ("cut", "reset", "reset_head", "reset_body")


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def read_to_end(client: socket.socket) -> tuple[bytes, str]:
    """All that comes, and how it ends."""
    data = b""
    try:
        while piece := client.recv(65536):
            data += piece
    except ConnectionResetError:
        return data, "reset"
    return data, "end"


def exchange(port: int, request: bytes, go_on: bytes = b"") -> tuple[bytes, str]:
    """What comes back of a request on a connection that is closed when it is over."""
    with connect(port) as client:
        client.sendall(request)
        if go_on:
            first = client.recv(65536)
            client.sendall(go_on)
            data, how = read_to_end(client)
            return first + data, how
        return read_to_end(client)


def request_of(name: str, method: str = "POST", extra: str = "", body: bytes = b"{}") -> bytes:
    head = f"{method} /v1/{name}?a=%20b&a=c HTTP/1.1\r\nhOST: example.org\r\nX-Keep:  spaces  \r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


LAST = request_of("last_closed", "GET", "", b"")
