# SPDX-License-Identifier: Apache-2.0
"""`serve` as users run it: a process that takes a port, says when it is ready, and ends on a signal."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import raw_request
from scripted_engine import ScriptedEngine

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv_server.app import check_port_is_free, serve
from radixkv_server.http.listener import bind_socket

# Serves a scripted engine whose answers stop after two tokens until a line arrives on standard input.
PROGRAM = """
import sys, threading
sys.path.insert(0, {folder!r})
from scripted_engine import ScriptedEngine
from radixkv.engine.config import EngineConfig
from radixkv_server.app import serve

engine = ScriptedEngine()
engine.hold_at = 2
engine.gate.clear()

def release():
    sys.stdin.readline()
    engine.release()

threading.Thread(target=release, daemon=True).start()
serve(
    EngineConfig(),
    engine_factory=lambda config: engine,
    on_ready=lambda host, port: print("ready", host, port, flush=True),
    port=0,
    shutdown_grace_s={grace},
    shutdown_delay_s={delay},
)
print("closed", engine.closed.is_set(), flush=True)
"""


class Process:
    """A serving process and its port."""

    def __init__(self, grace: float, delay: float = 0.0) -> None:
        folder = str(Path(__file__).parent.parent / "support")
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(folder=folder, grace=grace, delay=delay)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        word, host, port = self.line().split()
        assert (word, host) == ("ready", "127.0.0.1")
        self.port = int(port)

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def release(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def stream(self) -> tuple[socket.socket, bytes]:
        """A stream that has got its first two tokens and waits for more."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        body = {"messages": [{"role": "user", "content": "say:hello"}], "stream": True}
        sock.sendall(raw_request("/v1/chat/completions", body))
        received = b""
        while b'"content":"e"' not in received:
            received += sock.recv(65536)
        return sock, received

    def errors(self) -> str:
        """Wait for the end; the process must have ended of its own accord."""
        _, errors = self.popen.communicate(timeout=30)
        return errors


@pytest.fixture
def process(request: Any) -> Iterator[Process]:
    options = getattr(request, "param", {"grace": 30.0})
    started = Process(**options)
    try:
        yield started
    finally:
        started.popen.kill()
        started.popen.communicate()


def drain(sock: socket.socket) -> bytes:
    data = b""
    with sock:
        while chunk := sock.recv(65536):
            data += chunk
    return data


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_finish_after_a_signal(process: Process, number: int) -> None:
    assert httpx.get(f"http://127.0.0.1:{process.port}/health").status_code == 200
    sock, _ = process.stream()
    process.popen.send_signal(number)
    assert process.popen.stderr is not None
    assert any("finishing 1 request(s)" in line for line in process.popen.stderr)
    process.release()
    assert b"data: [DONE]" in drain(sock)
    assert process.line() == "closed True"
    assert "Traceback" not in process.errors()
    assert process.popen.returncode == 0


@pytest.mark.parametrize("process", [{"grace": 0.2}], indirect=True)
def test_what_outlasts_the_grace_period_gets_an_error(process: Process) -> None:
    sock, _ = process.stream()
    process.popen.send_signal(signal.SIGTERM)
    rest = drain(sock)
    # The last event, inside the last of the chunks that HTTP/1.1 wraps around events.
    event = json.loads(rest.rpartition(b"data: ")[2].partition(b"\n")[0])
    assert event["error"]["code"] == "shutting_down"
    assert b"[DONE]" not in rest
    assert process.line() == "closed True"
    assert "Traceback" not in process.errors()
    assert process.popen.returncode == 0


@pytest.mark.nightly
@pytest.mark.parametrize("process", [{"grace": 0.2}], indirect=True)
def test_a_whole_answer_that_outlasts_the_grace_period_gets_an_error(process: Process) -> None:
    request = raw_request("/v1/completions", {"prompt": "say:hello"})
    head, _, body = request.replace(b"Host:", b"Expect: 100-continue\r\nHost:").partition(b"\r\n\r\n")
    sock = socket.create_connection(("127.0.0.1", process.port), timeout=30)
    sock.sendall(head + b"\r\n\r\n")
    assert sock.recv(65536).startswith(b"HTTP/1.1 100 "), "the server has begun with the request"
    sock.sendall(body)
    process.popen.send_signal(signal.SIGTERM)
    answer = drain(sock)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
    assert process.line() == "closed True"
    assert "Traceback" not in process.errors()


@pytest.mark.nightly
def test_a_second_signal_ends_at_once(process: Process) -> None:
    sock, _ = process.stream()
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.stderr is not None
    process.popen.stderr.readline()
    process.popen.send_signal(signal.SIGTERM)
    drain(sock)
    assert "Traceback" not in process.errors()
    assert process.popen.returncode == 0


@pytest.mark.parametrize("process", [{"grace": 30.0, "delay": 1000.0}], indirect=True)
def test_balancers_see_that_a_server_ends_before_connections_are_refused(process: Process) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{process.port}", timeout=30) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        sock, _ = process.stream()
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.stderr is not None
        assert any("finishing 1 request(s)" in line for line in process.popen.stderr)
        answer = client.get("/health/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
        assert client.get("/health").status_code == 200, "it is alive"
        refused = client.post("/v1/completions", json={"prompt": "say:late"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"] == "1"
    process.release()
    with sock:
        while b"[DONE]" not in sock.recv(65536):
            pass
    process.popen.send_signal(signal.SIGTERM)
    assert process.line() == "closed True"
    assert "Traceback" not in process.errors()
    assert process.popen.returncode == 0


def test_port_in_use() -> None:
    def never(config: EngineConfig) -> Any:
        raise AssertionError("the model must not be loaded when the port can't be had")

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use.*--port"):
            serve(EngineConfig(), engine_factory=never, port=port)
        with pytest.raises(ConfigError, match="in use"):
            check_port_is_free("127.0.0.1", port)


def test_port_taken_while_the_model_loads() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with bind_socket("127.0.0.1", 0) as probe:
            port = probe.getsockname()[1]

        def slow(config: EngineConfig) -> Any:
            other.bind(("127.0.0.1", port))
            other.listen()
            return ScriptedEngine()

        with pytest.raises(ConfigError, match="in use"):
            serve(EngineConfig(), engine_factory=slow, port=port)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_addresses_that_are_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        check_port_is_free(host, 8000)


def test_a_port_is_free_again_after_a_check() -> None:
    with bind_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)


@pytest.mark.timeout(120)  # well before the grace is over
@pytest.mark.parametrize("process", [{"grace": 300.0}], indirect=True)
@pytest.mark.parametrize(
    "path", ["/v1/cache/events", pytest.param("/v1/cache/requests", marks=pytest.mark.nightly)]
)
@pytest.mark.nightly
def test_streams_without_an_end_do_not_hold_up_the_servers(process: Process, path: str) -> None:
    headers = {"accept": "text/event-stream"}
    with httpx.stream("GET", f"http://127.0.0.1:{process.port}{path}", headers=headers, timeout=30) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: snapshot"
        process.popen.send_signal(signal.SIGTERM)
        assert any("shutting_down" in line for line in lines)
    process.errors()
    assert process.popen.returncode == 0
