"""The command `radixkv bench`: fixed workloads, or a load of one's own, on any server with OpenAI's API."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress

from radixkv.errors import ConfigError
from radixkv.extras import require_engine
from radixkv.tools.bench import options
from radixkv.tools.cli_options import parse_names
from radixkv.tools.openai_http import read_key
from radixkv.tools.output_files import check_writable, write_json


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line's `app`."""
    app.command(name="bench")(bench)


def bench(
    url: options.Url = None,
    model: options.Model = None,
    seed: options.Seed = 0,
    json_file: options.JsonFile = None,
    rounds: options.Rounds = 1,
    workloads: options.Workloads = None,
    load: options.Load = None,
    rate: options.Rate = 1.0,
    sessions: options.Sessions = 32,
    turns: options.Turns = 6,
    prompt_words: options.PromptWords = 800,
    max_tokens: options.MaxTokens = 32,
    exact_length: options.ExactLength = False,
    at_once: options.AtOnce = None,
    log: options.Log = None,
    schedule: options.Schedule = None,
    tools: options.ToolFile = None,
    speed: options.Speed = 1.0,
    api_key_file: options.ApiKeyFile = None,
    server: options.Server = None,
) -> None:
    """Measure a server over HTTP: throughput, latencies, and what came from the cache.

    Without --load, fixed workloads, greedy, 32 output tokens a request. W1: 24 questions on one shared prompt
    of 1,500 tokens, 8 at a time (cold: the first ones; warm: 24 more). W2: 4 conversations of 6 turns. W3: 16
    prompts that share nothing, 8 at a time. single: 4 such prompts, one at a time.

    With --load, chats that begin when they are due, however slow the server is (open loop): times count from
    then, so that a server that can't keep up shows it.
    """
    if url and server:
        raise ConfigError("arguments for a server to start were given, and --url of one that runs already")
    if url is None:
        require_engine("radixkv bench, without --url,")
    check_writable("--json", json_file)
    if load is not None and workloads is not None:
        raise ConfigError("--load and --workloads exclude each other")
    if load is None:
        _run_workloads(url, model, rounds, workloads, seed, json_file, server or [])
        return
    settings = {
        "load": load,
        "rate": rate,
        "sessions": sessions,
        "turns": turns,
        "prompt_words": prompt_words,
        "max_tokens": max_tokens,
        "exact_length": exact_length,
        "at_once": at_once,
        "log": None if log is None else log.name,
        "speed": speed,
        "seed": seed,
    }
    work = _sessions(settings, log, schedule, tools)
    _run_load(url, model, settings, work, read_key(api_key_file), json_file, server or [])


def _run_workloads(
    url: str | None,
    model: str | None,
    rounds: int,
    workloads: str | None,
    seed: int,
    json_file: Path | None,
    server: list[str],
) -> None:
    import httpx

    from radixkv.tools.bench.workloads import WORKLOADS, measure, medians, report, show

    chosen = parse_names("--workloads", workloads or "all", WORKLOADS)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Workloads", total=rounds * len(chosen))
        try:
            results = measure(
                url,
                model=model,
                chosen=chosen,
                num_rounds=rounds,
                seed=seed,
                server_arguments=server,
                on_done=lambda: progress.advance(task),
            )
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
    show(medians(results), f"Serving workloads, medians of {rounds} round{'s' if rounds > 1 else ''}")
    write_json(json_file, report(results))


def _sessions(
    settings: dict[str, Any], log: Path | None, schedule: Path | None, tools: Path | None
) -> list[Any]:
    from radixkv.tools.bench.scenarios import SCENARIOS, make_sessions, read_log, replayed

    scenario = settings["load"]
    if scenario not in SCENARIOS:
        raise ConfigError(f"--load: there is no {scenario!r}; known: {', '.join(SCENARIOS)}")
    if (scenario == "replay") != (log is not None):
        raise ConfigError("--load replay and --log FILE go together")
    if log is not None:
        requests = read_log(log, schedule, tools)
        return replayed(requests, speed=settings["speed"], max_tokens=settings["max_tokens"])
    return make_sessions(
        scenario,
        count=settings["sessions"],
        rate=settings["rate"],
        seed=settings["seed"],
        max_tokens=settings["max_tokens"],
        turns=settings["turns"],
        shared_words=settings["prompt_words"],
    )


def _run_load(
    url: str | None,
    model: str | None,
    settings: dict[str, Any],
    work: list[Any],
    api_key: str | None,
    json_file: Path | None,
    server: list[str],
) -> None:
    import asyncio

    import httpx

    from radixkv.tools.bench.load import Load
    from radixkv.tools.bench.load_report import figures, report, show
    from radixkv.tools.bench.server_process import started_server
    from radixkv.tools.bench.workloads import served_model

    with contextlib.nullcontext(url) if url else started_server(server) as address:
        try:
            name = model or served_model(address, api_key)
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, ValueError) as error:
            raise _unreachable(url, error) from error
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("Requests", total=sum(len(session.turns) for session in work))
            run = Load(
                address,
                name,
                api_key=api_key,
                at_once=settings["at_once"],
                exact_length=settings["exact_length"],
                on_done=lambda: progress.advance(task),
            )
            outcomes = asyncio.run(run.run(work))
    show(figures(outcomes), f"{settings['load']}: {len(work)} sessions, model {name}")
    write_json(json_file, report(outcomes, {**settings, "model": name}))
    if all(outcome.error is not None for outcome in outcomes):
        raise ConfigError("every request failed: is it a chat model, and are the prompts within its context?")


def _unreachable(url: str | None, error: Exception) -> ConfigError:
    place = url or "the server that was started"
    return ConfigError(f"{place} does not answer: {error or type(error).__name__}")
