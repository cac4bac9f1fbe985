"""The commands `radixkv replay` and `radixkv simulate`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from radixkv.cache.eviction import POLICIES, make_policy
from radixkv.errors import ConfigError
from radixkv.replay import workload as workloads
from radixkv.replay.concurrent import ConcurrentResult, ServiceRates
from radixkv.replay.driver import ReplayResult
from radixkv.replay.plots import plot_hit_rates, plot_waste, require_matplotlib
from radixkv.replay.readers import BlockIds, ReadOptions, read_trace
from radixkv.replay.report import INFINITE, OPTIMUM, print_concurrent, print_hit_rates, write_json
from radixkv.replay.runner import Cell, run_cells
from radixkv.replay.simulate import SCHEMES, SchemeResult, simulate
from radixkv.replay.trace import Trace

# layers, KV heads, head size
MODEL_SHAPES = {
    "smollm2-135m": (30, 3, 64),
    "llama-3-8b": (32, 8, 128),
    "llama-2-13b": (40, 40, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-32b": (64, 8, 128),
}
_SIZES = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 2**10, "m": 2**20, "g": 2**30}

JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this JSON file.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Also draw the figures (.png, .svg, .pdf).")]
BlockIdsOption = Annotated[
    str,
    typer.Option(
        help="What a hash id names: its whole 'prefix', the 'content' of its block, or 'auto' (content in "
        "Qwen's form, prefix otherwise)."
    ),
]
ScheduleOption = Annotated[
    Path | None, typer.Option(help="Schedule of a message log; found beside it if its name says so.")
]
ToolsOption = Annotated[
    Path | None, typer.Option(help="Tool definitions of a message log; found beside it if its name says so.")
]
TokenizerOption = Annotated[
    str, typer.Option(help="For message logs: 'bytes', or a tokenizer's folder or hub id.")
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only the first so many requests of each.")]


def add_commands(app: typer.Typer) -> None:
    """Mount both commands on the main application."""
    app.command("replay")(replay_command)
    app.command("simulate")(simulate_command)


def parse_policies(text: str) -> list[str]:
    """Policy names separated by commas; `all` stands for every one.

    Raises:
        ConfigError: unknown policy.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ["all"]:
        return list(POLICIES)
    if not names:
        raise ConfigError(f"--policy names no policy; there are {', '.join(sorted(POLICIES))}")
    for name in names:
        make_policy(name)
    return names


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


