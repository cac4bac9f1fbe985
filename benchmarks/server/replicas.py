"""Replicas on Ray Serve beside one server: what the front costs, memory, a killed replica, hits.

One server and N replicas (of which each has the N-th part of the blocks) serve the same model at the same
time; requests go to one and the other in turns. Then a replica is killed while requests run.

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
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
from rich.progress import track

from benchmarks.figures import write_figures

WORDS = ["river", "stone", "window", "letter", "garden", "market", "engine", "paper", "winter", "bridge"]


class Server:
    """`radixkv serve` as a process; `url` once it is ready."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "radixkv", "serve", *options, "--port", "0", "--no-access-log"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.url = ""
        for line in self.process.stdout:
            if "http://" in line:
                self.url = "http://" + line.split("http://")[1].split()[0].rstrip("/").removesuffix("/v1")
                self.url = "/".join(self.url.split("/")[:3])
                break
        assert self.url, "the server did not start"
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def processes(self) -> list[psutil.Process]:
        command = psutil.Process(self.process.pid)
        return [command, *command.children(recursive=True)]

    def memory_mb(self) -> float:
        """Proportional set size of all its processes."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total / 1e6

    def replicas(self) -> dict[str, dict[str, Any]]:
        shown = httpx.get(f"{self.url}/v1/cache", timeout=60).json()["replicas"]
        return {replica["name"]: replica for replica in shown}

    def engines(self) -> list[psutil.Process]:
        return [one for one in self.processes() if "ServeReplica:radixkv:engine" in " ".join(one.cmdline())]

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


def families(server: Server, seed: int, num_families: int, turns: int) -> float:
    """Share of prompt tokens found in the cache, over families of prompts that share a beginning."""
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

    _together(work, 4)
    return cached / asked


def _together(work: Callable[[], None], number: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def traffic(server: Server, counts: dict[str, int]) -> Iterator[None]:
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

    threads = [threading.Thread(target=target) for target in (ask, ask, follow, follow)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def kill_one(server: Server, number: int) -> dict[str, Any]:
    """Kill a replica under traffic: what failed, and how soon it was forgotten and replaced."""
    counts: dict[str, int] = {}
    with traffic(server, counts):
        time.sleep(5)
        begun = time.monotonic()
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        forgotten = _wait(lambda: _taking(server) < number, begun)
        replaced = _wait(lambda: _taking(server) == number, begun)
    return {"forgotten_s": forgotten, "replaced_s": replaced, "failed": 0, **counts}


def replaced_when_idle(server: Server, number: int) -> float:
    """Seconds from the end of a replica to another in its place, without traffic."""
    begun = time.monotonic()
    os.kill(server.engines()[0].pid, signal.SIGKILL)
    _wait(lambda: _taking(server) < number, begun)
    return _wait(lambda: _taking(server) == number, begun)


def _taking(server: Server) -> int:
    return sum(replica["takes_requests"] for replica in server.replicas().values())


def _wait(condition: Callable[[], bool], begun: float, seconds: float = 180.0) -> float:
    while not condition():
        assert time.monotonic() - begun < seconds, "it never came to that"
        time.sleep(0.05)
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=800, help="of all replicas together")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    number = options.replicas
    each = ("--num-blocks", str(options.blocks // number), "--threads", "1")
    several = Server(options.model, "--replicas", str(number), *each)
    figures: dict[str, Any] = {"replicas": number, "blocks": options.blocks}
    try:
        _wait(lambda: _taking(several) == number, time.monotonic())
        figures["memory_mb_idle"] = several.memory_mb()
        print(figures, flush=True)
        one = Server(options.model, "--num-blocks", str(options.blocks), "--threads", "1")
        try:
            figures |= overhead(one, several, options.rounds)
            print(figures, flush=True)
            rates = [(families(one, seed, 12, 6), families(several, seed, 12, 6)) for seed in range(2)]
            figures["hit_rate_one"] = statistics.mean(rate for rate, _ in rates)
            figures["hit_rate_replicas"] = statistics.mean(rate for _, rate in rates)
            print(figures, flush=True)
        finally:
            one.close()
        figures["memory_mb_used"] = several.memory_mb()
        print(figures, flush=True)
        figures["killed"] = kill_one(several, number)
        figures["replaced_when_idle_s"] = replaced_when_idle(several, number)
    finally:
        several.close()
    print(json.dumps(figures, indent=2))
    write_figures(options.json, "replicas", figures)


if __name__ == "__main__":
    main()
