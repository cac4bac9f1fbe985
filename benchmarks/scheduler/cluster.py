# SPDX-License-Identifier: Apache-2.0
"""How much load do replicas carry when requests are routed by what they hold, and what do they find cached?

    python -m benchmarks.cluster [--only NAME] [--traces DIR] [--json FILE]

Recorded traces arrive at simulated replicas (`benchmarks.cluster_simulator`): the real scheduler, prefix
cache and routing policy; a step takes 2 ms and its prompt tokens what `rate` says; only first tokens are
computed.

    load      The fastest arrivals at which 90 % of the requests get their first token within a limit, over
              those of round robin. Targets: 1.8, 5 and 2.1 times.
    stale     The trace as it came, with the router's events on time and ten seconds late. Target: at most 3
              points of hit rate lost.
    growth    1 to 64 replicas, and so many times the load that one carries: hit rate and time to first token.

Nothing here depends on the machine but the minutes it takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster_simulator.cluster_command import figures_table
from benchmarks.cluster_simulator.figures import ClusterFigures, find_load, pooled_hit_rate, simulate_cluster
from benchmarks.cluster_simulator.routers import ROUTERS
from benchmarks.cluster_simulator.simulated_replica import ReplicaConfig
from benchmarks.cluster_simulator.simulation import ClusterConfig
from benchmarks.cluster_simulator.step_cost import StepCost
from benchmarks.figures import write_figures
from benchmarks.traces import traces_folder
from radixkv.cli.replay.readers import read_trace
from radixkv.cli.replay.trace import Trace

POLICIES = ("round-robin", "expected-ttft")
LATE_S = 10.0
REPLICAS = (1, 2, 4, 8, 16, 32, 64)
SPEED_OF_ONE = 0.25  # of the recorded arrivals, in the part `growth`


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on a cluster.

    Attributes:
        num_blocks: of each replica, in the trace's size.
        rate: prompt tokens that a replica computes per second.
        limit_s: longest time to first token.
        speed: of the arrivals where the search for the load begins.
    """

    trace: str
    num_replicas: int
    num_blocks: int
    rate: float
    limit_s: float
    speed: float

    def config(self, trace: Trace) -> ClusterConfig:
        """The cluster at the speed of the recording."""
        replica = ReplicaConfig(self.num_blocks, trace.block_size)
        cost = StepCost(step_s=0.002, token_s=1 / self.rate)
        return ClusterConfig(self.num_replicas, replica, cost, max_answer_tokens=1)


CASES = (
    Case("mooncake_conversation", 8, 12_000, rate=8_000, limit_s=5.0, speed=1.0),
    Case("agent_a", 8, 2_000, rate=20_000, limit_s=10.0, speed=1.0),
    Case("chat_bytes64", 4, 4_000, rate=20_000, limit_s=2.0, speed=16.0),
)


class Runs:
    """Runs clusters, and says so."""

    def __init__(self, case: Case, folder: Path, console: Console) -> None:
        self.case = case
        self._console = console
        self.trace = read_trace(folder / f"{case.trace}.jsonl.gz")
        self._pooled: dict[int, float] = {}

    def at(self, policy: str, config: ClusterConfig) -> ClusterFigures:
        """One run."""
        count = config.num_replicas
        if count not in self._pooled:
            self._pooled[count] = pooled_hit_rate(self.trace, config)
        row = simulate_cluster(
            self.trace, policy, ROUTERS[policy], config, self.case.limit_s, self._pooled[count]
        )
        self._console.print(
            f"{self.case.trace}, {count} x {policy}, {config.speed:.3g} x: "
            f"TTFT p90 {row.ttft_p90_s:.2f} s, hit rate {row.hit_rate:.1%}",
            highlight=False,
        )
        return row


def loads(runs: Runs) -> list[ClusterFigures]:
    """What each policy carries within the limit."""
    config = runs.case.config(runs.trace)
    rows = []
    for policy in POLICIES:

        def run(at: float, policy: str = policy) -> ClusterFigures:
            return runs.at(policy, replace(config, speed=at))

        found = find_load(run, runs.case.speed)
        if found is not None:
            rows.append(found)
    return rows


def stale(runs: Runs) -> list[ClusterFigures]:
    """Events on time, and late."""
    config = runs.case.config(runs.trace)
    return [runs.at(POLICIES[-1], replace(config, event_delay_s=late)) for late in (0.0, LATE_S)]


def growth(runs: Runs) -> Iterator[ClusterFigures]:
    """As many times the load as there are replicas."""
    for count in REPLICAS:
        for policy in POLICIES:
            config = replace(runs.case.config(runs.trace), num_replicas=count, speed=SPEED_OF_ONE * count)
            yield runs.at(policy, config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("load", "stale", "growth"), help="one part alone")
    parser.add_argument("--traces", type=Path, default=traces_folder(), help="folder of the recorded traces")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if not (arguments.traces / f"{CASES[0].trace}.jsonl.gz").exists():
        parser.error(f"no traces in {arguments.traces}; name their folder by --traces or RADIXKV_TRACES")
    console, out = Console(width=None if Console().is_terminal else 200), Console(stderr=True)
    figures: dict[str, Any] = {}
    parts: dict[str, Callable[[Runs], Iterable[ClusterFigures]]] = {
        "load": loads,
        "stale": stale,
        "growth": growth,
    }
    for part, run in parts.items():
        if arguments.only not in (None, part):
            continue
        rows: list[ClusterFigures] = []
        for case in CASES if part != "growth" else CASES[:1]:
            rows += run(Runs(case, arguments.traces, out))
        console.print(figures_table(rows, is_load=part == "load"))
        figures[part] = [asdict(row) for row in rows]
        write_figures(arguments.json, "cluster", figures)


if __name__ == "__main__":
    main()
