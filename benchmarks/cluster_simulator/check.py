# SPDX-License-Identifier: Apache-2.0
"""Putting the simulation to the test: a trace arrives at the real engine, and at a simulated one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.cluster_simulator.measure import params_of, vocabulary
from benchmarks.cluster_simulator.reference_step import Clock, ReferenceStep
from benchmarks.cluster_simulator.routers import RoundRobin
from benchmarks.cluster_simulator.simulated_replica import ReplicaConfig
from benchmarks.cluster_simulator.simulation import ClusterConfig, ClusterSimulation
from benchmarks.cluster_simulator.step_cost import StepCost
from benchmarks.token_prompts import token_prompts
from radixkv.cli.replay.trace import Trace
from radixkv.engine.engine import Engine

_REFERENCE_EVERY = 5  # times as long as it takes; and
_REFERENCE_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class MeasuredTrace:
    """Times and counts of a trace at the real engine.

    Attributes:
        ttft_s: seconds to first token of all requests.
        busy_s: during which it had something to do.
        hit_rate: share of the prompts that was found cached.
    """

    ttft_s: list[float]
    busy_s: float
    hit_rate: float


def replay_on_engine(
    engine: Engine,
    trace: Trace,
    speed: float,
    clock: Clock,
    reference: ReferenceStep,
    on_end: Callable[[], None] = lambda: None,
) -> MeasuredTrace:
    """Let a trace arrive at an engine as recorded, in real time.

    Args:
        reference: is run between steps, now and then; for the requests no time passes meanwhile.
        on_end: is called after each request, to show progress.
    """
    arrivals = np.maximum.accumulate(trace.arrivals - trace.arrivals.min()) / speed
    prompts = token_prompts(trace, vocabulary(engine))
    first: dict[str, float] = {}
    came: dict[str, float] = {}
    cached, number, busy_s = 0, 0, 0.0
    began = last_reference = clock.now()
    while number < len(prompts) or engine.has_work:
        now = started = clock.now() - began
        while number < len(prompts) and arrivals[number] <= now:
            params = params_of(int(trace.output_lengths[number]))
            came[engine.add_request(prompts[number], params, stream=True)] = float(arrivals[number])
            number += 1
        if not engine.has_work:
            clock.sleep(max(0.0, float(arrivals[number]) - now))
            continue
        result = engine.step()
        now = clock.now() - began
        busy_s += now - started
        for delta in result.deltas:
            if delta.request_id not in first:
                first[delta.request_id] = now
                cached += 0 if delta.prompt is None else delta.prompt.num_cached_tokens
            if delta.is_last:
                on_end()
        before = clock.now()
        if before - last_reference > max(_REFERENCE_EVERY_S, _REFERENCE_EVERY * reference.latest_s):
            reference.run()
            last_reference = clock.now()
            began += last_reference - before
    ttft_s = [first[name] - came[name] for name in came]
    return MeasuredTrace(ttft_s, busy_s, cached / int(trace.input_lengths.sum()))


def compare(
    engine: Engine, trace: Trace, speed: float, cost: StepCost, num_blocks: int, measured: MeasuredTrace
) -> dict[str, dict[str, float]]:
    """Measured and predicted figures.

    Args:
        num_blocks: of the engine's, that requests could have.
    """
    replica = ReplicaConfig(
        num_blocks * engine.cache.block_size // trace.block_size,
        trace.block_size,
        engine.scheduler.max_num_batched_tokens,
        engine.scheduler.max_num_seqs,
    )
    run = ClusterSimulation(trace, ClusterConfig(1, replica, cost, speed), RoundRobin).run()
    predicted = [request.ttft_s for request in run.requests]
    rows = {
        f"TTFT p{percent} (s)": {
            "measured": float(np.percentile(measured.ttft_s, percent)),
            "predicted": float(np.percentile(predicted, percent)),
        }
        for percent in (50, 90)
    }
    prompt = sum(request.prompt_tokens for request in run.requests)
    cached = sum(request.cached_tokens for request in run.requests)
    rows["busy (s)"] = {"measured": measured.busy_s, "predicted": run.busy_s[0]}
    rows["hit rate"] = {"measured": measured.hit_rate, "predicted": cached / prompt}
    return rows
