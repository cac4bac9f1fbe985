"""The command `radixkv bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from radixkv.errors import ConfigError


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line's `app`."""
    app.command(name="bench")(bench)


def bench(
    url: Annotated[
        str | None, typer.Option(help="Measure this running server instead of starting one for each round.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model to ask for; default: the first that is served.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds with new prompts; medians are shown.")] = 1,
    workloads: Annotated[
        str | None, typer.Option(help="Which, separated by commas: W1 cold, W1 warm, W2, W3, single.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first round's prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    server: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments of the `radixkv serve` that is started.")
    ] = None,
) -> None:
    """Run serving workloads over HTTP: wall time, throughput, latencies, and what came from the cache.

    W1: 24 questions on one shared prompt of 1,500 tokens, 8 at a time (cold: the first ones; warm: 24 more).
    W2: 4 conversations of 6 turns. W3: 16 prompts that share nothing, 8 at a time. single: 4 such prompts,
    one at a time. Greedy, 32 output tokens a request.
    """
    import httpx

    from radixkv.tools.bench.workloads import WORKLOADS, measure, medians, report, show

    chosen = [name.strip() for name in workloads.split(",")] if workloads else list(WORKLOADS)
    if unknown := sorted(set(chosen) - set(WORKLOADS)):
        raise ConfigError(f"--workloads: there is no {', '.join(unknown)}; known: {', '.join(WORKLOADS)}")
    if url and server:
        raise ConfigError("arguments for a server to start were given, and --url of one that runs already")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Workloads", total=rounds * len(chosen))
        try:
            results = measure(
                url,
                model=model,
                chosen=chosen,
                num_rounds=rounds,
                seed=seed,
                server_arguments=server or (),
                on_done=lambda: progress.advance(task),
            )
        except httpx.HTTPError as error:
            place = url or "the server that was started"
            raise ConfigError(f"{place} does not answer: {error or type(error).__name__}") from error
    show(medians(results), f"Serving workloads, medians of {rounds} round{'s' if rounds > 1 else ''}")
    if json_file is not None:
        json_file.write_text(json.dumps(report(results), indent=2) + "\n", encoding="utf-8")
