# SPDX-License-Identifier: Apache-2.0
"""Plots of clusters: what they carry and find over the number of replicas. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster_simulator.figures import ClusterFigures
from radixkv.cli.replay.plots import line_styles, require_matplotlib

_PANELS = (
    ("requests_per_s", "requests/s", 1.0),
    ("ttft_p90_s", "TTFT p90 (s)", 1.0),
    ("hit_rate", "prompt tokens found (%)", 100.0),
)


def plot_cluster(rows: Sequence[ClusterFigures], path: Path) -> None:
    """Write the file of `--plot`.

    Raises:
        ConfigError: matplotlib is not installed, or can't write that kind of file.
    """
    require_matplotlib(path)
    cluster_figure(rows).savefig(path, dpi=130)


def cluster_figure(rows: Sequence[ClusterFigures]) -> Any:
    """Three panels a trace, over the number of replicas, a line per routing policy: a figure of matplotlib.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure_class = require_matplotlib()
    traces = list(dict.fromkeys(row.trace for row in rows)) or [""]
    figure = figure_class(figsize=(13, 3.8 * len(traces)), layout="constrained")
    styles = line_styles(row.router for row in rows)
    for line, trace in enumerate(traces):
        mine = [row for row in rows if row.trace == trace]
        for column, (name, label, factor) in enumerate(_PANELS):
            axes = figure.add_subplot(len(traces), len(_PANELS), line * len(_PANELS) + column + 1)
            for router in dict.fromkeys(row.router for row in mine):
                points = sorted(
                    (row.num_replicas, factor * getattr(row, name)) for row in mine if row.router == router
                )
                axes.plot(*zip(*points, strict=True), label=router, **styles[router])
            axes.set_xscale("log", base=2)
            if name != "hit_rate":
                axes.set_yscale("log")
            axes.set_xlabel("replicas")
            axes.set_ylabel(label)
            axes.set_title(trace)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    return figure
