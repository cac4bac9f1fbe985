# SPDX-License-Identifier: Apache-2.0
"""Do scheduling, detokenisation and HTTP hold up the model?

    python -m benchmarks.overlap [--batch 8] [--tokens 128] [--rounds 3] [--json FILE] [-- serve options]

Starts `radixkv serve` with the embedded model, keeps `--batch` streams open at once over HTTP, and reads from
/metrics what happened meanwhile:

    step gap         time between two model calls while work waited, as a share of the time per step
                     (gap / (gap + model)); target: under 5 %
    loop lag p99     how late the server's event loop wakes up a timer; target: under 50 ms

The clients run in this process, on the same processors as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv.cli.bench.server_process import WORDS, started_server

TARGET_GAP, TARGET_LAG_MS = 0.05, 50.0
COUNTERS = ("model_seconds", "step_gap_seconds", "engine_steps", "generated_tokens")


async def stream(client: httpx.AsyncClient, model: str, prompt: str, tokens: int) -> int:
    """One streamed completion; returns its number of events."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    events = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            events += line.startswith("data: {")
    return events


async def read_metrics(client: httpx.AsyncClient) -> dict[str, Any]:
    """Counters, and the lag's histogram as (upper bound in s, probes up to it)."""
    await client.get("/metrics")  # the first reading lets an idle engine take a fresh snapshot
    text = (await client.get("/metrics")).text
    found: dict[str, Any] = {}
    for name in COUNTERS:
        value = re.search(rf"^radixkv_{name}_total (\S+)$", text, re.MULTILINE)
        assert value is not None, f"/metrics has no {name}"
        found[name] = float(value[1])
    buckets = re.findall(r'radixkv_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
    found["lag"] = [(float(bound), float(count)) for bound, count in buckets]
    return found


async def one_round(
    client: httpx.AsyncClient, model: str, batch: int, tokens: int, seed: int
) -> dict[str, Any]:
    """`batch` streams at once, from start to end."""
    source = random.Random(seed)
    prompts = [" ".join(source.choice(WORDS) for _ in range(40)) for _ in range(batch)]
    before = await read_metrics(client)
    started = time.perf_counter()
    await asyncio.gather(*(stream(client, model, prompt, tokens) for prompt in prompts))
    wall = time.perf_counter() - started
    after = await read_metrics(client)
    spent = {name: after[name] - before[name] for name in COUNTERS}
    lag = [(bound, a - b) for (bound, a), (_, b) in zip(after["lag"], before["lag"], strict=True)]
    probes = lag[-1][1]
    return {
        "step_gap_share": spent["step_gap_seconds"] / (spent["step_gap_seconds"] + spent["model_seconds"]),
        "step_ms": 1000 * (spent["step_gap_seconds"] + spent["model_seconds"]) / spent["engine_steps"],
        "steps": spent["engine_steps"],
        "tokens_per_s": spent["generated_tokens"] / wall,
        "loop_lag_p99_ms": 1000 * next(bound for bound, count in lag if count >= 0.99 * probes),
        "lag_probes": probes,
        "wall_s": wall,
    }


async def measure(url: str, batch: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=batch + 2)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await one_round(client, model, batch, 8, seed=0)  # warms up
        return [await one_round(client, model, batch, tokens, seed=1 + i) for i in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8, help="streams at once")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("serve", nargs="*", help="options of radixkv serve, after --")
    arguments = parser.parse_args()
    with started_server(arguments.serve) as url:
        rounds = asyncio.run(measure(url, arguments.batch, arguments.tokens, arguments.rounds))
    table = Table(title=f"{arguments.batch} streams at once, embedded model")
    for column in ("round", "step", "step gap", "loop lag p99", "tokens/s"):
        table.add_column(column, justify="right")
    for i, row in enumerate(rounds):
        table.add_row(
            str(i + 1),
            f"{row['step_ms']:.1f} ms",
            f"{row['step_gap_share']:.2%}",
            f"<= {row['loop_lag_p99_ms']:g} ms",
            f"{row['tokens_per_s']:.1f}",
        )
    Console().print(table)
    gap = statistics.median(row["step_gap_share"] for row in rounds)
    lag = statistics.median(row["loop_lag_p99_ms"] for row in rounds)
    good = {True: "ok", False: "MISSED"}
    print(f"step gap {gap:.2%} of step time (target: under {TARGET_GAP:.0%}): {good[gap < TARGET_GAP]}")
    print(f"loop lag p99 {lag:g} ms (target: under {TARGET_LAG_MS:g} ms): {good[lag < TARGET_LAG_MS]}")
    write_figures(arguments.json, "overlap", {"batch": arguments.batch, "rounds": rounds})


if __name__ == "__main__":
    main()
