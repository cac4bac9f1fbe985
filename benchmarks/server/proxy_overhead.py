# SPDX-License-Identifier: Apache-2.0
"""What `radixkv proxy` adds to a request and to each chunk of a stream, at many streams at once.

The upstream is a process that answers at once and then sends events at a steady pace, each with the time of
its sending; the clients are another one. Rounds without the proxy, with it, with its record and console, and
with two upstreams (without events, and with: then the prompt's tokens are asked for first) take turns, all
before the same upstream, which such proxies have under two addresses. A request's time is from its sending to
the head of its answer, a chunk's from its sending to its arrival; what the proxy adds is the median over the
rounds of the difference.
On a busy machine times say little: so there is the proxy's CPU time for each chunk, requests included.

    python -m benchmarks.proxy_overhead --streams 64 --rounds 5 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import write_figures

_EVENT = re.compile(rb'"sent": ([\d.]+)')
WAYS = ("direct", "proxy", "proxy_recording", "routing", "routing_events")


async def upstream(port: int, chunks: int, pause_s: float) -> None:
    """Answers every request with a stream of `chunks` events."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if told := _at_once(head, body):
                    writer.write(told)
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
                writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
                for _ in range(chunks):
                    await asyncio.sleep(pause_s)
                    delta = {"choices": [{"delta": {"content": "word "}}], "sent": time.perf_counter()}
                    data = b"data: " + json.dumps(delta).encode() + b"\n\n"
                    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def _at_once(head: bytes, body: bytes) -> bytes | None:
    """The answer to what is no request to the model."""
    if head.startswith(b"GET "):
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    if not head.startswith(b"POST /tokenize"):
        return None
    tokens = [int.from_bytes(body[at : at + 4], "big") & 0x1FFFF for at in range(0, len(body), 4)]
    told = json.dumps({"tokens": tokens, "namespace": ["", "", ""]}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(told) + told


async def clients(port: int, streams: int, body: bytes) -> tuple[list[float], list[float]]:
    """Milliseconds of each request, to the head of its answer, and of each chunk; each stream asks twice."""
    requests: list[float] = []
    chunks: list[float] = []

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for turn in range(2):
            await asyncio.sleep(0.01 * number)
            named = body.replace(b"NUMBER", b"%04d%02d" % (number, turn))
            started = time.perf_counter()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer sk-01234567\r\n"
            )
            writer.write(b"Content-Length: %d\r\n\r\n" % len(named) + named)
            await reader.readuntil(b"\r\n\r\n")
            requests.append(1000 * (time.perf_counter() - started))
            while (line := await reader.readline()) != b"0\r\n":
                if found := _EVENT.search(line):
                    chunks.append(1000 * (time.perf_counter() - float(found[1])))
            await reader.readline()
        writer.close()

    await asyncio.gather(*map(client, range(streams)))
    return requests, chunks


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """One that runs, and is asked to end."""
    running = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=30)


def _cpu_seconds(one: psutil.Process) -> float:
    times = one.cpu_times()
    return times.user + times.system


def summary(rounds: list[tuple[list[float], list[float]]]) -> dict[str, dict[str, float]]:
    """Over all rounds."""
    shown = {}
    for place, name in ((0, "request_ms"), (1, "chunk_ms")):
        values = sorted(value for one in rounds for value in one[place])
        shown[name] = {
            "p50": round(statistics.median(values), 3),
            "p99": round(values[int(0.99 * len(values))], 3),
            "count": len(values),
        }
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=60, help="of a stream")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two of them")
    parser.add_argument("--body", type=int, default=20_000, help="bytes of a request's body")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--upstream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        return asyncio.run(upstream(options.upstream, options.chunks, options.pause))
    message = {"role": "user", "content": "NUMBER " + "The harbour is open. " * (options.body // 21)}
    body = json.dumps({"model": "m", "stream": True, "messages": [message]}).encode()
    port = free_port()
    found: dict[str, list[tuple[list[float], list[float]]]] = {way: [] for way in WAYS}
    processes: dict[str, psutil.Process] = {}
    before = os.getloadavg()[0]
    shape = ["--chunks", str(options.chunks), "--pause", str(options.pause)]
    proxy = ["-m", "radixkv", "proxy", "--upstream", f"http://127.0.0.1:{port}", "--port"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        running.enter_context(process("-m", "benchmarks.proxy_overhead", "--upstream", str(port), *shape))
        ports = {"direct": port, **{way: free_port() for way in WAYS[1:]}}
        record = ["--record", str(Path(folder) / "record.jsonl"), "--console-port", str(free_port())]
        other, events = f"http://localhost:{port}", f",events=tcp://127.0.0.1:{free_port()}"
        told = ["-m", "radixkv", "proxy", "--upstream", f"http://127.0.0.1:{port}{events}"]
        told += ["--upstream", f"{other}{events}", "--port"]
        for way, command in (
            ("proxy", [*proxy, str(ports["proxy"])]),
            ("proxy_recording", [*proxy, str(ports["proxy_recording"]), *record]),
            ("routing", [*proxy, str(ports["routing"]), "--upstream", other]),
            ("routing_events", [*told, str(ports["routing_events"])]),
        ):
            started = running.enter_context(process(*command))
            assert started.stdout is not None
            started.stdout.readline()
            processes[way] = psutil.Process(started.pid)
        time.sleep(2.0)  # the observers' own start
        for way in WAYS:
            asyncio.run(clients(ports[way], 8, body))
        spent = {way: -_cpu_seconds(one) for way, one in processes.items()}
        for number in range(options.rounds):
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                found[way].append(asyncio.run(clients(ports[way], options.streams, body)))
        spent = {way: spent[way] + _cpu_seconds(one) for way, one in processes.items()}
    shown: dict[str, Any] = {way: summary(rounds) for way, rounds in found.items()}
    for way in WAYS[1:]:
        pairs = [
            (summary([one]), summary([two])) for one, two in zip(found[way], found["direct"], strict=True)
        ]
        shown[f"{way}_adds"] = {
            name: {
                p: round(statistics.median(a[name][p] - b[name][p] for a, b in pairs), 3)
                for p in ("p50", "p99")
            }
            for name in ("request_ms", "chunk_ms")
        }
        chunks = shown[way]["chunk_ms"]["count"]
        shown[f"{way}_adds"]["cpu_us_per_chunk"] = round(1e6 * spent[way] / chunks, 1)
    shape_of = {name: getattr(options, name) for name in ("streams", "chunks", "pause", "body", "rounds")}
    loads = {"load_before": round(before, 1), "load_after": round(os.getloadavg()[0], 1)}
    result = {**shape_of, **shown, **loads}
    print(json.dumps(result, indent=2))
    write_figures(options.json, "proxy_overhead", result)


if __name__ == "__main__":
    main()
