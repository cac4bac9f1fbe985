# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv replay`."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from radixkv.cache.eviction.registry import parse_policies
from radixkv.cli.output_files import write_json
from radixkv.cli.replay.concurrent import ConcurrentResult, ServiceRates
from radixkv.cli.replay.options import (
    JsonOption,
    PlotOption,
    check_outputs,
    trace_options,
    wide_console,
)
from radixkv.cli.replay.plots import plot_hit_rates
from radixkv.cli.replay.readers import ReadOptions, read_trace
from radixkv.cli.replay.report import INFINITE, OPTIMUM, print_concurrent, print_hit_rates
from radixkv.cli.replay.runner import Cell, run_cells
from radixkv.cli.replay.trace import Trace
from radixkv.errors import ConfigError


def parse_capacities(text: str) -> list[int | None]:
    """Numbers of blocks separated by commas; `inf` is no limit.

    Raises:
        ConfigError: not a number of at least 1, nor `inf`.
    """
    capacities: list[int | None] = []
    for part in (part.strip().lower() for part in text.split(",")):
        if not part:
            continue
        if part in ("inf", "infinite", "unlimited"):
            capacities.append(None)
            continue
        try:
            number = int(part)
        except ValueError:
            number = 0
        if number < 1:
            raise ConfigError(
                f"--capacity takes numbers of blocks (at least 1) or 'inf', separated by commas; not {part!r}"
            )
        capacities.append(number)
    if not capacities:
        raise ConfigError("--capacity names no capacity; give numbers of blocks, or 'inf'")
    return list(dict.fromkeys(capacities))


def default_capacities(trace: Trace) -> list[int | None]:
    """1, 3, 10, 30 and 100 % of the trace's distinct blocks."""
    sizes = [max(1, trace.num_unique * percent // 100) for percent in (1, 3, 10, 30, 100)]
    return list(dict.fromkeys(sizes))


@trace_options
def replay_command(
    options: ReadOptions,
    trace: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Trace files, plain or gzipped.")],
    policy: Annotated[str, typer.Option(help="Eviction policies, separated by commas, or 'all'.")] = (
        "lru,adaptive"
    ),
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Cache sizes in the trace's blocks, separated by commas; 'inf' is no limit. "
            "Default: 1, 3, 10, 30 and 100 % of each trace's distinct blocks."
        ),
    ] = None,
    json_file: JsonOption = None,
    plot: PlotOption = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Also replay with up to so many requests in flight, reported apart."),
    ] = None,
    prefill_rate: Annotated[
        float,
        typer.Option(min=1e-3, help="With --concurrency: prompt tokens computed per second, per request."),
    ] = 20_000.0,
    decode_rate: Annotated[
        float, typer.Option(min=1e-3, help="With --concurrency: answer tokens per second, per request.")
    ] = 40.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: 2, or 1 on a machine with one core.")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per block. Default: inferred from hash ids; 16 for message logs."),
    ] = None,
) -> None:
    """Replay request traces through the prefix cache and print hit rates per policy and capacity.

    Beside the policies stand the infinite-cache bound and opt-pin, the best that any order of eviction could
    have done knowing the future (with the running request held).
    """
    policies = parse_policies(policy)
    wanted = parse_capacities(capacity) if capacity is not None else None
    check_outputs(json_file, plot)
    traces = _read_traces(trace, replace(options, block_size=block_size))
    cells = _cells(traces, policies, wanted)
    if concurrency is not None:
        rates = ServiceRates(prefill_rate, decode_rate)
        cells += [
            Cell(cell.trace, cell.policy, cell.capacity, concurrency, rates)
            for cell in cells
            if cell.policy in policies
        ]
    workers = jobs if jobs is not None else min(2, os.cpu_count() or 1)
    run = run_cells(traces, cells, workers, Console(stderr=True))
    apart = [result for result in run.results if isinstance(result, ConcurrentResult)]
    alone = [result for result in run.results if not isinstance(result, ConcurrentResult)]
    console = wide_console()
    print_hit_rates(console, alone)
    print_concurrent(console, apart)
    console.print(
        f"{len(run.results)} replays in {run.wall_s:.1f} s ({run.cpu_s:.1f} s of processor time).",
        highlight=False,
    )
    write_json(json_file, [asdict(result) for result in run.results])
    if plot is not None:
        plot_hit_rates(alone, plot)


def _read_traces(paths: list[Path], options: ReadOptions) -> list[Trace]:
    """The traces by their short names; by their paths if two have the same."""
    traces = []
    for path in paths:
        with Console(stderr=True).status(f"reading {path.name}"):
            traces.append(read_trace(path, options))
    if len({one.name for one in traces}) < len(traces):
        traces = [replace(one, name=str(path)) for one, path in zip(traces, paths, strict=True)]
    return traces


def _cells(traces: list[Trace], policies: list[str], capacities: list[int | None] | None) -> list[Cell]:
    """The cells to replay, bounds included, one request after another."""
    cells = []
    for position, trace in enumerate(traces):
        cells.append(Cell(position, INFINITE, None))
        for size in default_capacities(trace) if capacities is None else capacities:
            cells += [Cell(position, name, size) for name in policies]
            cells.append(Cell(position, OPTIMUM, size))
    return cells


def add_commands(app: typer.Typer) -> None:
    """Mount `radixkv replay` on the main application."""
    app.command("replay")(replay_command)
