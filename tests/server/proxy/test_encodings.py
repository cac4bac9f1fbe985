# SPDX-License-Identifier: Apache-2.0
"""Compressed bodies before several upstreams: all encodings alike, and none holds up a stream."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import threading
import time
import zlib
from collections.abc import Iterator

import pytest
from raw_http import connect, exchange, request_of
from running_proxy import FleetHere, fleet_here
from scripted_upstream import ScriptedUpstream, chunk, scripted_upstream

from radixkv.observe.audit.body_limits import BodyLimits
from radixkv.observe.audit.request_bodies import NoRequest
from radixkv_server.proxy.messages import PARSED_BYTES, RequestStream

ENCODINGS = ("none", "gzip", "deflate", "raw deflate", "br", "zstd", "gzip, br")


def packed(encoding: str, plain: bytes) -> tuple[str, bytes]:
    """The `Content-Encoding` and the body; skips what no library is there for."""
    if encoding == "gzip, br":
        return encoding, packed("br", gzip.compress(plain, 1))[1]
    if encoding == "none":
        return "identity", plain
    if encoding == "gzip":
        return encoding, gzip.compress(plain, 1)
    if encoding.endswith("deflate"):
        packing = zlib.compressobj(1, wbits=-15 if encoding == "raw deflate" else 15)
        return "deflate", packing.compress(plain) + packing.flush()
    library = importlib.import_module("brotli" if encoding == "br" else "zstandard")
    return encoding, library.compress(plain, **({"quality": 1} if encoding == "br" else {}))


def test_requires_the_libraries_of_all_encodings() -> None:
    for name in ("brotli", "zstandard"):
        pytest.importorskip(name, reason="in the base dependencies: pip install -r constraints.txt")


@pytest.fixture(params=ENCODINGS)
def encoding(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if "br" in kind or kind == "zstd":
        pytest.importorskip("zstandard" if kind == "zstd" else "brotli")
    return kind


@pytest.fixture(scope="module")
def upstreams() -> Iterator[list[ScriptedUpstream]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(scripted_upstream()) for _ in range(4)]


@pytest.fixture(scope="module")
def proxy(upstreams: list[ScriptedUpstream]) -> Iterator[FleetHere]:
    with fleet_here([f"http://127.0.0.1:{one.port}" for one in upstreams]) as running:
        yield running


def sent(port: int, encoding: str, body: bytes, *, chunked: bool = False) -> bytes:
    """What is answered to a chat of this body, as it goes over the wire."""
    extra = "Content-Type: application/json\r\n"
    extra += f"Content-Encoding: {encoding}\r\n" if encoding != "identity" else ""
    request = request_of("last_closed", extra=extra, body=body)
    if chunked:
        head = request.removesuffix(body).replace(
            b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked"
        )
        pieces = (body[start : start + 16384] for start in range(0, len(body), 16384))
        request = head + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    return exchange(port, request)[0]


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    message = b'{"role":"user","content":"x"}'
    return {
        "messages": b'{"messages":[' + b",".join([message] * 200_000) + b"]}",
        "text": b'{"messages":[{"role":"user","content":"' + b"x" * (40 << 20) + b'"}]}',
        "lists": b'{"messages":' + b"[" + b"[]," * 500_000 + b"[]]}",
        "deep": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    }


@pytest.mark.parametrize("chunked", [False, True], ids=["by length", "in chunks"])
def test_no_bomb_takes_the_event_loops_time(
    encoding: str, chunked: bool, proxy: FleetHere, bombs: dict[str, bytes]
) -> None:
    """In processor seconds of its thread, which do not depend on what else the machine does."""
    (thread,) = (one for one in threading.enumerate() if one.name == "proxy")
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    for name, plain in bombs.items():
        if encoding == "none" and len(plain) > 1 << 20:
            continue  # what the bytes themselves take to go through
        kind, body = packed(encoding, plain)
        before = time.clock_gettime(clock)
        assert sent(proxy.port, kind, body, chunked=chunked).endswith(b"ok")
        assert time.clock_gettime(clock) - before < 0.1, name


def test_a_prompt_is_found_however_it_is_packed(
    encoding: str, proxy: FleetHere, upstreams: list[ScriptedUpstream]
) -> None:
    text = f"of {encoding}: ".encode() + bytes(range(97, 123)) * 100
    plain = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % text
    kind, body = packed(encoding, plain)
    went = []
    for one in (plain, body, plain.replace(b"xyz", b"XYZ"), body):
        before = [len(upstream.received) for upstream in upstreams]
        sent(proxy.port, "identity" if one.startswith(b"{") else kind, one)
        for number, upstream in enumerate(upstreams):
            if any(one in request for request in upstream.received[before[number] :]):
                went.append(number)
    assert len(went) == 4
    assert len({went[0], went[1], went[3]}) == 1


def test_what_cant_be_read_goes_through_as_it_came(
    encoding: str, proxy: FleetHere, upstreams: list[ScriptedUpstream]
) -> None:
    kind, body = packed(encoding, b'{"messages": []}' * 50)
    for one in (body[: len(body) // 2], body + b"\0rest", b"\xff" + body):
        for named in (kind, "gzip", "unknown", "gzip, gzip, gzip, gzip, gzip"):
            assert sent(proxy.port, named, one).endswith(b"ok")
            assert any(one in request for upstream in upstreams for request in upstream.received)


def test_all_encodings_give_the_same_within_the_same_limits(encoding: str) -> None:
    plain = b'{"a": "' + bytes(range(97, 123)) * 4000 + b'"}'
    kind, body = packed(encoding, plain)
    assert BodyLimits(len(plain)).unpacked(body, kind) == plain
    with pytest.raises(NoRequest, match="more than"):
        BodyLimits(len(plain) - 1).unpacked(body, kind)
    assert plain.startswith(BodyLimits(len(plain)).unpacked(body[:-4], kind)[:1000]), "cut off half way"


def test_pieces_of_json_are_counted_outside_of_its_strings() -> None:
    limits = BodyLimits(max_pieces=100)
    text = rb'"many, \"of, [these{ \\"' * 1
    assert limits.parsed(b"[%s]" % b",".join([text] * 40))[0] == 'many, "of, [these{ \\'
    assert limits.parsed(b'"%s"' % (b",[{" * 1000))
    for many in (b"[%s1]" % (b"1," * 100), b"[%s[]]" % (b"[]," * 60), b"[%s1]" % (b'"",' * 60)):
        with pytest.raises(NoRequest, match="more than 100 pieces"):
            limits.parsed(many)


def test_bodies_in_small_chunks_are_parsed_a_little_at_a_time() -> None:
    requests, body = RequestStream(), bytearray()
    requests.body = body.extend
    head = b"POST / HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = head + chunk(b"x") * 20_000 + b"0\r\n\r\n"
    pieces = [getattr(piece, "raw", piece) for piece in requests.feed(data)]
    assert b"".join(pieces) == data
    assert body == b"x" * 20_000
    assert max(map(len, pieces)) <= PARSED_BYTES


@pytest.mark.parametrize("length", ["Content-Length: 3\r\n", "content-length:\r\n 3\r\n"])
def test_a_length_beside_chunks_is_left_out(
    length: str, proxy: FleetHere, upstreams: list[ScriptedUpstream]
) -> None:
    head = f"POST /v1/last_closed HTTP/1.1\r\nHost: e\r\nX-A: b\r\n{length}Transfer-Encoding: chunked\r\n\r\n"
    body = chunk(b"a body that is longer") + b"0\r\n\r\n"
    assert exchange(proxy.port, head.encode() + body)[0].endswith(b"ok")
    (arrived,) = (request for one in upstreams for request in one.received if b"that is longer" in request)
    upstreams[0].received.clear()
    for one in upstreams:
        one.received.clear()
    assert b"length" not in arrived.lower().partition(b"\r\n\r\n")[0]
    assert b"X-A: b\r\nTransfer-Encoding: chunked\r\n\r\n" in arrived


@pytest.mark.parametrize("is_kept", [False, True], ids=["on a new connection", "on a kept one"])
def test_a_request_that_ends_its_upstream_is_tried_on_one_more(is_kept: bool) -> None:
    with contextlib.ExitStack() as stack:
        upstreams = [stack.enter_context(scripted_upstream()) for _ in range(4)]
        proxy = stack.enter_context(fleet_here([f"http://127.0.0.1:{one.port}" for one in upstreams]))
        client = stack.enter_context(connect(proxy.port))
        if is_kept:
            client.sendall(request_of("length"))
            assert client.recv(65536).endswith(b"hello")
        client.sendall(request_of("reset"))
        assert client.recv(65536).startswith(b"HTTP/1.1 502 ")
        asked = [one for one in upstreams if any(b"/v1/reset" in request for request in one.received)]
        assert len(asked) == 2
