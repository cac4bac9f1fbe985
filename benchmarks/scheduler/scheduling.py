# SPDX-License-Identifier: Apache-2.0
"""Does favouring cached prefixes starve anybody, and what does keeping the order cost?

    python -m benchmarks.scheduling [--steps N] [--max-overtake N] [--json FILE]

The real scheduler over the real prefix cache, without a model: time is counted in steps, so the order figures
are the same on every machine.

**Order.** Clients keep 24 hot requests waiting at any time, for ever (a shared prompt of 1,500 tokens and 30
of their own); every fourth step a cold one arrives (400 tokens nobody else has). `prefix` without
a bound (`unbounded`) never serves a cold request while a hot one waits. With `one prompt` all hot requests
share one; with `six prompts` there are six families, and the pool holds four of them. Printed per policy:

    relative      hit rate over that of `unbounded`
    hit rate      cached prompt tokens / prompt tokens of the requests admitted
    overtaken     most steps in which requests that came later were admitted before a cold one: bounded by
                  --max-overtake under `prefix`; under `fcfs` later ones pass only what does not fit
    cold wait     longest wait of a cold request for its first tokens, in steps: what was queued before it,
                  and at most --max-overtake more; `+`: it was still waiting at the end

**Ordering.** 1,000 requests of 2,000 tokens wait while one decodes: thread CPU time of `schedule()`, once
with no sequence slot free (nothing to decide), once with no block free (all are ordered and tried).
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from radixkv import PrefixCache
from radixkv.engine.config import SchedulerConfig
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

POLICIES = ("prefix", "unbounded", "fcfs")
UNBOUNDED = 10**9
BLOCK = 16
SHARED, OWN, COLD, OUTPUT = 1500, 30, 400, 4
HOT_WAITING, COLD_EVERY = 24, 4
VOCABULARY = 32_000
PARAMS = SamplingParams(max_tokens=OUTPUT)


@dataclass
class Scenario:
    """A stream of hot requests from `families` shared prompts, over a pool of `num_blocks`."""

    name: str
    families: int
    num_blocks: int


SCENARIOS = (Scenario("one prompt", 1, 2000), Scenario("six prompts", 6, 4 * (SHARED // BLOCK + 1) + 120))


def run_step(scheduler: Scheduler, now: int) -> None:
    """Schedule, pretend to compute, and end requests that have all their tokens."""
    batch = scheduler.schedule().batch
    if batch is None:
        return
    scheduler.complete(batch)
    for entry in batch.entries:
        if entry.request.times.first_scheduled is None:
            entry.request.times.first_scheduled = now
        if entry.samples:
            entry.request.append(now % VOCABULARY)
            if entry.request.num_output_tokens >= entry.request.params.max_tokens:  # type: ignore[operator]
                scheduler.finish(entry.request)


def order(policy: str, scenario: Scenario, steps: int, max_overtake: int) -> dict[str, Any]:
    """The adversarial stream under one policy."""
    rng = np.random.default_rng(0)
    cache = PrefixCache(scenario.num_blocks, BLOCK)
    bound = UNBOUNDED if policy == "unbounded" else max_overtake
    config = SchedulerConfig(
        max_num_batched_tokens=512, max_num_seqs=8, scheduling_policy=_named(policy), max_overtake=bound
    )
    scheduler = Scheduler(cache, config)
    prompts = [rng.integers(0, VOCABULARY, SHARED) for _ in range(scenario.families)]
    cold: list[Sequence] = []
    overtaken = 0

    def arrive(tokens: np.ndarray, now: int) -> Sequence:
        request = Sequence(Request(tokens, PARAMS, request_id=str(now)), arrival_s=now)
        scheduler.add(request)
        return request

    for now in range(steps):
        hot_waiting = sum(request.num_prompt_tokens > SHARED for request in scheduler.waiting)
        for _ in range(HOT_WAITING - hot_waiting):
            family = prompts[int(rng.integers(scenario.families))]
            arrive(np.concatenate([family, rng.integers(0, VOCABULARY, OWN)]), now)
        if now % COLD_EVERY == 0:
            cold.append(arrive(rng.integers(0, VOCABULARY, COLD), now))
        run_step(scheduler, now)
        passed = scheduler.policy.passed.overtaken
        overtaken = max([overtaken, *(passed.get(request, 0) for request in cold)])
    waits = []
    for request in cold:
        started = request.times.first_scheduled
        waits.append((started if started is not None else steps) - request.times.arrival)
    served = sum(request.times.first_scheduled is not None for request in cold)
    stats = scheduler.stats
    return {
        "hit_rate": stats.cached_prompt_tokens / stats.prompt_tokens,
        "admitted": stats.admitted,
        "cold": len(cold),
        "cold_served": served,
        "worst_overtaken_steps": None if policy == "unbounded" else overtaken,
        "worst_cold_wait_steps": max(waits),
        "worst_still_waiting": served < len(cold)
        and max(waits) == max(w for w, r in zip(waits, cold, strict=True) if r.times.first_scheduled is None),
    }


def _named(policy: str) -> str:
    """Return the scheduler's policy behind a row of the tables."""
    return "prefix" if policy == "unbounded" else policy