def parse_bytes(text: str) -> int:
    """A size such as 24GiB, 8e9, 512MiB.

    Raises:
        ConfigError: not a size above 0.
    """
    clean = text.strip().lower()
    digits = clean.rstrip("abcdfghijklmnopqrstuvwxyz")
    unit = clean[len(digits) :]
    try:
        size = int(float(digits) * _SIZES[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"--memory must be a size such as 24GiB, not {text!r}")
    return size


def _read_options(
    block_size: int | None,
    block_ids: str,
    schedule: Path | None,
    tools: Path | None,
    tokenizer: str,
    limit: int | None,
) -> ReadOptions:
    choices: dict[str, BlockIds] = {"auto": "auto", "prefix": "prefix", "content": "content"}
    if block_ids not in choices:
        raise ConfigError(f"--block-ids must be one of {', '.join(choices)}, not {block_ids!r}")
    return ReadOptions(
        block_size=block_size,
        block_ids=choices[block_ids],
        schedule=schedule,
        tools=tools,
        tokenizer=tokenizer,
        limit=limit,
    )


def _check_json(path: Path | None) -> None:
    """So that a long run does not fail at its end."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {path.parent}")


def replay_command(
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
    block_ids: BlockIdsOption = "auto",
    schedule: ScheduleOption = None,
    tools: ToolsOption = None,
    tokenizer: TokenizerOption = "bytes",
    limit: LimitOption = None,
) -> None:
    """Replay request traces through the prefix cache and print hit rates per policy and capacity.

    Beside the policies stand the infinite-cache bound and opt-pin, the best that any order of eviction could
    have done knowing the future (with the running request held).
    """
    policies = parse_policies(policy)
    wanted = parse_capacities(capacity) if capacity is not None else None
    _check_json(json_file)
    if plot is not None:
        require_matplotlib(plot)
    options = _read_options(block_size, block_ids, schedule, tools, tokenizer, limit)
    traces = [read_trace(path, options) for path in trace]
    if len({one.name for one in traces}) < len(traces):
        traces = [replace(one, name=str(path)) for one, path in zip(traces, trace, strict=True)]
    rates = ServiceRates(prefill_rate, decode_rate)
    cells: list[Cell] = []
    overlapping: list[Cell] = []
    for position, one in enumerate(traces):
        cells.append(Cell(position, INFINITE, None))
        for size in wanted if wanted is not None else default_capacities(one):
            cells += [Cell(position, name, size) for name in policies]
            cells.append(Cell(position, OPTIMUM, size))
            if concurrency is not None:
                overlapping += [Cell(position, name, size, concurrency, rates) for name in policies]
    workers = jobs if jobs is not None else min(2, os.cpu_count() or 1)
    run = run_cells(traces, [*cells, *overlapping], workers, Console(stderr=True))
    console = Console(width=None if Console().is_terminal else 200)
    apart = [result for result in run.results if isinstance(result, ConcurrentResult)]
    print_hit_rates(console, run.results[: len(cells)])
    print_concurrent(console, apart)
    console.print(
        f"{len(run.results)} replays in {run.wall_s:.1f} s ({run.cpu_s:.1f} s of processor time).",
        highlight=False,
    )
    if json_file is not None:
        write_json(run.results, json_file)
    if plot is not None:
        plot_hit_rates(_without_overlap(run.results), plot)


def _without_overlap(results: list[ReplayResult]) -> list[ReplayResult]:
    return [result for result in results if not isinstance(result, ConcurrentResult)]


def simulate_command(
    workload: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="Trace files (hash ids, message logs, CSV arrivals), or length distributions: "
            + ", ".join(workloads.DISTRIBUTIONS)
            + ". Default: sharegpt and uniform.",
        ),
    ] = None,
    scheme: Annotated[str, typer.Option(help="Allocation schemes, separated by commas.")] = ",".join(SCHEMES),
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
    block_ids: BlockIdsOption = "auto",
    schedule: ScheduleOption = None,
    tools: ToolsOption = None,
    tokenizer: TokenizerOption = "bytes",
    limit: LimitOption = None,
) -> None:
    """Simulate how much KV memory is wasted, and how many sequences fit, under four ways to allocate it.

    Contiguous slabs of the maximum length, power-of-two buddies, pages, and pages with equal prompt prefixes
    held once; for sequences that wait in a queue that never runs dry.
    """
    schemes = [name.strip() for name in scheme.split(",") if name.strip()]
    unknown = [name for name in schemes if name not in SCHEMES]
    if unknown or not schemes:
        raise ConfigError(f"--scheme: unknown {', '.join(unknown) or 'empty list'}; use {', '.join(SCHEMES)}")
    _check_json(json_file)
    if plot is not None:
        require_matplotlib(plot)
    per_token = _bytes_per_token(model, layers, kv_heads, head_size, dtype_bytes)
    slots = int(parse_bytes(memory) / per_token)
    options = _read_options(trace_block_size, block_ids, schedule, tools, tokenizer, limit)
    results = []
    for name in workload or ["sharegpt", "uniform"]:
        if Path(name).exists() or (name not in workloads.DISTRIBUTIONS and _looks_like_path(name)):
            load, length = workloads.from_file(Path(name), options), max_len
        else:
            length = max_len or 2048
            load = workloads.from_distribution(
                name,
                num_sequences=sequences,
                max_length=length,
                mean_input=mean_input,
                mean_output=mean_output,
                sigma=sigma,
                shared_prefix=shared_prefix,
                seed=seed,
            )
        results += [simulate(load, one, slots, block_size, length) for one in schemes]
    _print_schemes(results, per_token)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n", encoding="utf-8")
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
    """One line per workload and scheme."""
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
    Console(width=None if Console().is_terminal else 200).print(table)
