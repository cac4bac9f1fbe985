# SPDX-License-Identifier: Apache-2.0
"""Run the cells of a hit-rate table, in this process or in several, with a progress bar."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from radixkv.cli.replay.bounds import infinite_bound, offline_optimum
from radixkv.cli.replay.concurrent import ServiceRates, replay_concurrent
from radixkv.cli.replay.driver import ReplayResult, replay
from radixkv.cli.replay.report import INFINITE, OPTIMUM
from radixkv.cli.replay.trace import Trace
from radixkv.helper_process import safe_helpers

_SMALL = 2_000_000  # blocks over all cells below which starting processes costs more than it saves


@dataclass(frozen=True, slots=True)
class Cell:
    """A replay: trace (by position), policy, capacity; with `concurrency`, of overlapping requests."""

    trace: int
    policy: str
    capacity: int | None
    concurrency: int | None = None
    rates: ServiceRates | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Results of `run_cells`.

    Attributes:
        results: one per cell, in the cells' order.
        wall_s: wall time.
        cpu_s: processor time of all processes, for the cells alone.
    """

    results: list[ReplayResult]
    wall_s: float
    cpu_s: float


_traces: list[Trace] = []


def _set_traces(traces: list[Trace]) -> None:
    """Runs once in each worker process."""
    _traces[:] = traces


def _run_in_worker(cell: Cell) -> tuple[ReplayResult, float]:
    return run_cell(_traces[cell.trace], cell)


def run_cell(trace: Trace, cell: Cell) -> tuple[ReplayResult, float]:
    """Run one cell; returns its result and the processor time it took.

    Raises:
        ConfigError: unknown policy.
    """
    began = time.process_time()
    if cell.policy == INFINITE or (cell.policy == OPTIMUM and cell.capacity is None):
        hits = infinite_bound(trace)
        result = ReplayResult.of(trace, cell.policy, None, hits, time.process_time() - began)
    elif cell.policy == OPTIMUM:
        hits = offline_optimum(trace, cell.capacity or 1)
        result = ReplayResult.of(trace, cell.policy, cell.capacity, hits, time.process_time() - began)
    elif cell.concurrency is not None:
        result = replay_concurrent(trace, cell.policy, cell.capacity, cell.concurrency, cell.rates)
    else:
        result = replay(trace, cell.policy, cell.capacity)
    return result, time.process_time() - began


def run_cells(traces: list[Trace], cells: Sequence[Cell], jobs: int, console: Console) -> Run:
    """Run all cells.

    Args:
        traces: the traces that the cells' positions refer to.
        cells: the replays to run.
        jobs: processes; small work runs in this one.
        console: where the progress bar goes.

    Raises:
        ConfigError: unknown policy.
    """
    began = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("replaying", total=len(cells))
        work = sum(traces[cell.trace].num_blocks for cell in cells)
        if jobs > 1 and len(cells) > 1 and work > _SMALL:
            done = _run_in_processes(traces, cells, jobs, progress, bar)
        else:
            done = []
            for cell in cells:
                done.append(run_cell(traces[cell.trace], cell))
                progress.advance(bar)
    results = [result for result, _ in done]
    return Run(results, time.perf_counter() - began, sum(cpu for _, cpu in done))


def _run_in_processes(
    traces: list[Trace], cells: Sequence[Cell], jobs: int, progress: Progress, bar: TaskID
) -> list[tuple[ReplayResult, float]]:
    """Run cells in worker processes; the traces travel once to each."""
    context = multiprocessing.get_context("spawn")
    with (
        safe_helpers(),
        ProcessPoolExecutor(jobs, context, initializer=_set_traces, initargs=(traces,)) as pool,
    ):
        futures = [pool.submit(_run_in_worker, cell) for cell in cells]
        waiting = set(futures)
        try:
            while waiting:
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                progress.advance(bar, len(finished))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
