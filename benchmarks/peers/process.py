# SPDX-License-Identifier: Apache-2.0
"""A server process of any engine: started, waited for, its memory watched, ended with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.peers.environment import PeerUnavailable

_SAMPLE_INTERVAL_S = 1.0


@dataclass
class RunningServer:
    """A server that answers.

    Attributes:
        start_s: seconds from starting the process to its first answer.
        idle_bytes: memory then.
        peak_bytes: most memory since, up to now.
    """

    url: str
    process: subprocess.Popen[bytes]
    start_s: float = 0.0
    idle_bytes: int = 0
    peak_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch_memory(self) -> None:
        while not self._stop.wait(_SAMPLE_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, memory_of_tree(self.process.pid))

    def stop_watching(self) -> None:
        self._stop.set()


def memory_of_tree(pid: int) -> int:
    """Proportional set size of a process and its descendants, bytes: pages they share count once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                total += _proportional_set_size(process)
    return total


def _proportional_set_size(process: psutil.Process) -> int:
    """Where the kernel sums it up, that costs the measured process far less than a list of its mappings."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup")
    if not rollup.exists():
        return int(process.memory_full_info().pss)
    for line in rollup.read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    port: int,
    *,
    log: Path,
    timeout: float,
    environment: dict[str, str] | None = None,
    ready_path: str = "/v1/models",
) -> Iterator[RunningServer]:
    """Start a server on `port` and yield it once it lists its models; ends it and its children afterwards.

    Args:
        ready_path: what it answers when it is ready.

    Raises:
        PeerUnavailable: it ended, or gave no answer within `timeout` seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    server = RunningServer(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_ready(server, ready_path, started + timeout, log)
        server.start_s = time.perf_counter() - started
        server.idle_bytes = server.peak_bytes = memory_of_tree(process.pid)
        threading.Thread(target=server.watch_memory, daemon=True).start()
        yield server
    finally:
        server.stop_watching()
        _end(process)


def _wait_until_ready(server: RunningServer, ready_path: str, deadline: float, log: Path) -> None:
    process = server.process
    while time.perf_counter() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(server.url + ready_path, timeout=5, trust_env=False).status_code == 200:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=0.2)
            raise PeerUnavailable(f"the server ended with exit code {code}: {_last_line(log)}")
    raise PeerUnavailable(f"the server gave no answer in time: {_last_line(log)}")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return f"{lines[-1][:300] if lines else 'no output'} (log: {log})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, then kill what is left of its tree."""
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        tree = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in tree:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(tree, timeout=10)
