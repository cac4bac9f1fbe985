# SPDX-License-Identifier: Apache-2.0
"""Before several upstreams, too, answers come as they were sent, whatever these are."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from raw_http import ENDINGS, LAST, connect, exchange, request_of
from running_proxy import FleetHere, RunningProxy, fleet_here, running_proxy
from scripted_upstream import SCRIPTS, ScriptedUpstream, scripted_upstream
from waiting import until

from radixkv_server.proxy.routed_relay import RoutedRelay

#: Those that wait for something; and where nothing has come, or half a head, the proxy answers itself.
NOT_ALONE = (
    "hang",
    "endless",
    "endless_huge",
    "two_parts",
    "after_end",
    "last_ended",
    "reset_head",
    "reset_body",
)
ANSWERED_HERE = ("last_empty", "reset")


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with scripted_upstream() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(upstream: ScriptedUpstream) -> Iterator[FleetHere]:
    with fleet_here([f"http://127.0.0.1:{upstream.port}"]) as running:
        yield running


@pytest.fixture(scope="module")
def single(upstream: ScriptedUpstream) -> Iterator[RunningProxy]:
    with running_proxy(f"http://127.0.0.1:{upstream.port}") as running:
        yield running


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in NOT_ALONE])
def test_answers_come_as_without_it(name: str, upstream: ScriptedUpstream, proxy: FleetHere) -> None:
    request, go_on = request_of(name, "HEAD" if name == "head" else "POST"), b""
    if name == "websocket":
        request = (
            b"GET /v1/websocket HTTP/1.1\r\nHost: e\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        go_on = b"\x81\x02abcd"
    elif not name.startswith("last_") and name not in ENDINGS:
        request += LAST  # pipelined: answered in order, after which the connection ends
    direct = exchange(upstream.port, request, go_on)
    found = exchange(proxy.port, request, go_on)
    if name in ANSWERED_HERE:
        assert found[0].startswith(b"HTTP/1.1 502 ")
    else:
        assert found == direct
    until(lambda: not any(state.running for state in proxy.fleet.states()))


@pytest.mark.parametrize(
    "request_bytes",
    [
        request_of("length", extra="Authorization: Bearer sk-0123456789\r\nAccept-Encoding: gzip, br\r\n"),
        b"DELETE /v1/length HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"5;name=value\r\nhello\r\n0A\r\n0123456789\r\n0\r\n\r\n",
        b"GET /v1/length HTTP/1.1\r\nHost: e\r\nX-Long: " + b"y" * 70_000 + b"\r\n\r\n",
        b"\r\n" + request_of("length"),
        request_of("length", body=b"x" * 600_000),
    ],
)
def test_requests_arrive_as_they_were_sent(
    request_bytes: bytes, upstream: ScriptedUpstream, proxy: FleetHere
) -> None:
    direct = exchange(upstream.port, request_bytes + LAST)
    sent = [one for one in upstream.received if not one.startswith(b"GET /health")][-2:]
    assert exchange(proxy.port, request_bytes + LAST) == direct
    arrived = [one for one in upstream.received if not one.startswith(b"GET /health")][-2:]
    address = b"Host: 127.0.0.1:%d" % upstream.port
    for one, other in zip(sent, arrived, strict=True):
        for given in (b"hOST: example.org", b"Host: e"):
            one = one.replace(given + b"\r\n", address + b"\r\n", 1)
        assert one.lstrip(b"\r\n") == other


def test_what_follows_a_request_does_not_hold_it_up(proxy: FleetHere) -> None:
    with connect(proxy.port) as client:
        client.sendall(request_of("length") + b"\r\nPOST /v1/len")  # the rest comes later
        assert client.recv(65536).endswith(b"hello")
        client.sendall(request_of("length")[len(b"POST /v1/len") :])
        assert client.recv(65536).endswith(b"hello")


def test_an_old_client_gets_the_end_of_the_connection(proxy: FleetHere) -> None:
    asked = request_of("length").replace(b"HTTP/1.1", b"HTTP/1.0")
    answer, how = exchange(proxy.port, asked)
    assert (answer[-5:], how) == (b"hello", "end")


def test_a_body_is_asked_for_where_the_client_waits(proxy: FleetHere) -> None:
    head, _, body = request_of("last_closed", extra="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with connect(proxy.port) as client:
        client.sendall(head + b"\r\n\r\n")
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(65536).endswith(b"ok")


@pytest.mark.parametrize("name", ["hang", "endless"])
def test_a_client_that_goes_ends_its_upstream(
    name: str, upstream: ScriptedUpstream, proxy: FleetHere
) -> None:
    before = upstream.finished.count(name)
    with connect(proxy.port) as client:
        client.sendall(request_of(name))
        if name == "endless":
            assert client.recv(1000)
        until(lambda: any(state.running for state in proxy.fleet.states()))
    until(lambda: upstream.finished.count(name) > before)
    until(lambda: not any(state.running for state in proxy.fleet.states()))


@pytest.mark.parametrize("which", ["one upstream", "several"])
def test_a_client_that_reads_slowly_stops_its_upstream(
    which: str, upstream: ScriptedUpstream, proxy: FleetHere, single: RunningProxy
) -> None:
    port = proxy.port if which == "several" else single.port
    before = upstream.num_sent
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with client:
        client.connect(("127.0.0.1", port))
        client.sendall(request_of("endless_huge"))
        until(lambda: upstream.num_sent > before)
        sent, steady = upstream.num_sent, threading.Event()
        for _ in range(200):
            steady.wait(0.1)
            if upstream.num_sent == sent:
                break
            sent = upstream.num_sent
        assert upstream.num_sent - before < 20_000_000, "what the kernel's and the proxy's buffers take"
        while upstream.num_sent == sent:
            assert client.recv(1 << 20), "it goes on"


def test_bodies_are_held_within_a_bound(monkeypatch: pytest.MonkeyPatch, proxy: FleetHere) -> None:
    monkeypatch.setattr("radixkv_server.proxy.routed_relay.MAX_OPEN_BYTES", 1_000_000)
    with connect(proxy.port) as first:
        first.sendall(request_of("length", body=b"x" * 900_000)[:-1])  # its end is still to come
        until(lambda: RoutedRelay.open_bytes > 900_000)
        answer, how = exchange(proxy.port, request_of("length", body=b"x" * 200_000))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in answer
        assert how == "end"
        first.sendall(b"x")
        assert first.recv(65536).endswith(b"hello")
    until(lambda: RoutedRelay.open_bytes == 0)
