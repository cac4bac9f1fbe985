# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv simulate`."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from radixkv.cli.options import parse_names
from radixkv.cli.output_files import write_json
from radixkv.cli.replay import workload as workloads
from radixkv.cli.replay.options import (
    JsonOption,
    PlotOption,
    check_outputs,
    trace_options,
    wide_console,
)
from radixkv.cli.replay.plots import plot_waste
from radixkv.cli.replay.readers import ReadOptions
from radixkv.cli.replay.simulate import SCHEMES, SchemeResult, simulate
from radixkv.engine.config import parse_size
from radixkv.errors import ConfigError

# layers, KV heads, head size
MODEL_SHAPES = {
    "smollm2-135m": (30, 3, 64),
    "llama-3-8b": (32, 8, 128),
    "llama-2-13b": (40, 40, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-32b": (64, 8, 128),
}


ALL_SCHEMES = ",".join(SCHEMES)


@trace_options
def simulate_command(
    options: ReadOptions,
    workload: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="Trace files (hash ids, message logs, CSV arrivals), or length distributions: "
            + ", ".join(workloads.DISTRIBUTIONS)
            + ". Default: sharegpt and uniform.",
        ),
    ] = None,
    scheme: Annotated[str, typer.Option(help="Allocation schemes, separated by commas.")] = ALL_SCHEMES,
    model: Annotated[
        str, typer.Option(help=f"Model shape: {', '.join(MODEL_SHAPES)}; or give it by the next three.")
    ] = "llama-3-8b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads per layer.")] = None,
    head_size: Annotated[int | None, typer.Option(min=1, help="Size of a head.")] = None,
    dtype_bytes: Annotated[float, typer.Option(min=0.25, help="Bytes per element of K and V.")] = 2.0,
    memory: Annotated[str, typer.Option(help="Memory for K and V, such as 24GiB.")] = "24GiB",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 16,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a slab. Default: 2048 for distributions, the longest request of a trace."
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences drawn from a distribution.")] = 2000,
    mean_input: Annotated[float, typer.Option(help="Mean prompt length of 'lognormal'.")] = 512.0,
    mean_output: Annotated[float, typer.Option(help="Mean answer length of 'lognormal'.")] = 256.0,
    sigma: Annotated[float, typer.Option(help="Spread of 'lognormal' (of the logarithm).")] = 1.0,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts of a distribution begin with.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the distributions.")] = 0,
    json_file: JsonOption = None,
    plot: PlotOption = None,
    trace_block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per block of a trace. Default: inferred.")
    ] = None,
) -> None:
    """Simulate how much KV memory is wasted, and how many sequences fit, under four ways to allocate it.

    Contiguous slabs of the maximum length, power-of-two buddies, pages, and pages with equal prompt prefixes
    held once; for sequences that wait in a queue that never runs dry. In a checkout,
    `python -m benchmarks.fragmentation` measures the same inside the running engine.
    """
    schemes = parse_names("--scheme", scheme, SCHEMES)
    check_outputs(json_file, plot)
    per_token = _bytes_per_token(model, layers, kv_heads, head_size, dtype_bytes)
    slots = int(parse_size(memory) / per_token)
    options = replace(options, block_size=trace_block_size)
    draw = partial(
        workloads.from_distribution,
        num_sequences=sequences,
        max_length=max_len or 2048,
        mean_input=mean_input,
        mean_output=mean_output,
        sigma=sigma,
        shared_prefix=shared_prefix,
        seed=seed,
    )
    results = []
    for name in workload or ["sharegpt", "uniform"]:
        is_recorded = Path(name).exists() or (name not in workloads.DISTRIBUTIONS and _looks_like_path(name))
        load = workloads.from_file(Path(name), options) if is_recorded else draw(name)
        slab = max_len if is_recorded else max_len or 2048
        results += [simulate(load, one, slots, block_size, slab) for one in schemes]
    _print_schemes(results, per_token)
    write_json(json_file, [asdict(result) for result in results])
    if plot is not None:
        plot_waste(results, plot)


def _looks_like_path(name: str) -> bool:
    return os.sep in name or name.endswith((".gz", ".jsonl", ".json", ".csv"))


def _bytes_per_token(
    model: str, layers: int | None, kv_heads: int | None, head_size: int | None, dtype_bytes: float
) -> float:
    given = (layers, kv_heads, head_size)
    if None in given:
        if model not in MODEL_SHAPES:
            raise ConfigError(
                f"unknown model shape {model!r}; use one of {', '.join(MODEL_SHAPES)}, or give --layers, "
                "--kv-heads and --head-size"
            )
        given = tuple(a if a is not None else b for a, b in zip(given, MODEL_SHAPES[model], strict=True))  # type: ignore[assignment]
    count = 2.0 * dtype_bytes
    for factor in given:
        count *= factor or 1
    return count


def _print_schemes(results: list[SchemeResult], per_token: float) -> None:
    """Print a line per workload and scheme."""
    first = results[0]
    table = Table(
        title=f"{first.total_slots:,} slots of {per_token:,.0f} bytes; pages of {first.block_size} tokens",
        caption="waste: share of the memory not free that holds no token; all shares averaged over time",
        title_justify="left",
    )
    columns = ("workload", "scheme", "waste", "tokens", "reserved", "internal", "external", "free")
    counts = ("sequences", "peak", "pages shared", "saved", "preempted", "refused")
    for column in (*columns, *counts):
        table.add_column(column, justify="left" if column in ("workload", "scheme") else "right")
    for r in results:
        table.add_row(
            r.workload,
            r.scheme,
            f"{r.waste:.2%}",
            *(
                f"{share:.1%}"
                for share in (
                    r.used_share,
                    r.reserved_share,
                    r.internal_share,
                    r.external_share,
                    r.free_share,
                )
            ),
            f"{r.mean_sequences:,.1f}",
            f"{r.peak_sequences:,}",
            f"{r.pages_saved:,.0f}",
            f"{r.shared_share:.1%}",
            f"{r.preempted:,}",
            f"{r.refused:,}",
        )
    wide_console().print(table)


def add_commands(app: typer.Typer) -> None:
    """Mount `radixkv simulate` on the main application."""
    app.command("simulate")(simulate_command)
