# SPDX-License-Identifier: Apache-2.0
"""What somebody who looks at the console's tree costs a stream that is being decoded.

Streams of one request follow one another; during one half of each a viewer in a process of its own does what
the page does: it listens for requests and asks for the tree, up to 2,000 nodes, at most four times a second,
and the more rarely the more nodes there are. The cache holds `--nodes` nodes, of tokens that nobody
computed, so that the tree is as large as after a long day. Before that, on an idle engine, the CPU time
of one snapshot: of the engine's thread, which reads the nodes between two steps, and of all threads for a
whole answer. That says something on a busy machine, too; the times between tokens do not.

    python -m benchmarks.console_overhead --nodes 200 --pairs 8 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.figures import write_figures
from radixkv import EngineConfig
from radixkv.cache.reporting.tree_walk import TreeWalk
from radixkv.entrypoints.async_engine import AsyncEngine
from radixkv_server.app import make_server
from radixkv_server.http.listener import bind_socket
from radixkv_server.settings import ServerSettings

VIEWER = """
import sys, threading, time, httpx
url, ends = sys.argv[1], time.monotonic() + float(sys.argv[2])
def listen():
    with httpx.Client(timeout=None) as client, client.stream("GET", url + "/v1/cache/requests?limit=20",
            headers={"accept": "text/event-stream"}) as answer:
        for _ in answer.iter_lines():
            pass
threading.Thread(target=listen, daemon=True).start()
with httpx.Client(timeout=60) as client:
    while time.monotonic() < ends:
        answer = client.get(url + "/v1/cache/tree?limit=2000").raise_for_status()
        time.sleep(min(2.5, max(0.25, 0.0025 * len(answer.json()["nodes"]))))
"""
STREAM_TOKENS = 400
LEFT_OUT = 10  # tokens at the beginning of each half that are not counted
LONGEST_S = 600


def fill(engine: AsyncEngine, nodes: int) -> None:
    """Put so many nodes into the cache: leaves of 16 tokens below 40 trunks of 32."""

    def put(inner: Any) -> None:
        namespace = engine.cache.namespace()
        for index in range(nodes):
            ids = [index % 40 + 10, *range(100, 131), index // 40 + 10, *range(200, 215)]
            lease = inner.cache.acquire(ids, namespace)
            lease.commit(len(ids))
            lease.release()

    asyncio.run(engine.call(put))


def snapshot_cost(engine: AsyncEngine, url: str, rounds: int = 20) -> dict[str, float]:
    """CPU milliseconds of one snapshot: of the engine's thread, and of the process for the whole answer."""

    def walk(inner: Any) -> float:
        began = time.thread_time()
        walk = TreeWalk(inner.cache.tree, shown_tokens=48, max_nodes=20_000)
        while walk.advance():
            pass
        return time.thread_time() - began

    async def walks() -> list[float]:
        return [await engine.call(walk) for _ in range(rounds)]

    on_thread = 1000 * statistics.median(asyncio.run(walks()))
    answers = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for _ in range(rounds):
            began = time.process_time()
            client.get("/v1/cache/tree", params={"limit": 2000}).raise_for_status()
            answers.append(1000 * (time.process_time() - began))
    return {
        "engine_thread_cpu_ms": round(on_thread, 3),
        "engine_thread_percent_at_4_per_s": round(4 * on_thread / 10, 3),
        "answer_cpu_ms": round(statistics.median(answers), 2),
    }


def stream(url: str, number: int, switch: Callable[[], None]) -> list[tuple[float, float]]:
    """When each token of a stream came, and this process's CPU time until then; `switch` at half time."""
    body = {
        "prompt": f"Story {number}: once",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "seed": 1,
    }
    times: list[tuple[float, float]] = []
    with (
        httpx.Client(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append((time.perf_counter(), time.process_time()))
                if len(times) == STREAM_TOKENS // 2:
                    switch()
    return times


def measure(url: str, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds and CPU milliseconds of a token, watched and alone: the two halves of each stream.

    The viewer is a process that is stopped and continued; which half it watches alternates.
    """
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "watched": []}
    viewer = subprocess.Popen([sys.executable, "-c", VIEWER, url, str(LONGEST_S)])
    try:
        stream(url, -1, lambda: None)
        for number in range(pairs):
            first, then = (signal.SIGCONT, signal.SIGSTOP)[:: 1 if number % 2 else -1]
            viewer.send_signal(first)
            times = stream(url, number, functools.partial(viewer.send_signal, then))
            half = STREAM_TOKENS // 2
            for part, sent in ((times[LEFT_OUT:half], first), (times[half + LEFT_OUT :], then)):
                spent = [1000 * (part[-1][clock] - part[0][clock]) / (len(part) - 1) for clock in (0, 1)]
                found["watched" if sent == signal.SIGCONT else "alone"].append((spent[0], spent[1]))
    finally:
        viewer.kill()
        viewer.wait()
    return found


def report(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians; and what the viewer adds, as the geometric mean over the streams and its standard error."""
    shown: dict[str, Any] = {}
    for place, unit in ((0, "ms_per_token"), (1, "cpu_ms_per_token")):
        one = [figures[place] for figures in found["alone"]]
        other = [figures[place] for figures in found["watched"]]
        logs = [math.log(watched / alone) for alone, watched in zip(one, other, strict=True)]
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
        shown[unit] = {
            "alone": round(statistics.median(one), 3),
            "watched": round(statistics.median(other), 3),
            "added_percent": round(100 * math.expm1(statistics.fmean(logs)), 2),
            "added_percent_median": round(100 * math.expm1(statistics.median(logs)), 2),
            "standard_error_percent": round(100 * error, 2),
        }
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=8, help="of streams; 0: only the snapshots")
    parser.add_argument("--json")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    engine = AsyncEngine.from_config(
        EngineConfig(num_blocks=2 * options.nodes + 400, max_model_len=512, speculation="off")
    )
    fill(engine, options.nodes)
    with bind_socket("127.0.0.1", 0) as sock:
        server = make_server(engine, ServerSettings(port=0, access_log=False))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        while not server.started:
            time.sleep(0.05)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        before = os.getloadavg()[0]
        result: dict[str, Any] = {"nodes": options.nodes, "snapshot": snapshot_cost(engine, url)}
        if options.pairs:
            result |= {"pairs": options.pairs, **report(measure(url, options.pairs))}
        result |= {
            "load_before": round(before, 1),
            "load_after": round(os.getloadavg()[0], 1),
            "note": options.note,
        }
        server.should_exit = True
        thread.join()
    asyncio.run(engine.close())
    print(json.dumps(result, indent=2))
    write_figures(options.json, "console_overhead", result)


if __name__ == "__main__":
    main()
