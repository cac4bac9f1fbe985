# SPDX-License-Identifier: Apache-2.0
"""`radixkv proxy` with several upstreams: requests go where their prefixes are, and none fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from engine_process import paged_engine
from free_ports import free_ports
from live_server import live_server
from nightly import by_day
from running_proxy import fleet_here, running_proxy
from waiting import until

from radixkv.errors import ConfigError
from radixkv_server.app import serve_engine
from radixkv_server.proxy.fleet import Fleet, FleetMember
from radixkv_server.proxy.upstream import Upstream
from radixkv_server.settings import ServerSettings

pytest.importorskip("zmq", reason="block events need the extra radixkv[events]")
pytest.importorskip("msgspec", reason="block events need the extra radixkv[events]")


@dataclass
class Running:
    """A real server in a process of its own, as `--upstream` names it."""

    upstream: str
    process: Any


def _serve(events: str, port: int, ready: Any) -> None:
    engine = paged_engine(block_size=16, budget=256, kv_events=events)
    settings = ServerSettings(port=port, access_log=False)
    serve_engine(engine, settings, on_ready=lambda *_: ready.set())


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[Running]]:
    context = multiprocessing.get_context("forkserver")
    running, waited = [], []
    try:
        for _ in range(count):
            port, stream, replay = free_ports(3)
            told = f"tcp://127.0.0.1:{stream},replay=tcp://127.0.0.1:{replay}"
            waited.append(context.Event())
            process = context.Process(target=_serve, args=(told, port, waited[-1]), daemon=True)
            process.start()
            running.append(Running(f"http://127.0.0.1:{port},events={told}", process))
        assert all(ready.wait(60) for ready in waited)
        yield running
    finally:
        for one in running:
            one.process.kill()
            one.process.join()


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
    """Of families of prompts that share a long beginning, in turns."""
    rng = random.Random(seed)
    families = [letters(rng, 320) for _ in range(8)]
    prompts = [rng.choice(families) + letters(rng, 40) for _ in range(100)]
    with httpx.Client(base_url=url, timeout=60) as client:
        counts = [complete(client, prompt) for prompt in prompts]
    return sum(cached for _, cached in counts) / sum(total for total, _ in counts)


@pytest.fixture(scope="module")
def bound() -> float:
    """The hit rate of one server with as many blocks as two."""
    with servers_here(1, events=False, num_blocks=1024) as (big,):
        return hit_rate(big, 1)


@pytest.mark.slow
@pytest.mark.parametrize("events", by_day([True, False], False), ids=["with events", "without events"])
def test_families_are_found_as_in_one_big_server(events: bool, bound: float) -> None:
    with servers_here(2, events=events) as upstreams, fleet_here(upstreams) as proxy:
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
        fleet_here([*(one.upstream for one in running), *others]) as proxy,
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
        until(lambda: len(done) > 8)
        # One is told to end and finishes what it has, the other one is given no time for that.
        for one, how in zip(running, (signal.SIGTERM, signal.SIGKILL), strict=True):
            os.kill(one.process.pid, how)
            one.process.join(30)
            before = len(done)
            until(lambda before=before: len(done) > before + 8)
        stop.set()
        for thread in threads:
            thread.join()
        # Whole answers have their first byte when they are done: nothing of one was sent that failed.
        assert not failures


@pytest.mark.nightly
def test_streams_keep_alive_and_other_routes_go_through() -> None:
    with (
        servers_here(2, events=True) as upstreams,
        running_proxy(upstreams[0], "--upstream", upstreams[1]) as proxy,
    ):
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


@contextlib.contextmanager
def broken_upstream(
    after_events: int, goes_on: threading.Event | None = None, begins: threading.Event | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """A server that is killed in every answer, after so many events; its address, and what it was asked.

    Args:
        goes_on: what it waits for before that.
        begins: what it waits for before it answers.
    """
    asked: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := self.request.recv(65536)):
                    return
                head += data
            if head.startswith(b"GET"):
                self.request.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            asked.append(head)
            if begins is not None:
                begins.wait(60)
            if after_events:
                event_stream = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
                self.request.sendall(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % event_stream)
            for _ in range(after_events):
                self.request.sendall(b"a\r\ndata: {}\n\n\r\n")
            if goes_on is not None:
                goes_on.wait(60)
            # As of a process that is killed: a reset.
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_stream_that_breaks_is_an_error_and_is_not_asked_again() -> None:
    with (
        broken_upstream(3) as (one, asked),
        broken_upstream(3) as (other, asked_too),
        fleet_here([one, other]) as proxy,
        httpx.Client(base_url=proxy.url, timeout=30) as client,
    ):
        body = {"model": "m", "prompt": "x" * 100, "stream": True}
        for _ in range(4):
            with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                    answer.read()
        assert len(asked) + len(asked_too) == 4
        until(lambda: not any(state.running or state.queue_s for state in proxy.fleet.states()))


def test_what_breaks_before_the_first_byte_is_asked_of_another_one() -> None:
    with (
        broken_upstream(0) as (broken, asked),
        servers_here(1, events=False) as (well,),
        fleet_here([broken, well]) as proxy,
        httpx.Client(base_url=proxy.url, timeout=30) as client,
    ):
        for number in range(8):
            assert complete(client, f"prompt {number}")
        assert len(asked) <= 8
        until(lambda: not any(state.running or state.queue_s for state in proxy.fleet.states()))


def test_answers_of_a_killed_server_end_and_nothing_hangs() -> None:
    with servers(1) as (killed,), fleet_here([killed.upstream, "http://127.0.0.1:9"]) as proxy:
        ends: dict[bool, list[str]] = {True: [], False: []}
        begun = threading.Semaphore(0)

        def ask(streams: bool) -> None:
            body = {"model": "paged-hash", "prompt": "on and on", "max_tokens": 3000, "stream": streams}
            body["ignore_eos"] = True
            try:
                with httpx.stream("POST", f"{proxy.url}/v1/completions", json=body, timeout=60) as answer:
                    for _ in answer.iter_lines():
                        begun.release()
                ends[streams].append(str(answer.status_code))
            except httpx.TransportError as error:
                ends[streams].append(type(error).__name__)

        threads = [threading.Thread(target=ask, args=(streams,)) for streams in (True, False, True, False)]
        for thread in threads:
            thread.start()
        assert all(begun.acquire(timeout=30) for _ in range(2))
        until(lambda: proxy.fleet.states()[0].running == 4)
        killed.process.kill()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        # Where nothing had come, the proxy answers itself: no upstream is left.
        assert set(ends[False]) <= {"502", "503"}
        assert {"ReadError", "RemoteProtocolError"} & set(ends[True])
        assert [len(some) for some in ends.values()] == [2, 2]
        until(lambda: not any(state.running or state.queue_s for state in proxy.fleet.states()))


def test_the_charge_of_a_request_is_dropped_at_its_first_byte() -> None:
    goes_on, begins = threading.Event(), threading.Event()
    with (
        broken_upstream(1, goes_on, begins) as (answers, _),
        broken_upstream(0, goes_on) as (waits, _),
        fleet_here([answers, waits]) as proxy,
    ):
        asked: list[str] = []

        def ask(text: str) -> None:
            body = {"model": "m", "prompt": text * 300_000, "stream": True}  # a queue of half a minute
            with contextlib.suppress(httpx.TransportError):
                asked.append(httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=60).text)

        threads = [threading.Thread(target=ask, args=(text,)) for text in "ab"]
        for thread in threads:
            thread.start()
        try:
            until(lambda: [state.running for state in proxy.fleet.states()] == [1, 1])
            begins.set()
            until(lambda: proxy.fleet.states()[0].queue_s == 0)
            assert [state.running for state in proxy.fleet.states()] == [1, 1]
            assert proxy.fleet.states()[1].queue_s > 0
        finally:
            begins.set()
            goes_on.set()
            for thread in threads:
                thread.join(30)
        until(lambda: not any(state.running or state.queue_s for state in proxy.fleet.states()))


def test_an_upstream_that_comes_back_empty_is_known_to_be_empty() -> None:
    port, stream, replay = free_ports(3)
    told = f"tcp://127.0.0.1:{stream},replay=tcp://127.0.0.1:{replay}"

    @contextlib.contextmanager
    def incarnation() -> Iterator[None]:
        engine = paged_engine(num_blocks=512, block_size=16, budget=256, kv_events=told)
        try:
            with live_server(engine, port=port, shutdown_grace_s=0):
                yield
        finally:
            asyncio.run(engine.close())

    with (
        fleet_here([f"http://127.0.0.1:{port},events={told}"]) as proxy,
        httpx.Client(base_url=proxy.url, timeout=60) as client,
    ):

        def state() -> Any:
            return proxy.fleet.states()[0]

        for _ in range(2):
            with incarnation():
                until(lambda: state().health == "healthy" and state().knows == "exact" and not state().blocks)
                assert complete(client, "the same prompt, long enough for blocks " * 3)[1] == 0
                until(lambda: state().blocks > 0)
            until(lambda: state().health == "failed")


def test_connections_to_upstreams_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, connect = [], Upstream.connect

    async def counted(self: Upstream, protocol: asyncio.Protocol) -> None:
        opened.append(str(self))
        await connect(self, protocol)

    monkeypatch.setattr(Upstream, "connect", counted)
    with (
        servers_here(2, events=False) as upstreams,
        fleet_here(upstreams) as proxy,
        httpx.Client(base_url=proxy.url, timeout=30) as client,
    ):
        for number in range(12):
            complete(client, f"prompt {number}")
        assert 1 <= len(opened) <= 2


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
    with fleet_here([f"http://127.0.0.1:{port}" for port in ports]) as proxy:
        answer = httpx.get(f"{proxy.url}/v1/models", timeout=30)
        assert answer.status_code in (502, 503)
        again = asyncio.run(_twice(proxy.url))
        assert set(again) <= {502, 503}


async def _twice(url: str) -> list[int]:
    async with httpx.AsyncClient(timeout=30) as client:
        return [(await client.get(f"{url}/v1/models")).status_code for _ in range(2)]
