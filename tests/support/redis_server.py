# SPDX-License-Identifier: Apache-2.0
"""A Redis of a test's own, on a socket in a folder; tests without redis-server are skipped, and say so."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

redis = pytest.importorskip("redis", reason="needs the package redis: pip install 'radixkv[redis]'")


class RedisServer:
    """One server; it ends with the test."""

    def __init__(self, folder: str, *options: str) -> None:
        self.socket = f"{folder}/redis.sock"
        self.url = f"unix://{self.socket}"
        self._options = options
        self.client = redis.Redis(unix_socket_path=self.socket, socket_timeout=60)
        self.start()

    def start(self) -> None:
        arguments = ["--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            ["redis-server", *arguments, *self._options], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "ready to accept connections" in line.lower():
                return
        raise AssertionError("redis-server did not start")

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)  # nothing, if it is dead

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A server with these options beside the usual ones."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (apt-get install redis-server)")
    with tempfile.TemporaryDirectory(prefix="rkv") as folder:
        server = RedisServer(folder, *options)
        try:
            yield server
        finally:
            server.client.close()
            server.go_on()
            server.kill()
