"""`radixkv proxy` with several upstreams: requests go where their prefixes are, and none fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_process import paged_engine
from live_server import live_server
from running_proxy import RunningProxy, running_proxy

from radixkv.errors import ConfigError
from radixkv_server.proxy.fleet import Fleet, FleetMember

pytest.importorskip("zmq", reason="block events need the extra radixkv[events]")
pytest.importorskip("msgspec", reason="block events need the extra radixkv[events]")

SERVER = """
import sys
sys.path[:0] = {path!r}
from engine_process import paged_engine
from radixkv_server.app import serve_engine
from radixkv_server.settings import ServerSettings
engine = paged_engine(block_size=16, budget=256, kv_events={events!r})
settings = ServerSettings(port={port}, access_log=False)
serve_engine(engine, settings, on_ready=lambda *_: print("ready", flush=True))
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass
class Running:
    """A real server in a process of its own, as `--upstream` names it."""

    upstream: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[Running]]:
    running = []
    try:
        for _ in range(count):
            port, stream, replay = free_ports(3)
            told = f"tcp://127.0.0.1:{stream},replay=tcp://127.0.0.1:{replay}"
            path = [str(Path(__file__).parents[2] / "support"), *sys.path]
            code = SERVER.format(path=path, events=told, port=port)
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            running.append(Running(f"http://127.0.0.1:{port},events={told}", process))
        for one in running:
            assert one.process.stdout is not None
            assert one.process.stdout.readline().startswith("ready")
        yield running
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
            assert one.process.stdout is not None
            one.process.stdout.close()


@contextlib.contextmanager
def routing(upstreams: list[str]) -> Iterator[RunningProxy]:
    first, *others = upstreams
    with running_proxy(first, *(part for other in others for part in ("--upstream", other))) as proxy:
        yield proxy


@contextlib.contextmanager
def servers_here(count: int, *, events: bool, num_blocks: int = 512) -> Iterator[list[str]]:
    """The `--upstream` of servers in this process, which are quicker to start."""
    with contextlib.ExitStack() as stack:
        upstreams = []
        for _ in range(count):
            stream, replay = free_ports(2)
            told = f"tcp://127.0.0.1:{stream},replay=tcp://127.0.0.1:{replay}" if events else None
            engine = paged_engine(num_blocks=num_blocks, block_size=16, budget=256, kv_events=told)
            stack.callback(lambda engine=engine: asyncio.run(engine.close()))
            url = stack.enter_context(live_server(engine)).url
            upstreams.append(url if told is None else f"{url},events={told}")
        yield upstreams


def letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(count))


def complete(client: httpx.Client, prompt: str, **options: Any) -> tuple[int, int]:
    """Prompt tokens, and those that were cached."""
    body = {"model": "paged-hash", "prompt": prompt, "max_tokens": 2, "temperature": 0, **options}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def hit_rate(url: str, seed: int) -> float:
    """Of families of prompts that share a long beginning, in turns, from two clients at a time."""
    rng = random.Random(seed)
    families = [letters(rng, 320) for _ in range(8)]
    prompts = [rng.choice(families) + letters(rng, 40) for _ in range(100)]
    with httpx.Client(base_url=url, timeout=60) as client:
        counts = [complete(client, prompt) for prompt in prompts]
    return sum(cached for _, cached in counts) / sum(total for total, _ in counts)


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("events", [True, False], ids=["with events", "without events"])
def test_families_are_found_as_in_one_big_server(events: bool) -> None:
    with servers_here(1, events=False, num_blocks=1024) as (big,):
        bound = hit_rate(big, 1)
    with servers_here(2, events=events) as upstreams, routing(upstreams) as proxy:
        found = hit_rate(proxy.url, 1)
        for upstream in upstreams:
            metrics = httpx.get(f"{upstream.partition(',')[0]}/metrics").text
            assert re.search(r"radixkv_computed_prompt_tokens_total [1-9]", metrics), "each has its share"
    assert bound > 0.7
    assert found >= bound - 0.02


@pytest.mark.slow
def test_upstreams_that_end_or_are_killed_fail_no_request_without_a_first_byte() -> None:
    with (
        servers(2) as running,
        servers_here(1, events=True) as others,
        routing([*(one.upstream for one in running), *others]) as proxy,
    ):
        failures: list[str] = []
        done: list[int] = []
        stop = threading.Event()

        def ask(seed: int) -> None:
            rng = random.Random(seed)
            with httpx.Client(base_url=proxy.url, timeout=60) as client:
                while not stop.is_set():
                    try:
                        complete(client, letters(rng, 100))
                        done.append(seed)
                    except (AssertionError, httpx.HTTPError) as error:
                        failures.append(repr(error))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: len(done) > 20)
        # One is told to end and finishes what it has, the other one is given no time for that.
        for one, how in zip(running, (signal.SIGTERM, signal.SIGKILL), strict=True):
            os.kill(one.process.pid, how)
            one.process.wait(30)
            before = len(done)
            until(lambda before=before: len(done) > before + 20)
        stop.set()
        for thread in threads:
            thread.join()
        # Whole answers have their first byte when they are done: nothing of one was sent that failed.
        assert not failures


def test_streams_keep_alive_and_other_routes_go_through() -> None:
    with servers_here(2, events=True) as upstreams, routing(upstreams) as proxy:
        with httpx.Client(base_url=proxy.url, timeout=60) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "paged-hash"
            body = {"model": "paged-hash", "prompt": "hello there", "max_tokens": 8, "stream": True}
            for _ in range(3):
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    lines = [line for line in answer.iter_lines() if line]
                assert lines[-1] == "data: [DONE]"
                assert all(json.loads(line[6:]) for line in lines[:-1])
            assert client.post("/v1/completions", json={"prompt": 1}).status_code == 400
            assert client.get("/nowhere").status_code == 404
        with closing(socket.create_connection(("127.0.0.1", proxy.port))) as raw:
            raw.sendall(b"\x00 no http at all\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "text",
    ["ftp://x", "http://x,speed=1", "http://x,events=nothing", "http://x,events=tcp://127.0.0.1:1,foo=1"],
)
def test_what_is_no_upstream_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        FleetMember.parse(text)


def test_an_upstream_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        Fleet([FleetMember.parse("http://127.0.0.1:1")] * 2)


def test_a_fleet_of_nobody_has_no_upstream() -> None:
    ports = free_ports(2)
    with running_proxy(f"http://127.0.0.1:{ports[0]}", "--upstream", f"http://127.0.0.1:{ports[1]}") as proxy:
        answer = httpx.get(f"{proxy.url}/v1/models", timeout=30)
        assert answer.status_code in (502, 503)
        again = asyncio.run(_twice(proxy.url))
        assert set(again) <= {502, 503}


async def _twice(url: str) -> list[int]:
    async with httpx.AsyncClient(timeout=30) as client:
        return [(await client.get(f"{url}/v1/models")).status_code for _ in range(2)]
