# SPDX-License-Identifier: Apache-2.0
"""Replicas on Ray Serve beside one server: front, memory, hits, aborts, kills, scaling.

One server and N replicas (of which each has the N-th part of the blocks) serve the same model at the same
time; requests go to one and the other in turns. Then replicas are killed, while requests run and while none
does. At last replicas come and leave under streams.

    python -m benchmarks.replicas
    python -m benchmarks.replicas --replicas 2 --blocks 800 --json replicas.json

Needs radixkv[ray].
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
from rich.progress import track

from benchmarks.figures import write_figures

WORDS = ["river", "stone", "window", "letter", "garden", "market", "engine", "paper", "winter", "bridge"]


# In the environment of all processes of a server: the engines' are nobody's children.
_MARK = "RADIXKV_BENCHMARK_SERVER"


class Server:
    """`radixkv serve` as a process; `url` once it is ready."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "radixkv", "serve", *options, "--port", "0", "--no-access-log"]
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, _MARK: self._mark},
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"http://[^/\s]+", line):
                self.url = found[0]
                break
        else:
            raise AssertionError("the server did not start")
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found

    def memory_mb(self) -> float:
        """Proportional set size of all its processes."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total / 1e6

    def cache(self) -> dict[str, Any]:
        shown: dict[str, Any] = httpx.get(f"{self.url}/v1/cache", timeout=60).json()
        return shown

    def engines(self) -> list[psutil.Process]:
        """The processes that compute."""
        return [process for process in self.processes() if process.name() == "radixkv-engine"]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


def body(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **fields}


def overhead(one: Server, several: Server, rounds: int) -> dict[str, float]:
    """Milliseconds that the front adds, medians: to a request of one token, and to each chunk of a stream."""
    prompt = " ".join(WORDS * 4)
    clients = {server: httpx.Client(base_url=server.url, timeout=120) for server in (one, several)}
    took: dict[Server, list[float]] = {one: [], several: []}
    chunks: dict[Server, list[float]] = {one: [], several: []}
    for client in clients.values():
        for _ in range(5):
            client.post("/v1/completions", json=body(prompt, 1))
    for _ in track(range(rounds), description="requests"):
        for server, client in clients.items():
            begun = time.perf_counter()
            client.post("/v1/completions", json=body(prompt, 1)).raise_for_status()
            took[server].append(1000 * (time.perf_counter() - begun))
    for _ in track(range(max(5, rounds // 10)), description="streams"):
        for server, client in clients.items():
            with client.stream("POST", "/v1/completions", json=body(prompt, 48, stream=True)) as answer:
                lines = answer.iter_lines()
                arrivals = [time.perf_counter() for line in lines if line.startswith("data: {")]
            chunks[server].append(1000 * (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))
    return {
        "request_ms": statistics.median(took[one]),
        "request_overhead_ms": statistics.median(took[several]) - statistics.median(took[one]),
        "chunk_ms": statistics.median(chunks[one]),
        "chunk_overhead_ms": statistics.median(chunks[several]) - statistics.median(chunks[one]),
    }


def families(server: Server, seed: int, clients: int, num_families: int = 12, turns: int = 6) -> float:
    """Share of prompt tokens found in the cache, over families of prompts that share a beginning.

    More clients than replicas keep these busy: then a prefix is computed twice where that is sooner.
    """
    numbers = random.Random(seed)
    beginnings = [" ".join(numbers.choices(WORDS, k=150)) for _ in range(num_families)]
    order = [family for family in range(num_families) for _ in range(turns)]
    numbers.shuffle(order)
    prompts = [f"{beginnings[family]} {' '.join(numbers.choices(WORDS, k=20))}" for family in order]
    cached = asked = 0
    lock, left = threading.Lock(), iter(prompts)

    def work() -> None:
        nonlocal cached, asked
        while True:
            with lock:
                prompt = next(left, None)
            if prompt is None:
                return
            usage = httpx.post(f"{server.url}/v1/completions", json=body(prompt, 4), timeout=300).json()[
                "usage"
            ]
            with lock:
                asked += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]

    _together(work, clients)
    return cached / asked


def _together(work: Callable[[], None], number: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def traffic(server: Server, counts: dict[str, int], *, asking: int = 2, following: int = 2) -> Iterator[None]:
    """Requests and streams beside the block, counted by how they ended."""
    stop, lock = threading.Event(), threading.Lock()

    def note(name: str) -> None:
        with lock:
            counts[name] = counts.get(name, 0) + 1

    def ask() -> None:
        while not stop.is_set():
            prompt = " ".join(random.choices(WORDS, k=40))
            try:
                answer = httpx.post(f"{server.url}/v1/completions", json=body(prompt, 8), timeout=300)
                note("answered" if answer.status_code == 200 else "failed")
            except httpx.HTTPError:
                note("failed")

    def follow() -> None:
        while not stop.is_set():
            prompt, lines = " ".join(random.choices(WORDS, k=40)), []
            try:
                asked = httpx.stream(
                    "POST", f"{server.url}/v1/completions", json=body(prompt, 60, stream=True), timeout=300
                )
                with asked as answer:
                    lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
            except httpx.HTTPError:
                note("streams_cut_off")
                continue
            if lines and lines[-1] == "data: [DONE]":
                note("streams_whole")
            else:
                note("streams_with_error_event" if len(lines) > 1 else "failed")

    threads = [threading.Thread(target=target) for target in [ask] * asking + [follow] * following]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def aborted(server: Server, times: int) -> float:
    """Milliseconds from a reader's leaving until its engine says that it runs nothing, asked from outside."""
    took = []
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def runs() -> int:
            count: int = client.get("/v1/cache").json()["counters"]["running_requests"]
            return count

        for number in range(times):
            leaving = httpx.Client(base_url=server.url, timeout=120)
            asked = body(f"{number} tell", 300, stream=True)
            with leaving.stream("POST", "/v1/completions", json=asked) as answer:
                lines = answer.iter_lines()  # kept: when it goes, so does the connection
                next(lines)
                while not runs():
                    pass
                begun = time.perf_counter()
            leaving.close()
            while runs():
                pass
            took.append(1000 * (time.perf_counter() - begun))
    return statistics.median(took)


