# SPDX-License-Identifier: Apache-2.0
"""How long does a stream through `radixkv proxy` stand still while another client sends hard bodies?

A stream of small events goes through the proxy, and a second one goes straight to the same upstream, for the
machine's own pauses. Meanwhile another client sends one body: packed ones that unpack to hundreds of
thousands of messages or to megabytes of text, megabytes of lone surrogates, long plain ones. Printed are the
longest gaps between two events of each stream, from the sending of the body until a second after its answer.

    python -m benchmarks.proxy_gaps --rounds 5 --json out.json
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import itertools
import json
import os
import re
import socket
import socketserver
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import write_figures
from benchmarks.proxy_overhead import free_port, process

PAUSE_S = 0.01  # between two events
AFTER_S = 1.0  # that a body's answer is followed: what observes the traffic works on it
WAYS = ("one upstream, record", "several", "several, record", "several, record and console")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n'
ANSWER = b'{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 9}}'


class Upstream(socketserver.BaseRequestHandler):
    """Answers short requests with an endless stream, and others at once."""

    def handle(self) -> None:
        with contextlib.suppress(OSError), self.request.makefile("rb") as reader:
            while line := reader.readline():
                head = [line]
                while (line := reader.readline()) not in (b"\r\n", b""):
                    head.append(line)
                length = re.search(rb"content-length: (\d+)", b"".join(head), re.IGNORECASE)
                left = int(length[1]) if length else 0
                body = reader.read(min(left, 1000))
                left -= len(body)
                while left and (data := reader.read(min(left, 1 << 20))):
                    left -= len(data)
                if b'"stream": true' in body:
                    self.request.sendall(HEAD)
                    while True:
                        self.request.sendall(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                        time.sleep(PAUSE_S)
                self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                self.request.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))


@contextlib.contextmanager
def upstream() -> Iterator[int]:
    """The port of one that runs meanwhile."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Upstream) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Stream:
    """Reads the events of one stream, and notes when each comes."""

    def __init__(self, port: int) -> None:
        self.times: list[float] = []
        body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "Hello."}]}'
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.sendall(request_of("", body))
        threading.Thread(target=self._run, daemon=True).start()
        while not self.times:
            time.sleep(PAUSE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while self._connection.recv(65536):
                self.times.append(time.perf_counter())

    def longest_gap(self, start: float, end: float) -> float:
        """Between two events, of which one is within these times."""
        times = [one for one in self.times.copy() if start - 1.0 < one < end + 1.0]
        gaps = [
            after - before for before, after in itertools.pairwise(times) if after > start and before < end
        ]
        return max(gaps)

    def close(self) -> None:
        self._connection.close()


def request_of(encoding: str, body: bytes) -> bytes:
    """A chat, as it goes over the wire."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n" + (f"Content-Encoding: {encoding}\r\n" if encoding else "")
    return head.encode() + b"\r\n" + body


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Name, encoding and body of each kind."""
    chat = b'{"model":"m","messages":[{"role":"user","content":"'
    message = b'{"role":"user","content":"x"}'
    many = b'{"messages":[' + b",".join([message] * 600_000) + b"]}"
    text = chat + b"x" * (62 << 20) + b'"}]}'
    surrogates = chat + b"\\ud800" * ((8 << 20) // 6 - 100) + b'"}]}'
    for encoding, pack in PACKERS.items():
        yield f"600,000 messages, {encoding}", encoding, pack(many)
        yield f"62 MiB of text, {encoding}", encoding, pack(text)
        yield f"8 MiB of lone surrogates, {encoding}", encoding, pack(surrogates)
    yield "8 MiB of lone surrogates, plain", "", surrogates
    words = b"".join(b"word%d " % number for number in range(3_000_000))
    for megabytes in (4, 18, 32):
        yield f"{megabytes} MB of text, plain", "", chat + words[: megabytes * 10**6 - 100] + b'"}]}'
    yield "17 MB of messages, plain", "", many


def _packed_by(name: str, **options: Any) -> Callable[[bytes], bytes]:
    return lambda plain: importlib.import_module(name).compress(plain, **options)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "br": _packed_by("brotli", quality=5),
    "zstd": _packed_by("zstandard"),
}


def send(port: int, request: bytes) -> float:
    """Send a request and read its answer; return the seconds."""
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request)
        told = b""
        while not told.endswith(ANSWER):
            data = connection.recv(65536)
            assert data, f"the connection ended after {told[:200]!r}"
            told += data
    return time.perf_counter() - started


def measure(port: int, direct: int, request: bytes, rounds: int) -> dict[str, Any]:
    """Gaps of both streams while a request goes through, in milliseconds."""
    through, beside = Stream(port), Stream(direct)
    gaps: list[float] = []
    controls: list[float] = []
    took: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        took.append(send(port, request))
        time.sleep(AFTER_S)
        end = time.perf_counter()
        time.sleep(10 * PAUSE_S)
        gaps.append(through.longest_gap(start, end))
        controls.append(beside.longest_gap(start, end))
    through.close()
    beside.close()
    figures = {"gap_ms": gaps, "direct_gap_ms": controls, "answered_ms": took}
    return {
        name: {"median": round(1e3 * statistics.median(values), 1), "max": round(1e3 * max(values), 1)}
        for name, values in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each body")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--bodies", default="", help="only kinds with this in their name")
    parser.add_argument("--json")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    before = os.getloadavg()[0]
    kinds = [one for one in bodies() if options.bodies in one[0]]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        ports = [running.enter_context(upstream()) for _ in range(2)]
        for number, way in enumerate(options.ways):
            port = free_port()
            command = ["-m", "radixkv", "proxy", "--port", str(port)]
            for one in ports[: 2 if "several" in way else 1]:
                command += ["--upstream", f"http://127.0.0.1:{one}"]
            if "record" in way:
                command += ["--record", str(Path(folder) / f"{number}.jsonl"), "--record-files", "1"]
            if "console" in way:
                command += ["--console-port", str(free_port())]
            with process(*command) as started:
                assert started.stdout is not None
                started.stdout.readline()
                time.sleep(2.0)  # the observer's own start
                for name, encoding, body in kinds:
                    row = measure(port, ports[0], request_of(encoding, body), options.rounds)
                    found.append({"way": way, "body": name, "bytes": len(body), **row})
                    print(json.dumps(found[-1]), flush=True)
    worst = max(row["gap_ms"]["median"] for row in found)
    print(f"worst median of the longest gaps: {worst} ms")
    loads = {"load_before": round(before, 1), "load_after": round(os.getloadavg()[0], 1)}
    write_figures(options.json, "proxy_gaps", {"rounds": options.rounds, "rows": found, **loads})


if __name__ == "__main__":
    main()
