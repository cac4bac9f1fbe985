# SPDX-License-Identifier: Apache-2.0
"""Plots: hit rate over capacity, and waste of the allocation schemes. Needs matplotlib (`radixkv[plot]`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.cli.replay.driver import ReplayResult
from radixkv.cli.replay.report import INFINITE, OPTIMUM
from radixkv.entrypoints.extras import install_command
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.cli.replay.simulate import SchemeResult


def require_matplotlib(path: Path | None = None) -> Any:
    """matplotlib's Figure class, without a display or global state.

    Args:
        path: where the plot shall go; checked so that a long run does not fail at its end.

    Raises:
        ConfigError: matplotlib is not installed, or it can't write that kind of file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"plots need matplotlib: {install_command('plot')}, or leave --plot out") from None
    if path is not None:
        kinds = FigureCanvasAgg.get_supported_filetypes()
        if path.suffix.lstrip(".").lower() not in kinds:
            raise ConfigError(
                f"--plot {path.name}: can't write that kind of file; use one of {', '.join(sorted(kinds))}"
            )
    return Figure


def line_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a look for each name, unlike all others and the same in every panel of a figure."""
    lines, markers = ("-", "-.", (0, (1, 1)), (0, (5, 1))), "osD^v<>PX*"
    return {
        name: {
            "color": f"C{number % 10}",
            "linestyle": lines[number // 10 % 4],
            "marker": markers[number // 10 % 10],
        }
        for number, name in enumerate(dict.fromkeys(names))
    }


def plot_hit_rates(results: Sequence[ReplayResult], path: Path) -> None:
    """Write one panel per trace: block hit rate over capacity, a line per policy, the bounds dashed.

    Raises:
        ConfigError: as `require_matplotlib`.
    """
    figure_class = require_matplotlib(path)
    traces = list(dict.fromkeys(result.trace for result in results))
    columns = min(len(traces), 2)
    rows = -(-len(traces) // columns)
    figure = figure_class(figsize=(6.4 * columns, 4.4 * rows), layout="constrained")
    bounds = (OPTIMUM, INFINITE)
    styles = line_styles(result.policy for result in results if result.policy not in bounds)
    styles[OPTIMUM] = {"linestyle": "--", "color": "black"}
    for position, trace in enumerate(traces, start=1):
        axes = figure.add_subplot(rows, columns, position)
        mine = [result for result in results if result.trace == trace]
        for policy in dict.fromkeys(result.policy for result in mine if result.policy != INFINITE):
            points = sorted(
                (result.capacity_blocks, 100 * result.block_hit_rate)
                for result in mine
                if result.policy == policy and result.capacity_blocks is not None
            )
            if points:
                axes.plot(*zip(*points, strict=True), label=policy, **styles[policy])
        for result in mine:
            if result.policy == INFINITE:
                axes.axhline(100 * result.block_hit_rate, linestyle=":", color="grey", label=INFINITE)
        axes.set_xscale("log")
        axes.set_title(trace)
        axes.set_xlabel("capacity (blocks)")
        axes.set_ylabel("blocks found (%)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def plot_waste(results: Sequence[SchemeResult], path: Path) -> None:
    """Write two bar charts: where the memory goes, and how many sequences fit, per workload and scheme.

    Raises:
        ConfigError: as `require_matplotlib`.
    """
    figure_class = require_matplotlib(path)
    figure = figure_class(figsize=(12, 1.2 + 0.42 * len(results)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [f"{result.workload}: {result.scheme}" for result in results]
    start = [0.0] * len(results)
    for label, key in (
        ("tokens", "used_share"),
        ("reserved", "reserved_share"),
        ("internal", "internal_share"),
        ("external", "external_share"),
        ("free", "free_share"),
    ):
        widths = [100 * getattr(result, key) for result in results]
        left.barh(names, widths, left=start, label=label)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    left.set_xlabel("share of the KV memory (%), averaged over time")
    left.legend(fontsize="small", ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    left.invert_yaxis()
    right.barh(
        names, [result.mean_sequences for result in results], color="grey"
    )  # a colour of no part on the left
    right.set_xlabel("sequences at once, averaged over time")
    figure.savefig(path, dpi=130)
