"""What somebody who looks at the console's tree costs a stream that is being decoded.

Streams of one request follow one another, every other one while a viewer in a process of its own does what
the page does: it listens for requests and asks for the tree, up to 2,000 nodes, at most four times a second,
and the more rarely the longer an answer takes. The cache holds `--nodes` nodes, of tokens that nobody
computed, so that the tree is as large as after a long day. Before that, on an idle engine, the CPU time
of one snapshot: of the engine's thread, which reads the nodes between two steps, and of all threads for a
whole answer. That says something on a busy machine, too; the times between tokens do not.

    python benchmarks/console_overhead.py --nodes 200 --pairs 8 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

from radixkv import EngineConfig
from radixkv.async_engine import AsyncEngine
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
        began = time.monotonic()
        client.get(url + "/v1/cache/tree?limit=2000").raise_for_status()
        spent = time.monotonic() - began
        time.sleep(max(0.25 - spent, min(5, 60 * spent)))
"""
STREAM_TOKENS = 64
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
        walk = inner.cache.tree.walk(shown_tokens=48, most_nodes=20_000)
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


def stream(client: httpx.Client, number: int) -> tuple[float, float]:
    """Milliseconds and CPU milliseconds of this process between two tokens of a stream."""
    body = {
        "prompt": f"Story {number}: once",
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "seed": 1,
    }
    times, spent = [], []
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                spent.append(time.process_time())
    return 1000 * (times[-1] - times[0]) / STREAM_TOKENS, 1000 * (spent[-1] - spent[0]) / STREAM_TOKENS


def measure(url: str, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """The streams' figures, alone and watched, one after the other."""
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "watched": []}
    with httpx.Client(base_url=url, timeout=120) as client:
        stream(client, -1)
        for number in range(pairs):
            for kind in ("alone", "watched") if number % 2 else ("watched", "alone"):
                viewer = None
                if kind == "watched":
                    viewer = subprocess.Popen([sys.executable, "-c", VIEWER, url, str(LONGEST_S)])
                    time.sleep(2)  # it imports
                found[kind].append(stream(client, number))
                if viewer is not None:
                    viewer.terminate()
                    viewer.wait()
    return found


def report(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians, and the median over the pairs of what the viewer adds."""
    shown: dict[str, Any] = {}
    for place, unit in ((0, "ms_per_token"), (1, "cpu_ms_per_token")):
        one = [figures[place] for figures in found["alone"]]
        other = [figures[place] for figures in found["watched"]]
        ratios = [watched / alone - 1 for alone, watched in zip(one, other, strict=True)]
        shown[unit] = {
            "alone": round(statistics.median(one), 3),
            "watched": round(statistics.median(other), 3),
            "added_percent_median": round(100 * statistics.median(ratios), 2),
            "added_percent_all": [round(100 * ratio, 1) for ratio in ratios],
        }
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
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
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
