# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.cluster_simulator fit`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cluster_simulator.step_cost import Fit, fit
from benchmarks.token_prompts import scaled
from radixkv.cli.output_files import check_writable, write_json
from radixkv.cli.replay.options import JsonOption, LimitOption, TokenizerOption
from radixkv.cli.replay.readers import ReadOptions, read_trace
from radixkv.cli.replay.trace import Trace
from radixkv.engine.config import EMBEDDED_MODEL, EngineConfig

if TYPE_CHECKING:
    from benchmarks.cluster_simulator.reference_step import Clock
    from radixkv.engine.engine import Engine


def fit_command(
    model: Annotated[
        str, typer.Argument(help="Embedded model, folder, hub id or GGUF file.")
    ] = EMBEDDED_MODEL,
    json_file: JsonOption = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Also let this trace arrive at the engine, and compare with the simulation."),
    ] = None,
    limit: LimitOption = 60,
    speed: Annotated[
        float, typer.Option(min=1e-6, help="With --check: requests arrive so many times as fast as recorded.")
    ] = 1.0,
    trace_block_size: Annotated[
        int,
        typer.Option(
            min=1, help="With --check: tokens that stand for a block of the trace, for small models."
        ),
    ] = 16,
    max_answer: Annotated[int, typer.Option(min=1, help="With --check: cut answers to so many tokens.")] = 64,
    max_model_len: Annotated[int | None, typer.Option(min=64, help="Longest prompt + output.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=8, help="KV blocks. Default: from memory.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    tokenizer: TokenizerOption = "bytes",
) -> None:
    """Measure the steps of this engine on this machine, for `cluster --cost FILE`.

    With --check the simulation is put to the test: a trace arrives at the real engine in real time, and at a
    simulated one, and both times to first token are printed.
    """
    # These load torch, which the command `cluster` does without.
    from benchmarks.cluster_simulator.reference_step import WallClock
    from radixkv.entrypoints.builder import build_engine

    check_writable("--json", json_file)
    trace = None
    if check is not None:
        trace = read_trace(check, ReadOptions(tokenizer=tokenizer, limit=limit))
    console = Console()
    with console.status("loading the model"):
        config = EngineConfig(
            model=model,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            threads=threads,
            speculation="off",
            async_scheduling=False,  # each step is measured by itself
            seed=0,
        )
        engine = build_engine(config)
    if trace is not None:
        trace = scaled(trace, trace_block_size, engine.limits.max_model_len, max_answer)
    figures = {"model": model, **fit_and_check(engine, WallClock(), trace, speed, console)}
    write_json(json_file, figures)


def fit_and_check(
    engine: Engine, clock: Clock, trace: Trace | None, speed: float, console: Console
) -> dict[str, Any]:
    """Fit a cost to steps of an engine, and compare the simulation with it on a trace; prints both.

    Args:
        clock: what the engine's steps are measured by.
        trace: in the engine's measure; None: nothing is compared.
    """
    # These load torch, which the command `cluster` does without.
    from benchmarks.cluster_simulator.check import compare, replay_on_engine
    from benchmarks.cluster_simulator.measure import measure_steps, num_parts
    from benchmarks.cluster_simulator.reference_step import ReferenceStep

    reference = ReferenceStep(engine, clock)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring steps", total=num_parts(engine))
        found = fit(*measure_steps(engine, clock, reference, lambda: progress.advance(bar)))
    console.print(_fit_table(found))
    figures: dict[str, Any] = {"cost": asdict(found.cost), "fit": asdict(found)}
    reference_s = reference.take()
    if trace is not None:
        engine.cache.reset()
        num_blocks = engine.cache.num_blocks - reference.num_blocks
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task(f"{trace.name} arrives", total=trace.num_requests)
            measured = replay_on_engine(engine, trace, speed, clock, reference, lambda: progress.advance(bar))
        slowdown = reference.take() / reference_s
        figures["slowdown"] = slowdown
        figures["check"] = compare(engine, trace, speed, found.cost.times(slowdown), num_blocks, measured)
        console.print(_check_table(trace.name, slowdown, figures["check"]))
    reference.close()
    return figures


def _fit_table(found: Fit) -> Table:
    cost = found.cost
    table = Table(
        title=f"what a step costs: fitted to {found.num_steps} steps, median error {found.median_error:.1%}, "
        f"p90 {found.p90_error:.1%}",
        title_justify="left",
    )
    for name, unit in (
        ("a step", "ms"),
        ("a token", "us"),
        ("a sequence", "us"),
        ("1,000 tokens read", "us"),
    ):
        table.add_column(f"{name} ({unit})", justify="right")
    table.add_column("1,000 query-key pairs (us)", justify="right")
    table.add_column("prefill tokens/s", justify="right")
    table.add_row(
        f"{1e3 * cost.step_s:.3f}",
        f"{1e6 * cost.token_s:.2f}",
        f"{1e6 * cost.sequence_s:.2f}",
        f"{1e9 * cost.context_s:.2f}",
        f"{1e9 * cost.attention_s:.3f}",
        f"{cost.prefill_tokens_per_s:,.0f}",
    )
    return table


def _check_table(name: str, slowdown: float, rows: dict[str, dict[str, float]]) -> Table:
    table = Table(
        title=f"{name}: the engine and its simulation",
        caption=f"by a step that is always the same, the machine took {slowdown:.2f} times as long as when "
        "steps were measured; predictions are for that",
        title_justify="left",
    )
    for column in ("", "measured", "predicted", "predicted/measured"):
        table.add_column(column, justify="right" if column else "left")
    for label, row in rows.items():
        ratio = row["predicted"] / row["measured"] if row["measured"] else float("nan")
        table.add_row(label, f"{row['measured']:.3f}", f"{row['predicted']:.3f}", f"{ratio:.2f}")
    return table