def ordering_time(policy: str, situation: str, waiting: int, steps: int = 200) -> dict[str, float]:
    """Thread CPU milliseconds of one `schedule()` with many requests waiting."""
    rng = np.random.default_rng(0)
    num_blocks = 20_000
    cache = PrefixCache(num_blocks, BLOCK)
    slots = 1 if situation == "no slot" else 64
    config = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=slots, scheduling_policy=_named(policy))
    scheduler = Scheduler(cache, config)
    families = [rng.integers(0, VOCABULARY, 1000) for _ in range(8)]
    for family in families:
        lease = cache.acquire(family)
        lease.commit(len(family))
        if situation == "no slot":
            lease.release()
    if situation == "no block":  # all but 40 blocks are in use; each waiting request needs 64
        in_use = num_blocks - 8 * (1000 // BLOCK + 1) - 40
        cache.acquire(rng.integers(0, VOCABULARY, in_use * BLOCK), "another")
    runs = Sequence(
        Request(rng.integers(0, VOCABULARY, 50), SamplingParams(max_tokens=10 * steps), request_id="runs")
    )
    scheduler.add(runs)
    run_step(scheduler, 0)
    for i in range(waiting):
        tokens = np.concatenate([families[i % 8], rng.integers(0, VOCABULARY, 1000)])
        scheduler.add(Sequence(Request(tokens, PARAMS, request_id=str(i))))
    run_step(scheduler, 0)
    times = []
    for now in range(steps):
        start = time.thread_time_ns()
        batch = scheduler.schedule().batch
        times.append((time.thread_time_ns() - start) / 1e6)
        assert batch is not None
        assert len(batch.entries) == 1, "somebody was admitted"
        scheduler.complete(batch)
        runs.append(now)
    times.sort()
    return {"median_ms": statistics.median(times), "p99_ms": times[int(0.99 * len(times))]}


def order_table(figures: dict[str, Any], max_overtake: int) -> Table:
    table = Table(title=f"Order under overload, --max-overtake {max_overtake}")
    for column in (
        "hot stream",
        "policy",
        "hit rate",
        "of unbounded",
        "cold served",
        "overtaken",
        "cold wait",
    ):
        table.add_column(column, justify="left" if column in ("hot stream", "policy") else "right")
    for name, by_policy in figures.items():
        pure = by_policy["unbounded"]["hit_rate"]
        for policy, row in by_policy.items():
            overtaken = row["worst_overtaken_steps"]
            table.add_row(
                name,
                policy,
                f"{row['hit_rate']:.1%}",
                f"{row['hit_rate'] / pure:.1%}",
                f"{row['cold_served']} of {row['cold']}",
                "unbounded" if overtaken is None else str(overtaken),
                f"{row['worst_cold_wait_steps']}{'+' if row['worst_still_waiting'] else ''}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000, help="steps of the adversarial stream")
    parser.add_argument("--max-overtake", type=int, default=32)
    parser.add_argument("--waiting", type=int, default=1000, help="requests waiting in the ordering part")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console()
    orders: dict[str, Any] = {}
    for scenario in SCENARIOS:
        orders[scenario.name] = {
            policy: order(policy, scenario, arguments.steps, arguments.max_overtake) for policy in POLICIES
        }
    console.print(order_table(orders, arguments.max_overtake))
    times: dict[str, Any] = {}
    table = Table(title=f"Scheduling a step, {arguments.waiting} requests of 2,000 tokens waiting (CPU ms)")
    for column in ("policy", "situation", "median", "p99"):
        table.add_column(column, justify="left" if column in ("policy", "situation") else "right")
    for policy in ("prefix", "fcfs", "priority", "fair"):
        for situation in ("no slot", "no block"):
            row = ordering_time(policy, situation, arguments.waiting)
            times[f"{policy}, {situation}"] = row
            table.add_row(policy, situation, f"{row['median_ms']:.3f}", f"{row['p99_ms']:.3f}")
    console.print(table)
    figures = {"max_overtake": arguments.max_overtake, "order": orders, "ordering": times}
    write_figures(arguments.json, "scheduling", figures)


if __name__ == "__main__":
    main()
