# SPDX-License-Identifier: Apache-2.0
"""`radixkv proxy` as a process, and in this one, where it is quicker to start."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from radixkv_server.proxy.fleet import Fleet, FleetMember
from radixkv_server.proxy.observer import ObserverSettings
from radixkv_server.proxy.serve import ProxySettings, serve


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
        assert process.wait(120) == 0, proxy.lines
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class FleetHere:
    """A proxy before several upstreams in a thread of this process."""

    fleet: Fleet
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def fleet_here(upstreams: Sequence[str], console_port: int | None = None) -> Iterator[FleetHere]:
    """One before these, as `--upstream` names them, until the block is left."""
    fleet = Fleet([FleetMember.parse(upstream) for upstream in upstreams])
    settings = ProxySettings(fleet, "127.0.0.1", 0, None, 1 << 25)
    observing = ObserverSettings(
        None, False, 1 << 20, 1, bytes(32), "radixkv", "127.0.0.1", console_port, 1 << 26
    )
    opened: list[int] = []
    is_open = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def ready(port: int) -> None:
        opened.append(port)
        is_open.set()

    async def run() -> None:
        stop = asyncio.Event()
        running.append((asyncio.get_running_loop(), stop))
        await serve(settings, observing, ready, stop=stop)
        await asyncio.sleep(0)  # closed transports let go of their sockets in the loop's next turn

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="proxy")
    thread.start()
    try:
        assert is_open.wait(120), "the proxy did not start"
        yield FleetHere(fleet, opened[0])
    finally:
        loop, stop = running[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        assert not thread.is_alive(), "the proxy did not stop"
