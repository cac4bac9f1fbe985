# SPDX-License-Identifier: Apache-2.0
"""`radixkv serve --replicas N` as a process on a Ray cluster of its own, and its replicas' processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from free_ports import free_ports
from waiting import until

#: An environment variable. The processes of engines are nobody's children.
MARK = "RADIXKV_TEST_SERVER"


@dataclass
class ReplicaServer:
    """Attributes:
    lines: what it wrote before it was ready.
    mark: in the environment of all its processes.
    folder: where a test keeps what belongs to it.
    """

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)
    mark: str = ""
    folder: Path = Path()

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What `/v1/cache` says of each, by name."""
        shown = httpx.get(f"{self.url}/v1/cache", timeout=60).json()["replicas"]
        return {replica["name"]: replica for replica in shown}

    def processes(self) -> list[psutil.Process]:
        """All that belong to it: the command itself, Ray's own, and the replicas."""
        return marked(self.mark)

    def engine_processes(self) -> list[psutil.Process]:
        """The engines', the oldest first."""
        return self._named(lambda process: process.name() == "radixkv-engine")

    def replica_processes(self) -> list[psutil.Process]:
        """Ray's, that watch one each; the oldest first."""
        return self._named(lambda process: "ServeReplica:radixkv:engine" in " ".join(process.cmdline()))

    def _named(self, is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if is_one(process):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())


def marked(mark: str) -> list[psutil.Process]:
    """The processes with this in their environment, but for those that have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


@contextlib.contextmanager
def replica_server(*options: str) -> Iterator[ReplicaServer]:
    """One on a free port, until the block is left; nothing of it is left then."""
    command = [sys.executable, "-m", "radixkv", "serve", *options, "--port", "0"]
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, MARK: mark},
    )
    assert process.stdout is not None
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
        yield ReplicaServer(process, found[1], lines, mark)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
        drain.wait(30)
        _, left = psutil.wait_procs(marked(mark), 20)
        assert not left, [" ".join(one.cmdline()) for one in left]
    finally:
        for left_one in marked(mark):
            with contextlib.suppress(psutil.Error):
                left_one.kill()
        process.wait()
        process.stdout.close()


@dataclass
class RayCluster:
    """Attributes:
    process: `ray start --head`.
    address, dashboard: for `--ray-address`, and for `serve`.
    """

    process: subprocess.Popen[bytes]
    address: str
    dashboard: str

    def serve(self, *arguments: str) -> None:
        """The command `serve` of Ray Serve."""
        command = [str(Path(sys.executable).with_name("serve")), *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def deploy(self, config: dict[str, Any], path: Path) -> None:
        """A config file, kept at `path`."""
        path.write_text(yaml.safe_dump(config))
        self.serve("deploy", str(path), "--address", self.dashboard)


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster of one machine with four CPUs, until the block is left."""
    port, dashboard, agent = free_ports(3)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *("--num-cpus", "4", "--node-ip-address", "127.0.0.1", "--port", str(port)),
            *("--dashboard-port", str(dashboard), "--dashboard-agent-listen-port", str(agent)),
            *("--disable-usage-stats", "--object-store-memory", str(80 * 1024 * 1024)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, MARK: mark},
    )
    try:
        cluster = RayCluster(process, f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}")
        until(lambda: _answers(f"{cluster.dashboard}/api/serve/applications/"), 120)
        yield cluster
        process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(marked(mark), 30)
        assert not left, [" ".join(one.cmdline()) for one in left]
    finally:
        for left_one in marked(mark):
            with contextlib.suppress(psutil.Error):
                left_one.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False
