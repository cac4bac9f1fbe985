"""`radixkv serve --replicas N` as a process on a Ray cluster of its own, and its replicas' processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil


@dataclass
class ReplicaServer:
    """Attributes:
    lines: what it wrote before it was ready.
    folder: where a test keeps what belongs to it.
    """

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)
    folder: Path = Path()

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What `/v1/cache` says of each, by name."""
        shown = httpx.get(f"{self.url}/v1/cache", timeout=60).json()["replicas"]
        return {replica["name"]: replica for replica in shown}

    def processes(self) -> list[psutil.Process]:
        """All that belong to it: the command itself, Ray's own, and the replicas."""
        command = psutil.Process(self.process.pid)
        return [command, *command.children(recursive=True)]

    def engine_processes(self) -> list[psutil.Process]:
        """The replicas', the oldest first."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "ServeReplica:radixkv:engine" in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())


@contextlib.contextmanager
def replica_server(*options: str) -> Iterator[ReplicaServer]:
    """One on a free port, until the block is left; nothing of it is left then."""
    command = [sys.executable, "-m", "radixkv", "serve", *options, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    children: list[psutil.Process] = []
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"replicas of .* at (http://\S+)", line):
                break
        else:
            raise AssertionError("it did not start:\n" + "".join(lines))
        # Nobody reads on: what it writes from now on goes nowhere, and never fills the pipe.
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        server = ReplicaServer(process, found[1], lines)
        yield server
        children = server.processes()[1:]
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
        drain.wait(30)
        _, left = psutil.wait_procs(children, 20)
        assert not left, [" ".join(one.cmdline()) for one in left]
    finally:
        if process.poll() is None:
            children = children or psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.stdout.close()


def until(condition: Callable[[], Any], seconds: float) -> float:
    """Seconds until it was so."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it never came to that"
        time.sleep(0.02)
    return time.monotonic() - begun


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
