# SPDX-License-Identifier: Apache-2.0
"""What does speculation bring, and does it change anything?

    python -m benchmarks.speculation [--rounds N] [--requests N] [--json FILE]

Two engines over the embedded model, one with `speculation` and one without, answer the same requests in
turns: code edits, an agent's log, JSON by a schema, and chat; alone and eight at once. Before each turn the
cache and all that was written before is forgotten. Printed are decode tokens per second (from the step in
which all have their first token to the end), as medians of turns, and the median of the turns' ratios; the
same by the process's CPU time, which other work on the machine disturbs less.

Then: do random requests get the same tokens with speculation and without (`--deterministic`; 20 of them on
the embedded model, the rest on a tiny one), and do 50,000 sampled tokens follow the same distribution
(chi-square)?
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import speculation_exactness
from benchmarks.figures import write_figures
from benchmarks.speculation_workloads import WORKLOADS, prompts, sampling
from radixkv import EngineConfig
from radixkv.engine.engine import Engine
from radixkv.entrypoints.builder import build_engine


def decode(engine: Engine, requests: list[list[int]], workload: str) -> dict[str, Any]:
    """Answer all requests at once; seconds and tokens after the step in which the last one began."""
    engine.cache.reset()
    params = sampling(workload)
    ids = [engine.add_request(tokens, params, stream=True) for tokens in requests]
    waiting = set(ids)
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    before = engine.stats().speculation
    began = spent = 0.0
    decoded = steps = 0
    while engine.has_work:
        deltas = engine.step().deltas
        steps += 1
        for delta in deltas:
            tokens[delta.request_id] += delta.token_ids
        if waiting:
            waiting -= {delta.request_id for delta in deltas}
            if not waiting:
                began, spent, steps = time.perf_counter(), time.process_time(), 0
        else:
            decoded += sum(len(delta.token_ids) for delta in deltas)
    after = engine.stats().speculation
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - spent,
        "tokens": decoded,
        "steps": steps,
        "draft_tokens": after.num_draft_tokens - before.num_draft_tokens,
        "accepted_tokens": after.num_accepted_tokens - before.num_accepted_tokens,
        "answers": [tokens[request_id] for request_id in ids],
    }


def compare(engines: dict[str, Engine], workload: str, batch: int, rounds: int) -> dict[str, Any]:
    """One workload at one batch size, the engines in turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    every = prompts(engines["on"].model.tokenizer, workload)
    for turn in range(rounds):
        # Alone, another request each turn; the order of the engines alternates.
        requests = every[:batch] if batch > 1 else [every[turn % len(every)]]
        for name in sorted(engines, reverse=turn % 2 == 1):
            found[name].append(decode(engines[name], requests, workload))
    pairs = list(zip(found["on"], found["off"], strict=True))

    def rate(one: dict[str, Any], clock: str) -> float:
        return one["tokens"] / max(one[clock], 1e-9)

    drafted = sum(one["draft_tokens"] for one in found["on"])
    return {
        "batch": batch,
        "off_tokens_per_s": round(statistics.median(rate(off, "wall_s") for _, off in pairs), 1),
        "on_tokens_per_s": round(statistics.median(rate(on, "wall_s") for on, _ in pairs), 1),
        "ratio": round(statistics.median(rate(on, "wall_s") / rate(off, "wall_s") for on, off in pairs), 3),
        "cpu_ratio": round(statistics.median(rate(on, "cpu_s") / rate(off, "cpu_s") for on, off in pairs), 3),
        "tokens_per_step": round(statistics.median(on["tokens"] / on["steps"] / batch for on, _ in pairs), 2),
        "accepted": round(sum(one["accepted_tokens"] for one in found["on"]) / max(1, drafted), 3),
        "same_answers": sum(on["answers"] == off["answers"] for on, off in pairs),
        "turns": rounds,
    }


def build(**options: Any) -> dict[str, Engine]:
    """Two engines over the embedded model."""
    return {
        name: build_engine(EngineConfig(num_blocks=768, speculation=speculation, **options))
        for name, speculation in (("off", "off"), ("on", "auto"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="turns per workload; half as many at larger batches"
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--requests", type=int, default=500, help="random requests; 0: none")
    parser.add_argument(
        "--sampled", type=int, default=50_000, help="sampled tokens for the chi-square; 0: none"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console()
    figures: dict[str, Any] = {}
    table = Table(title="Decode tokens/s with speculation, embedded model, greedy")
    for column in ("workload", "batch", "off", "on", "on / off", "by CPU time", "tokens a step", "accepted"):
        table.add_column(column, justify="left" if column == "workload" else "right")

    def keep(name: str, found: dict[str, Any]) -> None:
        """Write what is known so far: the whole takes a while."""
        figures[name] = figures.get(name, {}) | found
        write_figures(arguments.json, "speculation", figures)

    engines = build()
    for batch in arguments.batches:
        for workload in arguments.workloads:
            turns = arguments.rounds if batch == 1 else max(1, arguments.rounds // 2)
            one = compare(engines, workload, batch, turns)
            keep("workloads", {f"{workload}, batch {batch}": one})
            table.add_row(
                workload,
                str(batch),
                *(f"{one[key]:.1f}" for key in ("off_tokens_per_s", "on_tokens_per_s")),
                *(f"{one[key]:.2f}" for key in ("ratio", "cpu_ratio", "tokens_per_step", "accepted")),
            )
            console.print_json(json.dumps({f"{workload}, batch {batch}": one}), indent=None)
    console.print(table)
    if arguments.requests:
        keep("same_tokens", speculation_exactness.same_tokens(arguments.requests))
        console.print(figures["same_tokens"])
    if arguments.sampled:
        keep("chi_square", speculation_exactness.chi_square(arguments.sampled))
        console.print(figures["chi_square"])


if __name__ == "__main__":
    main()
