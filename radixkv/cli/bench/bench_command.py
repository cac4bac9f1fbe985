# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv bench`: fixed workloads, or a load of one's own, on any server with OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import Progress

from radixkv.cli.bench.agent_jobs import KINDS, agent_figures, make_jobs
from radixkv.cli.bench.agent_loop import AgentLoop
from radixkv.cli.bench.load import Load
from radixkv.cli.bench.load_report import figures as load_figures
from radixkv.cli.bench.load_report import report as load_report
from radixkv.cli.bench.load_report import show as show_load
from radixkv.cli.bench.load_report import show_agents
from radixkv.cli.bench.options import AgentOptions, LoadOptions, Measured
from radixkv.cli.bench.scenarios import SCENARIOS, Session, make_sessions, read_log, replayed
from radixkv.cli.bench.server_process import machine, started_server
from radixkv.cli.bench.workloads import WORKLOADS, measure, medians, served_model
from radixkv.cli.bench.workloads import report as workloads_report
from radixkv.cli.bench.workloads import show as show_workloads
from radixkv.cli.openai_http import read_key
from radixkv.cli.options import parse_names, with_options
from radixkv.cli.output_files import check_writable, write_json
from radixkv.entrypoints.extras import require_engine
from radixkv.errors import ConfigError

_workloads = functools.partial(typer.Option, rich_help_panel="Fixed workloads")


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line's `app`."""
    command = with_options(with_options(bench, "load", LoadOptions), "agents", AgentOptions)
    app.command(name="bench")(with_options(command, "measured", Measured))


def bench(
    measured: Measured,
    load: LoadOptions,
    agents: AgentOptions,
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

    `radixkv bench agents`: agents in closed loops, whose contexts grow turn by turn: turns a second, hits
    after the first turn, tokens computed over those sent for the first time, the longest wait, fairness.
    """
    server = measured.server or []
    is_agents = server[:1] == ["agents"]
    if is_agents:
        measured = replace(measured, server=server[1:])
    if measured.url and measured.server:
        raise ConfigError("arguments for a server to start were given, and --url of one that runs already")
    if measured.url is None:
        require_engine("radixkv bench, without --url,")
    check_writable("--json", measured.json_file)
    if load.load is not None and workloads is not None:
        raise ConfigError("--load and --workloads exclude each other")
    if is_agents:
        if load.load is not None or workloads is not None:
            raise ConfigError("bench agents goes without --load and --workloads")
        _run_agents(measured, load, agents)
    elif load.load is None:
        _run_workloads(measured, rounds, workloads)
    else:
        _run_load(measured, load, _sessions(load, load.load, measured.seed))


def _run_workloads(measured: Measured, rounds: int, workloads: str | None) -> None:
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
    several = "s" if rounds > 1 else ""
    show_workloads(medians(results), f"Serving workloads, medians of {rounds} round{several}")
    write_json(measured.json_file, workloads_report(results))


def _sessions(options: LoadOptions, scenario: str, seed: int) -> list[Session]:
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


def _run_agents(measured: Measured, load: LoadOptions, options: AgentOptions) -> None:
    if options.kind not in KINDS:
        raise ConfigError(f"--kind: there is no {options.kind!r}; known: {', '.join(KINDS)}")
    jobs = make_jobs(options.kind, options.agents, measured.seed, scale=options.scale)
    api_key = read_key(load.api_key_file)
    progress = Progress(console=Console(stderr=True), transient=True)
    with _served(measured, api_key) as (address, name), progress:
        task = progress.add_task("Turns", total=sum(job.num_requests for job in jobs))
        loop = AgentLoop(
            address,
            name,
            api_key=api_key,
            at_once=load.at_once,
            exact_length=load.exact_length,
            on_done=lambda: progress.advance(task),
        )
        loop.say_done = options.say_done
        answers = asyncio.run(loop.run_jobs(jobs, measured.seed))
    figures = agent_figures(answers)
    show_agents(figures, f"{options.agents} agents, {options.kind}, model {name}")
    settings = {**asdict(options), "seed": measured.seed, "model": name}
    write_json(
        measured.json_file,
        {"benchmark": "agents", "machine": machine(), "settings": settings, "figures": figures},
    )
    if figures["turns"] == 0:
        first = next((answer.error for answer in answers), "nothing was sent")
        raise ConfigError(f"every turn failed ({first}): do the contexts fit? --scale makes them smaller")


@contextlib.contextmanager
def _served(measured: Measured, api_key: str | None) -> Iterator[tuple[str, str]]:
    """Yield the address of the server and the name of its model."""
    url = measured.url
    with contextlib.nullcontext(url) if url else started_server(measured.server or []) as address:
        try:
            name = measured.model or served_model(address, api_key)
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, ValueError) as error:
            raise _unreachable(url, error) from error
        yield address, name


def _run_load(measured: Measured, options: LoadOptions, work: list[Session]) -> None:
    api_key = read_key(options.api_key_file)
    settings = asdict(options) | {"log": options.log and options.log.name, "seed": measured.seed}
    for name in ("schedule", "tools", "api_key_file"):
        del settings[name]
    progress = Progress(console=Console(stderr=True), transient=True)
    with _served(measured, api_key) as (address, name), progress:
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
    show_load(load_figures(outcomes), f"{options.load}: {len(work)} sessions, model {name}")
    write_json(measured.json_file, load_report(outcomes, {**settings, "model": name}))
    if all(outcome.error is not None for outcome in outcomes):
        raise ConfigError("every request failed: is it a chat model, and are the prompts within its context?")


def _unreachable(url: str | None, error: Exception) -> ConfigError:
    place = url or "the server that was started"
    return ConfigError(f"{place} does not answer: {error or type(error).__name__}")
