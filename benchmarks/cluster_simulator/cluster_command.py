# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.cluster_simulator cluster`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cluster_simulator.figures import (
    GOOD_SHARE,
    ClusterFigures,
    find_load,
    pooled_hit_rate,
    simulate_cluster,
)
from benchmarks.cluster_simulator.plots import plot_cluster
from benchmarks.cluster_simulator.routers import ROUTERS
from benchmarks.cluster_simulator.simulated_replica import ReplicaConfig
from benchmarks.cluster_simulator.simulation import ClusterConfig
from benchmarks.cluster_simulator.step_cost import make_cost
from radixkv.cache.eviction.registry import POLICIES as EVICTION
from radixkv.cache.eviction.registry import make_eviction_policy
from radixkv.cli.options import parse_names
from radixkv.cli.output_files import write_json
from radixkv.cli.replay.options import (
    JsonOption,
    PlotOption,
    check_outputs,
    trace_options,
    wide_console,
)
from radixkv.cli.replay.readers import ReadOptions, read_trace
from radixkv.cli.replay.trace import Trace
from radixkv.errors import ConfigError
from radixkv.scheduling.policy import POLICIES as SCHEDULING
from radixkv.scheduling.policy import make_policy


@dataclass(frozen=True, slots=True)
class _Cell:
    """Cell of the table: a router before a number of replicas."""

    router: str
    num_replicas: int


def parse_replicas(text: str) -> list[int]:
    """Numbers of replicas, separated by commas.

    Raises:
        ConfigError: not numbers of at least 1, or none.
    """
    try:
        counts = list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > 4096:
        raise ConfigError(f"--replicas takes numbers from 1 to 4096, separated by commas; not {text!r}")
    return counts


@trace_options
def cluster_command(
    options: ReadOptions,
    trace: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Trace files, plain or gzipped.")],
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, separated by commas.")] = "8",
    policy: Annotated[
        str, typer.Option(help=f"Routing policies, separated by commas, or 'all': {', '.join(ROUTERS)}.")
    ] = "round-robin,expected-ttft",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of each replica, in the trace's size.")] = 12_000,
    cost: Annotated[
        str,
        typer.Option(help="Cost of steps: 'h100-8b' (an estimate), or a file written by `fit`."),
    ] = "h100-8b",
    prefill_rate: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Instead: prompt tokens that a replica computes per second."),
    ] = None,
    decode_step: Annotated[
        float | None, typer.Option(min=0, help="Instead: seconds of a decode step, of any size.")
    ] = None,
    ttft_limit: Annotated[
        float, typer.Option(min=1e-6, help="Seconds within which a first token is good.")
    ] = 5.0,
    find_max_load: Annotated[
        bool,
        typer.Option(
            "--find-load", help="Find the load at which 90 % of the requests still keep --ttft-limit."
        ),
    ] = False,
    speed: Annotated[
        float, typer.Option(min=1e-6, help="Requests arrive so many times as fast as recorded.")
    ] = 1.0,
    event_delay: Annotated[
        float, typer.Option(min=0, help="Seconds after which the router hears what a cache holds.")
    ] = 0.0,
    max_answer: Annotated[int | None, typer.Option(min=1, help="Cut answers to so many tokens.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most running requests of a replica.")] = 256,
    scheduling: Annotated[
        str, typer.Option(help=f"Admission policy of a replica: {', '.join(SCHEDULING)}.")
    ] = "prefix",
    eviction: Annotated[
        str, typer.Option(help=f"Eviction policy of a replica: {', '.join(EVICTION)}.")
    ] = "lru",
    json_file: JsonOption = None,
    plot: PlotOption = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per block of the trace. Default: inferred.")
    ] = None,
) -> None:
    """Simulate a trace on a cluster: hit rates, latencies and the load it carries, per routing policy.

    Every replica runs the real scheduler over the real prefix cache; only the model is replaced, by what its
    steps cost. `python -m benchmarks.cluster_simulator fit` measures that on this machine.
    """
    routers, counts = parse_names("--policy", policy, ROUTERS), parse_replicas(replicas)
    step_cost = make_cost(cost, prefill_rate, decode_step)
    make_policy(scheduling)  # before long work: they are names of policies
    make_eviction_policy(eviction)
    check_outputs(json_file, plot)
    options = replace(options, block_size=block_size)
    rows: list[ClusterFigures] = []
    for path in trace:
        recorded = read_trace(path, options)
        replica = ReplicaConfig(
            blocks, recorded.block_size, max_num_batched_tokens, max_num_seqs, scheduling, eviction
        )
        for cell in [_Cell(name, count) for count in counts for name in routers]:
            config = ClusterConfig(cell.num_replicas, replica, step_cost, speed, event_delay, max_answer)
            rows += _run(recorded, cell, config, ttft_limit, find_max_load)
    console = wide_console()
    console.print(figures_table(rows, is_load=find_max_load))
    write_json(json_file, {"cost": asdict(step_cost), "rows": [_json(row) for row in rows]})
    if plot is not None:
        plot_cluster(rows, plot)


