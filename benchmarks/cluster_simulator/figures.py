# SPDX-License-Identifier: Apache-2.0
"""Figures: what a run says about a cluster, and how much load it carries within a limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.cluster_simulator.routers import MakeRouter
from benchmarks.cluster_simulator.simulation import ClusterConfig, ClusterRun, ClusterSimulation
from radixkv.cli.replay.driver import replay
from radixkv.cli.replay.trace import Trace

GOOD_SHARE = 0.9  # of the requests keep the limit, where a load is carried
_LOAD_PRECISION = 1.02  # between a load that is carried and one that is not
_MAX_RUNS = 24


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """One row of the table.

    Attributes:
        requests_per_s: offered.
        refused: requests that fit into no replica.
        hit_rate: prompt tokens found cached, of all that were served.
        pooled_hit_rate: the same in one cache as large as all together, one request after another.
        ttft_p50_s, ttft_p90_s, ttft_p99_s: time to first token.
        itl_p50_s, itl_p99_s: inter-token latency.
        goodput_per_s: requests per second whose first token came within the limit.
        within_limit: their share.
        busiest_over_mean: busy time of the busiest replica over the mean.
        utilisation: share of the time that a replica is busy.
        duplicated_blocks: resident blocks that another replica holds, too, of all; averaged over arrivals.
    """

    trace: str
    router: str
    num_replicas: int
    blocks_per_replica: int
    speed: float
    event_delay_s: float
    requests: int
    requests_per_s: float
    refused: int
    hit_rate: float
    pooled_hit_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    ttft_limit_s: float
    goodput_per_s: float
    within_limit: float
    busiest_over_mean: float
    utilisation: float
    duplicated_blocks: float
    preemptions: int
    seconds: float

    @property
    def pooled_share(self) -> float:
        """The hit rate as a share of the pooled one."""
        return self.hit_rate / self.pooled_hit_rate if self.pooled_hit_rate else 1.0


def figures_of(
    run: ClusterRun, trace: Trace, router: str, config: ClusterConfig, limit_s: float, pooled: float
) -> ClusterFigures:
    """The figures of a run.

    Args:
        limit_s: longest time to first token that is good.
        pooled: see `pooled_hit_rate`.
    """
    served = [one for one in run.requests if not one.refused]
    ttft = np.array([one.ttft_s for one in served])
    prompt = sum(one.prompt_tokens for one in served)
    span = max((one.arrival_s for one in run.requests), default=0.0)
    busy = np.array(run.busy_s)
    good = int((ttft <= limit_s).sum())
    p50, p90, p99 = _quantiles(ttft, 0.5, 0.9, 0.99)
    itl50, itl99 = _quantiles(run.gaps, 0.5, 0.99)
    return ClusterFigures(
        trace=trace.name,
        router=router,
        num_replicas=config.num_replicas,
        blocks_per_replica=config.replica.num_blocks,
        speed=config.speed,
        event_delay_s=config.event_delay_s,
        requests=len(run.requests),
        requests_per_s=len(run.requests) / span if span else 0.0,
        refused=len(run.requests) - len(served),
        hit_rate=sum(one.cached_tokens for one in served) / prompt if prompt else 0.0,
        pooled_hit_rate=pooled,
        ttft_p50_s=p50,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        itl_p50_s=itl50,
        itl_p99_s=itl99,
        ttft_limit_s=limit_s,
        goodput_per_s=good / run.seconds if run.seconds else 0.0,
        within_limit=good / len(run.requests) if run.requests else 0.0,
        busiest_over_mean=float(busy.max() / busy.mean()) if busy.any() else 1.0,
        utilisation=float(busy.mean() / run.seconds) if run.seconds else 0.0,
        duplicated_blocks=1 - run.distinct_blocks / run.resident_blocks if run.resident_blocks else 0.0,
        preemptions=run.preemptions,
        seconds=run.seconds,
    )


def _quantiles(values: npt.ArrayLike, *shares: float) -> list[float]:
    array = np.asarray(values, dtype=np.float64)
    return [float(value) for value in np.quantile(array, shares)] if array.size else [0.0] * len(shares)


def pooled_hit_rate(trace: Trace, config: ClusterConfig) -> float:
    """The token hit rate of one cache as large as all replicas' together, one request after another."""
    blocks = config.num_replicas * config.replica.num_blocks
    return replay(trace, config.replica.eviction, blocks).token_hit_rate


def find_load(simulate: Callable[[float], ClusterFigures], start: float) -> ClusterFigures | None:
    """The figures at the highest speed at which `GOOD_SHARE` of the requests keep the limit.

    The speed is doubled or halved until it is enclosed, then bisected on a logarithmic scale. None: it is too
    fast however slowly requests come.

    Args:
        simulate: a run at some speed.
        start: the first speed to try.
    """
    good: ClusterFigures | None = None
    low, high, speed = 0.0, math.inf, start
    for _ in range(_MAX_RUNS):
        figures = simulate(speed)
        if figures.within_limit >= GOOD_SHARE:
            low, good = speed, figures
        else:
            high = speed
        if low and high / low < _LOAD_PRECISION:
            break
        speed = math.sqrt(low * high) if low and high < math.inf else speed * 2 if low else speed / 2
    return good


def simulate_cluster(
    trace: Trace,
    router: str,
    make_router: MakeRouter,
    config: ClusterConfig,
    limit_s: float,
    pooled: float,
    on_arrival: Callable[[], None] = lambda: None,
) -> ClusterFigures:
    """One run and its figures; arguments as of `ClusterSimulation` and `figures_of`."""
    run = ClusterSimulation(trace, config, make_router).run(on_arrival)
    return figures_of(run, trace, router, config, limit_s, pooled)
