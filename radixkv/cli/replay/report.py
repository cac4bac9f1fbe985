# SPDX-License-Identifier: Apache-2.0
"""Report: hit rates as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from radixkv.cli.replay.concurrent import ConcurrentResult
from radixkv.cli.replay.driver import ReplayResult

INFINITE = "infinite"
OPTIMUM = "opt-pin"


def _capacity(capacity: int | None) -> str:
    return "unlimited" if capacity is None else f"{capacity:,}"


def _rates(result: ReplayResult | None) -> str:
    return "" if result is None else f"{result.block_hit_rate:7.2%} {result.token_hit_rate:7.2%}"


def print_hit_rates(console: Console, results: Sequence[ReplayResult]) -> None:
    """Print one table per trace: a row per capacity, a column per policy, the bounds last.

    Each cell holds the share of blocks and the share of prompt tokens found.
    """
    for trace in dict.fromkeys(result.trace for result in results):
        mine = [result for result in results if result.trace == trace]
        cells = {(result.capacity_blocks, result.policy): result for result in mine}
        infinite = cells.get((None, INFINITE))
        first = mine[0]
        policies = [p for p in dict.fromkeys(r.policy for r in mine) if p not in (INFINITE, OPTIMUM)]
        bound = ""
        if infinite is not None:
            bound = (
                f"; infinite-cache bound: {infinite.block_hit_rate:.2%} of blocks, "
                f"{infinite.token_hit_rate:.2%} of tokens"
            )
        console.print(
            f"{trace}: {first.requests:,} requests, {first.blocks:,} blocks, {first.tokens:,} tokens{bound}",
            highlight=False,
        )
        table = Table(caption="each cell: block hit rate, token hit rate")
        table.add_column("blocks", justify="right")
        for policy in [*policies, OPTIMUM]:
            table.add_column(policy, justify="right")
        capacities = dict.fromkeys(r.capacity_blocks for r in mine if r.policy != INFINITE)
        for capacity in capacities:
            best = cells.get((capacity, OPTIMUM)) or (infinite if capacity is None else None)
            row = [_rates(cells.get((capacity, policy))) for policy in policies]
            table.add_row(_capacity(capacity), *row, _rates(best))
        console.print(table)


def print_concurrent(console: Console, results: Sequence[ConcurrentResult]) -> None:
    """Print what requests in flight shared, held and waited for: one line per cell."""
    if not results:
        return
    table = Table(title=f"With up to {results[0].concurrency} requests in flight", title_justify="left")
    for column in (
        "trace",
        "policy",
        "blocks",
        "block hit",
        "token hit",
        "hit in flight",
        "peak held",
        "mean in flight",
        "delayed",
        "delay (s)",
        "refused",
    ):
        table.add_column(column, justify="left" if column in ("trace", "policy") else "right")
    for result in results:
        in_flight = result.hit_blocks_in_flight / result.blocks if result.blocks else 0.0
        table.add_row(
            result.trace,
            result.policy,
            _capacity(result.capacity_blocks),
            f"{result.block_hit_rate:.2%}",
            f"{result.token_hit_rate:.2%}",
            f"{in_flight:.2%}",
            f"{result.peak_held_blocks:,}",
            f"{result.mean_in_flight:.1f}",
            f"{result.delayed_requests:,}",
            f"{result.delay_s:,.1f}",
            f"{result.refused_requests:,}",
        )
    console.print(table)
