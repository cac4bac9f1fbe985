# SPDX-License-Identifier: Apache-2.0
"""Draws docs/lab/plots from the raw figures in benchmarks/results; nothing is measured here.

    python -m benchmarks.plots [--results FOLDER] [--folder FOLDER]

| plot | figures from |
|---|---|
| ttft_by_hit_ratio.svg, throughput_by_share.svg | `python -m benchmarks.hit_ratio` |
| host_cost_by_cached_blocks.png | `python -m benchmarks.host_scale` |
| ttft_by_working_set.svg | `python -m benchmarks.tiers` |
| replicas.svg | `python -m benchmarks.cluster` |
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cluster_simulator.figures import ClusterFigures
from benchmarks.cluster_simulator.plots import cluster_figure

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "docs" / "lab" / "plots", help="where the plots go"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    pyplot.rcParams["svg.hashsalt"] = "radixkv"  # the same figures give the same file
    written = (
        ("hit_ratio", hit_ratio_plots),
        ("host_scale", host_scale_plots),
        ("tiers", tier_plots),
        ("cluster", cluster_plots),
    )
    for name, plots in written:
        result = json.loads((arguments.results / f"{name}.json").read_text(encoding="utf-8"))
        for file, figure in plots(result).items():
            metadata = {"Date": None} if file.endswith(".svg") else {}
            figure.savefig(arguments.folder / file, dpi=120, metadata=metadata)
    pyplot.close("all")


def hit_ratio_plots(result: dict[str, Any]) -> dict[str, Figure]:
    """TTFT over the hit ratio, and throughput over the share of the prompt that requests share."""
    # A reader must be able to tell a quiet machine from a busy one.
    about = f"{_about(result)}, load average {result['machine']['load_average'][0]:.1f}"
    ttft, axes = _figure(f"1,500-token prompts\n{about}")
    points = result["ttft"]
    axes.plot([100 * p["hit_ratio"] for p in points], [1000 * p["ttft_s"] for p in points], "o-")
    axes.set(xlabel="prompt tokens from the cache, %", ylabel="time to first token, ms", ylim=(0, None))
    throughput, axes = _figure(f"16 requests of 500 + 32 tokens, 8 at a time\n{about}")
    for name, values in result["output_tokens_per_s"].items():
        axes.plot([100 * share for share in result["shares"]], values, "o-", label=f"{name} prefix cache")
    axes.set(xlabel="share of the prompt that requests share, %", ylabel="output tokens/s", ylim=(0, None))
    axes.legend()
    return {"ttft_by_hit_ratio.svg": ttft, "throughput_by_share.svg": throughput}


def host_scale_plots(result: dict[str, Any]) -> dict[str, Figure]:
    """Cost per token over cached blocks, relative to the smallest cache."""
    figures = result["ns_per_token"]
    figure, axes = _figure(f"Host cost per token by what is cached\n{_about(result)}")
    sizes = [int(size) for size in figures]
    first = next(iter(figures.values()))
    for name in first:
        label = f"{name} ({first[name]:.0f} ns a token at {sizes[0]:,} blocks)"
        axes.plot(sizes, [row[name] / first[name] for row in figures.values()], "o-", label=label)
    axes.set(xscale="log", xlabel="cached blocks", ylabel="cost per token, relative", ylim=(0, None))
    axes.legend(fontsize=8)
    return {"host_cost_by_cached_blocks.png": figure}


def tier_plots(result: dict[str, Any]) -> dict[str, Figure]:
    """TTFT of a conversation's second turn over the size of the working set, median and 95th percentile."""
    sizes = result["sizes"]
    about = f"{_about(result)}, load average {result['machine']['load_average'][0]:.1f}"
    figure, axes = _figure(f"Second turns, a cache of {result['pool_tokens']} tokens\n{about}")
    for tier in next(iter(sizes.values())):
        median, worst = ([1000 * row[tier][f"ttft_{p}_s"] for row in sizes.values()] for p in ("p50", "p95"))
        label = "no tier" if tier == "none" else tier
        axes.fill_between(range(len(sizes)), median, worst, alpha=0.2)
        axes.plot(range(len(sizes)), median, "o-", label=f"{label} (median, up to the 95th percentile)")
    axes.set(xlabel="working set, times the cache", ylabel="time to first token, ms", ylim=(0, None))
    axes.set_xticks(range(len(sizes)), [name.removesuffix("x") for name in sizes])
    axes.legend(fontsize=8)
    return {"ttft_by_working_set.svg": figure}


def cluster_plots(result: dict[str, Any]) -> dict[str, Figure]:
    """What one to 64 replicas carry and find, by routing policy."""
    return {"replicas.svg": cluster_figure([ClusterFigures(**row) for row in result["growth"]])}


def _about(result: dict[str, Any]) -> str:
    return f"{result['machine']['processor']}, {result['machine']['cpus']} CPUs, {result['date']}"


def _figure(title: str) -> tuple[Figure, Axes]:
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    return figure, axes


if __name__ == "__main__":
    main()