def _run(
    trace: Trace, cell: _Cell, config: ClusterConfig, limit_s: float, find_max_load: bool
) -> list[ClusterFigures]:
    """The row of one cell; none where no load is carried."""
    pooled = pooled_hit_rate(trace, config)
    title = f"{trace.name}, {cell.num_replicas} x {cell.router}"
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=trace.num_requests)

        def run(at: float) -> ClusterFigures:
            progress.reset(bar, description=f"{title}, {at:.3g} x")
            at_this = replace(config, speed=at)
            return simulate_cluster(
                trace,
                cell.router,
                ROUTERS[cell.router],
                at_this,
                limit_s,
                pooled,
                lambda: progress.advance(bar),
            )

        found = find_load(run, config.speed) if find_max_load else run(config.speed)
    if found is None:
        Console(stderr=True).print(
            f"{title}: no row, for more than {1 - GOOD_SHARE:.0%} of the requests miss --ttft-limit "
            f"{limit_s:g} however slowly they come; give a larger one, or a faster --cost",
            soft_wrap=True,
            highlight=False,
        )
        return []
    return [found]


def figures_table(rows: list[ClusterFigures], *, is_load: bool) -> Table:
    """One line per trace, number of replicas and router; loads beside that of the first router."""
    title = "the most load that keeps the limit" if is_load else "the trace as it came"
    table = Table(
        title=title,
        caption="of pooled: hit rate over that of one cache as large as all; twice: resident blocks that "
        "another replica has, too",
        title_justify="left",
    )
    names = ("trace", "replicas", "policy", "requests/s", *(("of first",) if is_load else ()), "hit rate")
    names += ("of pooled", "TTFT p50", "p90", "p99 (s)", "ITL p50", "p99 (ms)", "good/s", "within")
    names += ("busiest/mean", "busy", "twice", "preempted", "refused")
    for name in names:
        table.add_column(name, justify="left" if name in ("trace", "policy") else "right")
    first: dict[tuple[str, int], float] = {}
    for row in rows:
        base = first.setdefault((row.trace, row.num_replicas), row.requests_per_s)
        table.add_row(
            row.trace,
            str(row.num_replicas),
            row.router,
            f"{row.requests_per_s:.2f}",
            *((f"{row.requests_per_s / base:.2f} x",) if is_load else ()),
            f"{row.hit_rate:.1%}",
            f"{row.pooled_share:.1%}",
            *(f"{value:.2f}" for value in (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)),
            *(f"{1000 * value:.1f}" for value in (row.itl_p50_s, row.itl_p99_s)),
            f"{row.goodput_per_s:.2f}",
            f"{row.within_limit:.1%}",
            f"{row.busiest_over_mean:.2f}",
            f"{row.utilisation:.0%}",
            f"{row.duplicated_blocks:.1%}",
            f"{row.preemptions:,}",
            f"{row.refused:,}",
        )
    return table


def _json(row: ClusterFigures) -> dict[str, Any]:
    return asdict(row) | {"pooled_share": row.pooled_share}
