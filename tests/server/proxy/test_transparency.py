# SPDX-License-Identifier: Apache-2.0
"""What goes through the proxy is what goes without it: every byte both ways, and how it ends."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from raw_http import ENDINGS, LAST, connect, exchange, read_to_end, request_of
from running_proxy import RunningProxy, running_proxy
from scripted_upstream import CHUNKED, SCRIPTS, ScriptedUpstream, chunk, scripted_upstream

NOT_ALONE = ("websocket", "hang", "endless", "endless_huge", "two_parts", "head", "after_end", "last_ended")


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with scripted_upstream() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(upstream: ScriptedUpstream) -> Iterator[RunningProxy]:
    with running_proxy(f"http://127.0.0.1:{upstream.port}") as running:
        yield running


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NOT_ALONE])
def test_answers_come_as_without_it(name: str, upstream: ScriptedUpstream, proxy: RunningProxy) -> None:
    request, go_on = request_of(name), b""
    if not name.startswith("last_") and name not in ENDINGS:
        request += LAST  # pipelined: answered in order, after which the connection ends
    if name in ("reset_head", "reset_body"):
        go_on = LAST
    direct = exchange(upstream.port, request, go_on)
    assert exchange(proxy.port, request, go_on) == direct
    if name in ("reset", "reset_head", "reset_body"):
        assert direct[1] == "reset"


@pytest.mark.parametrize(
    "request_bytes",
    [
        request_of("length", extra="Authorization: Bearer sk-0123456789\r\nAccept-Encoding: gzip, br\r\n"),
        request_of("length", "OPTIONS", "Cookie: a=b; c=d\r\nX-Twice: 1\r\nx-twice: 2\r\n", b""),
        request_of("length", "PUT", "Expect: 100-continue\r\n", b"x" * 300_000),
        request_of("length", body=bytes(range(256)) * 50),
        b"DELETE /v1/length HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"5;name=value\r\nhello\r\n0A\r\n0123456789\r\n0\r\n\r\n",
        b"GET /v1/length HTTP/1.1\r\nHost: e\r\nX-Long: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HEAD /v1/head HTTP/1.1\r\nHost: e\r\n\r\n",
    ],
)
def test_requests_arrive_as_they_were_sent(
    request_bytes: bytes, upstream: ScriptedUpstream, proxy: RunningProxy
) -> None:
    direct = exchange(upstream.port, request_bytes + LAST)
    sent = upstream.received[-2:]
    assert exchange(proxy.port, request_bytes + LAST) == direct
    address = b"Host: 127.0.0.1:%d" % upstream.port
    for one, other in zip(sent, upstream.received[-2:], strict=True):
        for given in (b"hOST: example.org", b"Host: e"):
            one = one.replace(given + b"\r\n", address + b"\r\n", 1)
        assert one == other


@pytest.mark.nightly
def test_what_is_no_http_is_for_the_upstream_to_answer(proxy: RunningProxy) -> None:
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                taken.append(connection.recv(1000))
                connection.sendall(b"what?")

        thread = threading.Thread(target=answer)
        thread.start()
        with running_proxy(f"http://127.0.0.1:{server.getsockname()[1]}") as other:
            assert exchange(other.port, b"\x16\x03\x01 hello\r\n\r\n") == (b"what?", "end")
        thread.join(20)
    assert taken == [b"\x16\x03\x01 hello\r\n\r\n"]


def test_protocols_switch(upstream: ScriptedUpstream, proxy: RunningProxy) -> None:
    asked = b"GET /v1/websocket HTTP/1.1\r\nHost: e\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    frames = b"\x81\x02abcd"
    direct = exchange(upstream.port, asked, frames)
    assert direct[0].endswith(b"\x81\x02hi" + frames[::-1])
    assert exchange(proxy.port, asked, frames) == direct
    assert exchange(proxy.port, asked + frames) == direct


def test_chunks_come_at_once(proxy: RunningProxy) -> None:
    with connect(proxy.port) as client:
        client.sendall(request_of("endless"))
        data = b""
        while len(data) < len(CHUNKED + chunk(b"data: 1\n\n")):
            data += client.recv(65536)
        assert data == CHUNKED + chunk(b"data: 1\n\n")  # and the answer has not ended


@pytest.mark.parametrize("name", ["hang", "endless"])
@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_client_that_goes_ends_its_upstream(
    name: str, how: str, upstream: ScriptedUpstream, proxy: RunningProxy
) -> None:
    before = upstream.finished.count(name)
    client = connect(proxy.port)
    client.sendall(request_of(name))
    if name == "endless":
        assert client.recv(1000)
    if how == "resets":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    ended = threading.Event()
    for _ in range(400):
        if upstream.finished.count(name) > before:
            return
        ended.wait(0.05)
    raise AssertionError("the upstream still waits")


def test_an_upstream_that_is_not_there_looks_like_a_fault_of_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with running_proxy(f"http://127.0.0.1:{port}") as proxy:
        assert exchange(proxy.port, request_of("length")) == (b"", "reset")
    assert any("can't be reached" in line for line in proxy.lines)


@pytest.mark.nightly
def test_long_bodies_are_refused_where_that_is_told(upstream: ScriptedUpstream) -> None:
    with running_proxy(f"http://127.0.0.1:{upstream.port}", "--max-body", "1000") as proxy:
        assert b"200 OK" in exchange(proxy.port, request_of("last_closed", body=b"x" * 1000))[0]
        answer, how = exchange(proxy.port, request_of("length", body=b"x" * 100_000))
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        assert how == "end"
        unknown = b"POST /v1/length HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer, how = exchange(proxy.port, unknown + chunk(b"x" * 5000))
        assert answer.startswith(b"HTTP/1.1 413 "), answer


def test_paths_go_below_the_upstreams(upstream: ScriptedUpstream) -> None:
    with running_proxy(f"http://127.0.0.1:{upstream.port}/deep/er/") as proxy:
        exchange(proxy.port, b"GET /v1/last_closed?x=1 HTTP/1.1\r\nHost: e\r\n\r\n")
        assert upstream.received[-1].startswith(b"GET /deep/er/v1/last_closed?x=1 HTTP/1.1\r\nHost: 127")
        exchange(proxy.port, b"GET http://e.org/v1/last_closed HTTP/1.1\r\nHost: e.org\r\n\r\n")
        assert upstream.received[-1].startswith(b"GET /deep/er/v1/last_closed HTTP/1.1\r\n")


def test_each_side_can_end_before_the_other(upstream: ScriptedUpstream, proxy: RunningProxy) -> None:
    """A client that has said all still gets its answer; what it says after the answer's end still arrives."""

    def ends_first(port: int) -> tuple[bytes, str]:
        with connect(port) as client:
            client.sendall(request_of("after_end"))
            client.shutdown(socket.SHUT_WR)
            return read_to_end(client)

    def goes_on(port: int) -> tuple[bytes, str]:
        with connect(port) as client:
            client.sendall(request_of("last_ended"))
            told = read_to_end(client)
            client.sendall(b"no whole head")
            client.shutdown(socket.SHUT_WR)
            client.settimeout(20)
            return told

    assert ends_first(proxy.port) == ends_first(upstream.port)
    for port in (upstream.port, proxy.port):
        count = upstream.received.count(b"no whole head")
        assert goes_on(port)[0].endswith(b"ok")
        ended = threading.Event()
        for _ in range(400):
            if upstream.received.count(b"no whole head") > count:
                break
            ended.wait(0.05)
        assert upstream.received.count(b"no whole head") == count + 1
