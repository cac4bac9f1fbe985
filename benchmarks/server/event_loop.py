# SPDX-License-Identifier: Apache-2.0
"""How long does `/health` take while other clients send as much as they can?

A client asks for `/health` every few milliseconds while streams run on the model and others send large
bodies of every shape to every route, one at a time and several at once; at the end, many small requests come
at once to a full queue. Nothing that a client sends may make the others wait: the event loop must be free at
all times, and so must the interpreter's lock.

    python -m benchmarks.event_loop                      # serves the embedded model itself
    python -m benchmarks.event_loop --url http://127.0.0.1:8000 --json out.json
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from benchmarks.figures import write_figures

USER = b'{"role":"user","content":"x"}'
QUEUE = 8  # of the server that is started here


def _items(unit: bytes, size: int) -> bytes:
    return b",".join([unit] * (size // (len(unit) + 1)))


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Route, kind and body of about `size` bytes."""
    chat = b'{"max_tokens":1,"messages":[' + USER + b"],"
    text = b"x " * (size // 2)
    deep = b'{"type":"object","properties":{"a":' * 12 + b"1" + b"}}" * 12
    tool = b'{"type":"function","function":{"name":"f","parameters":' + deep + b"}}"
    call = b'{"id":"1","type":"function","function":{"name":"f","arguments":"' + text + b'"}}'
    for route in ("/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/messages/count_tokens"):
        more = b'"max_tokens":1,' if route in ("/v1/chat/completions", "/v1/messages") else b""
        yield route, "one message", b"{" + more + b'"messages":[{"role":"user","content":"' + text + b'"}]}'
        yield route, "many messages", b"{" + more + b'"messages":[' + _items(USER, size) + b"]}"
        yield (
            route,
            "many tools",
            b"{" + more + b'"messages":[' + USER + b'],"tools":[' + _items(tool, size) + b"]}",
        )
    yield "/v1/chat/completions", "small lists", chat + b'"tools":[' + _items(b"[1]", size) + b"]}"
    yield "/v1/chat/completions", "strings", chat + b'"metadata":[' + _items(b'"a"', size) + b"]}"
    yield "/v1/chat/completions", "escapes", chat + b'"user":"' + b"\\u00e9" * (size // 6) + b'"}'
    yield "/v1/chat/completions", "broken at the end", chat + b'"metadata":[' + _items(b"123456", size) + b"}"
    yield "/v1/chat/completions", "brackets in text", chat + b'"user":"' + b'[{\\"' * (size // 4) + b'"}'
    yield (
        "/v1/chat/completions",
        "arguments",
        b'{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[' + call + b"]}]}",
    )
    ids = _items(b"[" + _items(b"123", 24_000) + b"]", size)
    yield "/v1/completions", "token ids", b'{"prompt":[' + ids + b'],"max_tokens":1}'
    yield "/v1/completions", "one prompt", b'{"prompt":"' + text + b'"}'
    yield "/v1/completions", "short prompts", b'{"prompt":[' + _items(b'"a"', size) + b"]}"
    yield "/tokenize", "one prompt", b'{"prompt":"' + text + b'"}'
    yield "/detokenize", "token ids", b'{"tokens":[' + _items(b"12345", size) + b"]}"
    yield "/v1/responses", "one input", b'{"max_output_tokens":16,"input":"' + text + b'"}'
    yield "/v1/responses", "many inputs", b'{"max_output_tokens":16,"input":[' + _items(USER, size) + b"]}"
    yield "/v1/cache/explain", "one prompt", b'{"prompt":"' + text + b'"}'
    yield "/v1/cache/pins", "one prompt", b'{"prompt":"' + text + b'"}'


class Server:
    """Where requests go."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, f"{url} names no host"
        self._address = (parts.hostname, parts.port or 80)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._address, timeout=600)

    def send(self, method: str, path: str, body: bytes | None = None) -> int:
        """The status; 0: the connection was closed."""
        connection = self.connect()
        try:
            with contextlib.closing(connection):
                connection.request(method, path, body, self._headers)
                answer = connection.getresponse()
                answer.read()
                return answer.status
        except (OSError, http.client.HTTPException):
            return 0


class Probe:
    """Asks for /health again and again, on one connection.

    Attributes:
        times: seconds of each answer, in order.
    """

    def __init__(self, server: Server, interval_s: float = 0.005) -> None:
        self.times: list[float] = []
        self._server = server
        self._interval_s = interval_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._server.connect()) as connection:
            while not self._ends.wait(self._interval_s):
                started = time.perf_counter()
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
                assert answer.status == 200, "the server is not healthy"
                self.times.append(time.perf_counter() - started)


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum, in ms."""
    ordered = sorted(seconds)
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in SHARES.items()}
    return {name: round(1e3 * value, 1) for name, value in {**at, "max": ordered[-1]}.items()}


SHARES = {"p50": 0.5, "p99": 0.99}


def together(count: int, work: Callable[[], Any]) -> list[Any]:
    """What `count` calls at once return."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@contextlib.contextmanager
def busy(server: Server, streams: int) -> Iterator[None]:
    """Streams that keep the model at work."""
    ends = threading.Event()
    body = {"prompt": "Once upon a time", "max_tokens": 500, "stream": True, "ignore_eos": True}

    def run() -> None:
        while not ends.is_set():
            server.send("POST", "/v1/completions", json.dumps(body).encode())

    threads = [threading.Thread(target=run, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    yield
    ends.set()


def measure(server: Server, size: int, at_once: int) -> list[dict[str, Any]]:
    """One row per route, kind and number of clients."""
    rows = []
    for route, kind, body in bodies(size):
        for clients in (1, at_once):
            started = time.perf_counter()
            with Probe(server) as probe:
                statuses = together(clients, partial(server.send, "POST", route, body))
                while len(probe.times) < 20:
                    time.sleep(0.01)
            took = round(time.perf_counter() - started, 2)
            row = {
                "megabytes": size / 1e6,
                "route": route,
                "kind": kind,
                "clients": clients,
                "status": sorted(set(statuses)),
            }
            rows.append({**row, "took_s": took, "health_ms": spread(probe.times)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def flood(server: Server, count: int) -> dict[str, Any]:
    """`count` requests at once to a full queue: how long each refusal takes."""
    body = json.dumps({"prompt": "flood", "max_tokens": 400, "ignore_eos": True}).encode()
    refusals: list[float] = []
    others: list[int] = []

    def ask() -> None:
        started = time.perf_counter()
        status = server.send("POST", "/v1/completions", body)
        if status in (429, 503):
            refusals.append(time.perf_counter() - started)
        else:
            others.append(status)

    with Probe(server) as probe:
        together(count, ask)
    found = {"requests": count, "refused": len(refusals), "health_ms": spread(probe.times)}
    return {**found, "refusal_ms": spread(refusals) if refusals else None}


@contextlib.contextmanager
def serving(arguments: list[str]) -> Iterator[str]:
    """The URL of a server that runs meanwhile."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(f"[limits]\nmax_queue = {QUEUE}\n")
        file.flush()
        options = ("--port", "0", "--config", file.name, *arguments)
        command = [sys.executable, "-m", "radixkv", "serve", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        first = process.stdout.readline()
    try:
        assert "ready on" in first, "the server did not start"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield first.split()[-1]
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a running server; default: one is started, on the embedded model")
    parser.add_argument("--key", help="its API key")
    parser.add_argument(
        "--megabytes",
        type=float,
        nargs="+",
        default=[15.0, 1.5],
        help="sizes of the bodies; what is refused unread says little: one should be just under the limits",
    )
    parser.add_argument("--at-once", type=int, default=4, help="clients that send the same body")
    parser.add_argument("--streams", type=int, default=2, help="streams that keep the model at work")
    parser.add_argument("--flood", type=int, default=200, help="requests at once to a full queue")
    parser.add_argument("--json", help="write the figures here")
    args, rest = parser.parse_known_args()
    with contextlib.ExitStack() as stack:
        server = Server(args.url or stack.enter_context(serving(rest)), args.key)
        with busy(server, args.streams):
            time.sleep(1.0)
            with Probe(server) as probe:
                time.sleep(5.0)
            found: dict[str, Any] = {"undisturbed_ms": spread(probe.times)}
            print(json.dumps(found))
            found["bodies"] = [
                row for size in args.megabytes for row in measure(server, int(size * 1e6), args.at_once)
            ]
            found["flood"] = flood(server, args.flood)
            print(json.dumps(found["flood"]))
    worst = max(row["health_ms"]["p99"] for row in found["bodies"])
    print(f"worst 99th percentile of /health: {worst} ms")
    write_figures(args.json, "event_loop", found)


if __name__ == "__main__":
    main()
