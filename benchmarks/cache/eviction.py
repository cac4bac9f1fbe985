# SPDX-License-Identifier: Apache-2.0
"""Do the policies hold on load they were not made for? Hit rates on variants of the recorded traces.

    python -m benchmarks.eviction [--policy lru,adaptive] [--traces DIR] [--only NAME] [--json FILE]

Each recorded trace is cut and mixed into others: its halves in time, half and a quarter of its conversations
(all requests that share their first distinct block), two traces merged by time, one after the other, and
capacities between those that docs/eviction.md lists. For each variant and capacity: the share of blocks found
under every policy and by `opt-pin`, one request after another, cold start. Then, over the contended cells
(those where LRU reaches less than 99.5 % of opt-pin):

    geometric mean of the share of opt-pin      target: at least 0.77
    largest loss against LRU, points of blocks  target: at most 0.3
    gain over LRU where agents thrash           target: at least 1.2

"Where agents thrash": the smallest capacity of each variant of the agent trace alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import write_figures
from benchmarks.traces import traces_folder
from radixkv.cli.replay.bounds import offline_optimum
from radixkv.cli.replay.driver import replay
from radixkv.cli.replay.readers import read_trace
from radixkv.cli.replay.trace import Trace, TraceBuilder

CONTENDED = 0.995
TARGETS = {"share of opt-pin": 0.77, "loss to lru": 0.3, "gain when thrashing": 1.2}

Part = tuple[Trace, Sequence[int]]


def select(name: str, *parts: Part) -> Trace:
    """Requests of one or several traces as a trace, in the order of the parts (ids are kept apart)."""
    builder = TraceBuilder(name)
    for number, (trace, requests) in enumerate(parts):
        for request in requests:
            path = [(number, block) for block in trace.path(request).tolist()]
            builder.add(path, input_length=len(path) * trace.block_size)
    return builder.build(parts[0][0].block_size)


def merged(name: str, first: Trace, second: Trace) -> Trace:
    """Two traces on one server, by their times of arrival, each stretched to the same length."""
    builder = TraceBuilder(name)
    requests = []
    for number, trace in enumerate((first, second)):
        times = trace.arrivals - trace.arrivals.min()
        times = times / max(times.max(), 1e-9)
        requests += [(moment, number, request) for request, moment in enumerate(times.tolist())]
    for _, number, request in sorted(requests):
        trace = (first, second)[number]
        path = [(number, block) for block in trace.path(request).tolist()]
        builder.add(path, input_length=len(path) * first.block_size)
    return builder.build(first.block_size)


def conversations(trace: Trace) -> np.ndarray:
    """int64 [requests]: the first block of each request that most others do not begin with."""
    count = np.bincount(trace.block_ids, minlength=trace.num_unique)
    out = np.zeros(trace.num_requests, np.int64)
    for request in range(trace.num_requests):
        path = trace.path(request)
        own = path[count[path] < max(trace.num_requests // 20, 2)]
        out[request] = own[0] if len(own) else -1 - request
    return out


def share_of(trace: Trace, share: float, seed: int) -> list[int]:
    """The requests of a random share of the conversations."""
    keys = conversations(trace)
    chosen = {key for key in np.unique(keys).tolist() if hash_to_unit(key, seed) < share}
    return [request for request, key in enumerate(keys.tolist()) if key in chosen]


def hash_to_unit(key: int, seed: int) -> float:
    """A number in [0, 1) that depends on both."""
    return float(np.random.default_rng([abs(key), key < 0, seed]).random())


def variants(traces: dict[str, Trace]) -> Iterator[tuple[str, Trace, list[int]]]:
    """Name, trace and capacities of everything that is tried."""
    sizes = {
        "mooncake_conversation": [1700, 5500, 17_000, 40_000],
        "agent_a": [1000, 1700, 5500],
        "agent_a64": [2500, 5500, 11_000],
        "chat_bytes64": [500, 800, 1200],
    }
    for name, trace in traces.items():
        requests = range(trace.num_requests)
        middle = trace.num_requests // 2
        capacities = sizes[name]
        halved = [max(size // 2, trace.longest_request // 2) for size in capacities]
        yield f"{name}, other sizes", trace, capacities[-2:] if name == "agent_a" else capacities
        yield f"{name}, first half", select("first half", (trace, requests[:middle])), halved
        yield f"{name}, second half", select("second half", (trace, requests[middle:])), halved
        yield f"{name}, half of the talks", select("half", (trace, share_of(trace, 0.5, 1))), halved
        yield (
            f"{name}, a quarter of them",
            select("quarter", (trace, share_of(trace, 0.25, 2))),
            [max(size // 4, trace.longest_request // 2) for size in capacities],
        )
    if {"mooncake_conversation", "agent_a"} <= traces.keys():
        talk, agents = traces["mooncake_conversation"], traces["agent_a"]
        yield "conversation + agent_a", merged("merged", talk, agents), [3000, 10_000, 30_000]
        parts = (talk, range(4000)), (agents, range(2500)), (talk, range(4000, 7000))
        yield "conversation, agent_a, conversation", select("in turn", *parts), [2000, 6000, 20_000]


def measure(name: str, trace: Trace, capacities: list[int], policies: list[str]) -> list[dict[str, Any]]:
    """One row per capacity."""
    rows = []
    for capacity in dict.fromkeys(capacities):
        best = int(offline_optimum(trace, capacity).hit_blocks)
        row: dict[str, Any] = {"variant": name, "capacity": capacity, "opt-pin": best / trace.num_blocks}
        for policy in policies:
            row[policy] = replay(trace, policy, capacity).hit_blocks / trace.num_blocks
        row["contended"] = row["lru"] < CONTENDED * row["opt-pin"]
        rows.append(row)
        figures = "  ".join(f"{policy} {row[policy]:.4f}" for policy in policies)
        mark = "" if row["contended"] else "  (not contended)"
        print(f"{name:<44}{capacity:>8,}  {figures}  opt-pin {row['opt-pin']:.4f}{mark}", flush=True)
    return rows


def judge(rows: list[dict[str, Any]], policy: str) -> dict[str, float]:
    """The three figures of the module's text."""
    contended = [row for row in rows if row["contended"]]
    shares = [row[policy] / row["opt-pin"] for row in contended]
    smallest: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = smallest.get(row["variant"])
        if row["variant"].startswith("agent_a,") and (known is None or row["capacity"] < known["capacity"]):
            smallest[row["variant"]] = row
    thrashing = [row for row in smallest.values() if row["lru"] < 0.5 * row["opt-pin"]]
    return {
        "cells": len(contended),
        "share of opt-pin": math.exp(sum(map(math.log, shares)) / len(shares)) if shares else 1.0,
        "loss to lru": max(100 * (row["lru"] - row[policy]) for row in rows),
        "gain when thrashing": min((row[policy] / row["lru"] for row in thrashing), default=math.inf),
        "thrashing cells": len(thrashing),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="lru,adaptive", help="policies, separated by commas; lru always")
    parser.add_argument("--traces", type=Path, default=traces_folder(), help="folder of the recorded traces")
    parser.add_argument("--only", default="", help="only variants whose name has this in it")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    policies = list(dict.fromkeys(["lru", *args.policy.split(",")]))
    names = ("mooncake_conversation", "agent_a", "agent_a64", "chat_bytes64")
    files = {name: args.traces / f"{name}.jsonl.gz" for name in names}
    found = {name: path for name, path in files.items() if path.exists()}
    if not found:
        raise SystemExit(f"no traces in {args.traces}; give the folder with --traces or RADIXKV_TRACES")
    traces = {name: read_trace(path) for name, path in found.items()}
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for name, trace, capacities in variants(traces):
        if args.only in name:
            rows += measure(name, trace, capacities, policies)
    if not rows:
        raise SystemExit(f"no variant has {args.only!r} in its name")
    verdicts = {policy: judge(rows, policy) for policy in policies}
    for policy, verdict in verdicts.items():
        print(f"{policy}: " + ", ".join(f"{name} {value:.4g}" for name, value in verdict.items()))
    print(f"targets: {TARGETS}; {time.perf_counter() - began:.0f} s")
    write_figures(args.json, "eviction", {"rows": rows, "verdicts": verdicts})


if __name__ == "__main__":
    main()
