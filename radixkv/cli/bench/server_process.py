# SPDX-License-Identifier: Apache-2.0
"""Helpers of benchmarks over HTTP: a server of their own, words for prompts, the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.helper_process import MODULE

WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name
"""
WORDS = WORD_LIST.split()


def words(source: random.Random, count: int) -> str:
    """A text of random words."""
    return " ".join(source.choice(WORDS) for _ in range(count))


def processor_name() -> str:
    """The processor's model where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Describe the machine for a reader of the figures."""
    return {
        "platform": platform.platform(),
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


@dataclass
class ServerProcess:
    """A ready `radixkv serve`; its further output can be read."""

    url: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_until(self, start: str) -> list[str]:
        """The lines it prints up to one that begins with `start`."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith(start):
                break
        return lines


@contextlib.contextmanager
def started_process(arguments: list[str]) -> Iterator[ServerProcess]:
    """`radixkv serve` on a free port, once it says that it is ready."""
    command = [*MODULE, "radixkv", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = re.search(r"ready on (http://\S+)", line)
            if found:
                yield ServerProcess(found[1], process)
                break
        else:
            raise SystemExit(f"the server ended with exit code {process.wait()} before it was ready")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def started_server(arguments: list[str]) -> Iterator[str]:
    """`radixkv serve` on a free port; yields its address once it says that it is ready."""
    with started_process(arguments) as server:
        yield server.url