def kill_one(server: Server, number: int) -> dict[str, float]:
    """Kill an engine: how soon it was forgotten, and another in its place."""
    begun = time.monotonic()
    os.kill(server.engines()[0].pid, signal.SIGKILL)
    forgotten = _wait(lambda: _taking(server) < number, begun)
    replaced = _wait(lambda: _taking(server) == number, begun)
    return {"forgotten_s": forgotten, "replaced_s": replaced}


def killed(server: Server, number: int, times: int) -> dict[str, Any]:
    """Kill engines under traffic: what failed, and how long it took."""
    counts = {"answered": 0, "failed": 0}
    kills = []
    with traffic(server, counts):
        for _ in range(times):
            time.sleep(4)
            kills.append(kill_one(server, number))
    return {**_medians(kills), "kills": kills, **counts}


def scaled_down(model: str, blocks: int) -> dict[str, int]:
    """Streams that were cut while a second replica came and left."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("[replicas]\nmax_replicas = 2\ntarget_queue_s = 0.05\nscale_down_after_s = 3\n")
        file.flush()
        bounds = ("--replicas", "1", "--config", file.name)
        server = Server(model, *bounds, "--num-blocks", str(blocks), "--threads", "1")
    counts: dict[str, int] = {}
    try:
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                prompt = " ".join(random.choices(WORDS, k=300))
                httpx.post(f"{server.url}/v1/completions", json=body(prompt, 1), timeout=300)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            _wait(lambda: _taking(server) == 2, time.monotonic())
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        with traffic(server, counts, asking=0, following=3):
            _wait(lambda: len(server.cache()["replicas"]) == 1, time.monotonic())
    finally:
        server.close()
    whole = counts.pop("streams_whole", 0)
    return {"streams": whole + sum(counts.values()), "cut": sum(counts.values())}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _taking(server: Server) -> int:
    return sum(replica["takes_requests"] for replica in server.cache()["replicas"])


def _wait(condition: Callable[[], bool], begun: float, seconds: float = 180.0) -> float:
    while not condition():
        assert time.monotonic() - begun < seconds, "it never came to that"
        time.sleep(0.05)
    return time.monotonic() - begun


def _tell(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=800, help="of all replicas together")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--kills", type=int, default=3, help="under traffic, and as many without")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    number = options.replicas
    each = ("--num-blocks", str(options.blocks // number), "--threads", "1")
    figures: dict[str, Any] = {"replicas": number, "blocks": options.blocks, "load_before": os.getloadavg()}
    begun = time.monotonic()
    several = Server(options.model, "--replicas", str(number), *each)
    try:
        _wait(lambda: _taking(several) == number, time.monotonic())
        figures["start_s"] = time.monotonic() - begun
        figures["memory_mb_idle"] = several.memory_mb()
        _tell(figures)
        one = Server(options.model, "--num-blocks", str(options.blocks), "--threads", "1")
        try:
            figures |= overhead(one, several, options.rounds)
            _tell(figures)
            for name, clients in (("one_client", 1), ("two_clients", 2), ("four_clients", 4)):
                figures[f"hit_rate_{name}"] = {
                    "one_server": families(one, clients, clients),
                    "replicas": families(several, clients, clients),
                }
            _tell(figures)
        finally:
            one.close()
        figures["memory_mb_used"] = several.memory_mb()
        figures["abort_ms"] = aborted(several, 10)
        _tell(figures)
        figures["killed"] = killed(several, number, options.kills)
        _tell(figures)
        figures["killed_when_idle"] = _medians([kill_one(several, number) for _ in range(options.kills)])
        figures["memory_mb_after_kills"] = several.memory_mb()
        _tell(figures)
    finally:
        several.close()
    figures["scaled_down"] = scaled_down(options.model, options.blocks // number)
    figures["load_after"] = os.getloadavg()
    print(json.dumps(figures, indent=2))
    write_figures(options.json, "replicas", figures)


if __name__ == "__main__":
    main()
