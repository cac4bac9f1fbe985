"""The command `radixkv bench`: fixed workloads, or a load of one's own, on any server with OpenAI's API."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from radixkv.cli.bench.options import LoadOptions, Measured
from radixkv.cli.openai_http import read_key
from radixkv.cli.options import parse_names, with_options
from radixkv.cli.output_files import check_writable, write_json
from radixkv.entrypoints.extras import require_engine
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.cli.bench.scenarios import Session

_workloads = functools.partial(typer.Option, rich_help_panel="Fixed workloads")


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line's `app`."""
    command = with_options(with_options(bench, "load", LoadOptions), "measured", Measured)
    app.command(name="bench")(command)


def bench(
    measured: Measured,
    load: LoadOptions,
    rounds: Annotated[int, _workloads(min=1, help="Rounds with new prompts; medians are shown.")] = 1,
    workloads: Annotated[
        str | None, _workloads(help="Which, separated by commas: W1 cold, W1 warm, W2, W3, single.")
    ] = None,
) -> None:
    """Measure a server over HTTP: throughput, latencies, and the share of cached tokens.

    Without --load, fixed workloads, greedy, 32 output tokens a request. W1: 24 questions on one shared prompt
    of 1,500 tokens, 8 at a time (cold: the first ones; warm: 24 more). W2: 4 conversations of 6 turns. W3: 16
    prompts that share nothing, 8 at a time. single: 4 such prompts, one at a time.

    With --load, chats that begin when they are due, however slow the server is (open loop): times count from
    then, so that a server that can't keep up shows it.
    """
    if measured.url and measured.server:
        raise ConfigError("arguments for a server to start were given, and --url of one that runs already")
    if measured.url is None:
        require_engine("radixkv bench, without --url,")
    check_writable("--json", measured.json_file)
    if load.load is not None and workloads is not None:
        raise ConfigError("--load and --workloads exclude each other")
    if load.load is None:
        _run_workloads(measured, rounds, workloads)
    else:
        _run_load(measured, load, _sessions(load, load.load, measured.seed))


def _run_workloads(measured: Measured, rounds: int, workloads: str | None) -> None:
    import httpx

    from radixkv.cli.bench.workloads import WORKLOADS, measure, medians, report, show

    chosen = parse_names("--workloads", workloads or "all", WORKLOADS)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Workloads", total=rounds * len(chosen))
        try:
            results = measure(
                measured.url,
                model=measured.model,
                chosen=chosen,
                num_rounds=rounds,
                seed=measured.seed,
                server_arguments=measured.server or [],
                on_done=lambda: progress.advance(task),
            )
        except httpx.HTTPError as error:
            raise _unreachable(measured.url, error) from error
    show(medians(results), f"Serving workloads, medians of {rounds} round{'s' if rounds > 1 else ''}")
    write_json(measured.json_file, report(results))


def _sessions(options: LoadOptions, scenario: str, seed: int) -> list[Session]:
    from radixkv.cli.bench.scenarios import SCENARIOS, make_sessions, read_log, replayed

    if scenario not in SCENARIOS:
        raise ConfigError(f"--load: there is no {scenario!r}; known: {', '.join(SCENARIOS)}")
    if (scenario == "replay") != (options.log is not None):
        raise ConfigError("--load replay and --log FILE go together")
    if options.log is not None:
        requests = read_log(options.log, options.schedule, options.tools)
        return replayed(requests, speed=options.speed, max_tokens=options.max_tokens)
    return make_sessions(
        scenario,
        count=options.sessions,
        rate=options.rate,
        seed=seed,
        max_tokens=options.max_tokens,
        turns=options.turns,
        shared_words=options.prompt_words,
    )


def _run_load(measured: Measured, options: LoadOptions, work: list[Session]) -> None:
    import asyncio

    import httpx

    from radixkv.cli.bench.load import Load
    from radixkv.cli.bench.load_report import figures, report, show
    from radixkv.cli.bench.server_process import started_server
    from radixkv.cli.bench.workloads import served_model

    url, api_key = measured.url, read_key(options.api_key_file)
    settings = asdict(options) | {"log": options.log and options.log.name, "seed": measured.seed}
    for name in ("schedule", "tools", "api_key_file"):
        del settings[name]
    with contextlib.nullcontext(url) if url else started_server(measured.server or []) as address:
        try:
            name = measured.model or served_model(address, api_key)
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, ValueError) as error:
            raise _unreachable(url, error) from error
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("Requests", total=sum(len(session.turns) for session in work))
            run = Load(
                address,
                name,
                api_key=api_key,
                at_once=options.at_once,
                exact_length=options.exact_length,
                on_done=lambda: progress.advance(task),
            )
            outcomes = asyncio.run(run.run(work))
    show(figures(outcomes), f"{options.load}: {len(work)} sessions, model {name}")
    write_json(measured.json_file, report(outcomes, {**settings, "model": name}))
    if all(outcome.error is not None for outcome in outcomes):
        raise ConfigError("every request failed: is it a chat model, and are the prompts within its context?")


def _unreachable(url: str | None, error: Exception) -> ConfigError:
    place = url or "the server that was started"
    return ConfigError(f"{place} does not answer: {error or type(error).__name__}")
