# SPDX-License-Identifier: Apache-2.0
"""How long does a quiet tenant wait while another one floods the engine?

    python -m benchmarks.tenant_fairness [--model] [--json FILE]

One tenant has 60 requests (400 tokens of prompt, 100 of answer) at once; five steps later another tenant
sends a short one (30 tokens), and then, when it has its answer of 4 tokens, the next, 5 in all. The flood
fills:

    budget   the token budget of a step (512); there are places and blocks for all
    places   16 sequence slots: its decodes hold all of them
    blocks   a pool for 20 of its requests: its decodes hold all blocks

Without `--model` the real scheduler runs over the real prefix cache without a model: time is counted in
steps, so that the figures are the same on every machine. With it, the embedded model answers (`budget` only),
and seconds are measured, alone and under the flood.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figures import write_figures
from benchmarks.scheduling import BLOCK, VOCABULARY
from radixkv import PrefixCache
from radixkv.engine.config import EngineConfig, SchedulerConfig
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.sequence import Sequence

POLICIES = ("fcfs", "prefix", "fair")
BUDGET = 512
FLOOD, FLOOD_PROMPT, FLOOD_ANSWER = 60, 400, 100
QUIET, QUIET_PROMPT, QUIET_ANSWER = 5, 30, 4
MAX_STEPS = 5000


@dataclass(frozen=True)
class Scenario:
    """What the flood fills."""

    name: str
    max_num_seqs: int = 256
    num_blocks: int = 4000


SCENARIOS = (
    Scenario("budget"),
    Scenario("places", max_num_seqs=16),
    Scenario("blocks", num_blocks=20 * (FLOOD_PROMPT + FLOOD_ANSWER) // BLOCK),
)


class Tenants:
    """Makes the requests of both."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._numbers = itertools.count()

    def request(self, tenant: str, prompt: int, answer: int) -> Sequence:
        tokens = self._rng.integers(0, VOCABULARY, prompt)
        params = SamplingParams(max_tokens=answer)
        return Sequence(
            Request(tokens, params, request_id=f"{tenant}-{next(self._numbers)}", namespace=(tenant, ""))
        )


def step(scheduler: Scheduler) -> list[Sequence]:
    """Schedule, pretend to compute, and end requests that have all their tokens; who got a token."""
    batch = scheduler.schedule().batch
    if batch is None:
        return []
    scheduler.complete(batch)
    served = [entry.request for entry in batch.entries if entry.samples]
    for request in served:
        request.append(len(request.tokens()) % VOCABULARY)
        if request.num_output_tokens >= (request.params.max_tokens or 0):
            scheduler.finish(request)
    return served


def waits(policy: str, scenario: Scenario) -> dict[str, Any]:
    """Steps from each quiet request's arrival to its first token, and what the flood paid."""
    cache = PrefixCache(scenario.num_blocks, BLOCK)
    config = SchedulerConfig(
        max_num_batched_tokens=BUDGET, max_num_seqs=scenario.max_num_seqs, scheduling_policy=policy
    )
    scheduler = Scheduler(cache, config)
    make = Tenants()
    for _ in range(FLOOD):
        scheduler.add(make.request("flood", FLOOD_PROMPT, FLOOD_ANSWER))
    for _ in range(5):
        step(scheduler)
    found = []
    for _ in range(QUIET):
        quiet = make.request("quiet", QUIET_PROMPT, QUIET_ANSWER)
        scheduler.add(quiet)
        for number in range(1, MAX_STEPS):
            if quiet in step(scheduler):
                found.append(number)
                break
        while not quiet.is_finished and quiet.lease is not None:
            step(scheduler)
    while scheduler.has_work:
        step(scheduler)
    stats = scheduler.stats
    return {
        "first_wait_steps": found[0],
        "worst_wait_steps": max(found),
        "preemptions": stats.num_preemptions,
        "computed_tokens": stats.computed_tokens,
        "steps": stats.num_steps,
    }


def seconds(policy: str) -> dict[str, float]:
    """Seconds from each quiet request's arrival to its first token, on the embedded model."""
    from radixkv.entrypoints.builder import build_engine  # loads torch, which the counted steps do without

    engine = build_engine(EngineConfig(scheduling_policy=policy, allow_download=False, num_blocks=4000))
    rng = np.random.default_rng(0)

    def ask(tenant: str, prompt: int, answer: int) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        tokens = rng.integers(1000, 40_000, prompt).tolist()
        return engine.add_request(tokens, params, namespace=(tenant, ""), stream=True)

    def wait() -> float:
        begin = time.perf_counter()
        name = ask("quiet", QUIET_PROMPT, 1)
        while not any(delta.request_id == name and delta.token_ids for delta in engine.step().deltas):
            pass
        return time.perf_counter() - begin

    alone = [wait() for _ in range(5)]
    for _ in range(FLOOD):
        ask("flood", FLOOD_PROMPT, FLOOD_ANSWER)
    for _ in range(5):
        engine.step()
    crowded = [wait() for _ in range(QUIET)]
    return {"alone_s": statistics.median(alone), "first_s": crowded[0], "worst_s": max(crowded)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="store_true", help="measure seconds on the embedded model, too")
    parser.add_argument("--policy", action="append", help="only these")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    policies = arguments.policy or POLICIES
    results: dict[str, Any] = {"steps": {}, "seconds": {}}
    table = Table("flood fills", "policy", "first wait", "worst wait", "preemptions", "computed", "steps")
    for scenario in SCENARIOS:
        for policy in policies:
            row = results["steps"].setdefault(scenario.name, {})[policy] = waits(policy, scenario)
            table.add_row(scenario.name, policy, *map(str, row.values()))
    console = Console()
    console.print(table)
    if arguments.model:
        for policy in policies:
            results["seconds"][policy] = row = seconds(policy)
            console.print(policy, {name: round(value, 2) for name, value in row.items()})
    write_figures(arguments.json, "tenant_fairness", results)


if __name__ == "__main__":
    main()
