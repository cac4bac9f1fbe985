"""`radixkv proxy` as a process."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class RunningProxy:
    """Attributes:
    port: that clients are given.
    lines: that it wrote.
    """

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running_proxy(
    upstream: str,
    *options: str,
    command: Sequence[str] = (sys.executable, "-m", "radixkv", "proxy"),
) -> Iterator[RunningProxy]:
    """One before `upstream`, stopped at the end; what it wrote is in `lines` then."""
    line = [*command, "--upstream", upstream, "--port", "0", *options]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        found = re.match(r"http://.*:(\d+) hands on", first)
        assert found, first + process.stdout.read()
        proxy = RunningProxy(process, int(found[1]), [first])
        yield proxy
        process.send_signal(signal.SIGTERM)
        proxy.lines += process.stdout.read().splitlines()
        assert process.wait(30) == 0, proxy.lines
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
