# SPDX-License-Identifier: Apache-2.0
"""The options of `radixkv bench`: their types, their help and their defaults."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_load = functools.partial(typer.Option, rich_help_panel="Load (--load)")


@dataclass(frozen=True, slots=True)
class Measured:
    """Options of the measurement and the destinations of its figures."""

    url: Annotated[
        str | None, typer.Option(help="Measure this running server instead of starting one for each round.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Name of the model to ask for; default: the first that is served.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the (first round's) prompts.")] = 0
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None
    server: Annotated[
        list[str] | None,
        typer.Argument(
            help="`agents`: agents in closed loops. After --: arguments of the `radixkv serve` to start."
        ),
    ] = None


_agents = functools.partial(typer.Option, rich_help_panel="Agents (bench agents)")


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Agents in closed loops."""

    kind: Annotated[str, _agents(help="Their jobs: agents, swe, chat, one-shot, mixed or cliff.")] = "agents"
    agents: Annotated[int, _agents(min=1, help="How many there are.")] = 16
    scale: Annotated[float, _agents(min=0.001, help="Multiplies all tokens.")] = 1.0
    say_done: Annotated[
        bool, _agents(help="Last requests say `session_done`, which other servers may refuse.")
    ] = False


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """A load of chats."""

    load: Annotated[
        str | None,
        _load(
            help="shared: questions after one long system prompt. agent: conversations of many turns. "
            "unique: prompts that share nothing. replay: the requests of --log."
        ),
    ] = None
    rate: Annotated[
        float, _load(min=0.0, help="Sessions that begin a second, at random times (Poisson); 0: all at once.")
    ] = 1.0
    sessions: Annotated[int, _load(min=1, help="How many there are.")] = 32
    turns: Annotated[int, _load(min=1, help="Turns of a session of an agent.")] = 6
    prompt_words: Annotated[int, _load(min=1, help="Words of the shared or the unique prompt.")] = 800
    max_tokens: Annotated[int, _load(min=1, help="Most tokens of an answer.")] = 32
    exact_length: Annotated[
        bool,
        _load("--exact-length", help="Ask for exactly that many (ignore_eos: vLLM, SGLang, radixkv)."),
    ] = False
    at_once: Annotated[
        int | None,
        _load(
            min=1,
            help="Most requests in flight. The wait for a place counts; without it nobody waits for others.",
        ),
    ] = None
    log: Annotated[
        Path | None, _load(help='Chat log to replay, JSON lines {"messages", "timestamp", "max_tokens"}.')
    ] = None
    schedule: Annotated[
        Path | None, _load(help='Its schedule, lines {"t", "session", "upto", "max_tokens"}.')
    ] = None
    tools: Annotated[Path | None, _load(help="Its tool definitions by key.")] = None
    speed: Annotated[float, _load(min=0.001, help="Replay so many times as fast as recorded.")] = 1.0
    api_key_file: Annotated[
        Path | None, _load(help="File with the API key; default: the variable RADIXKV_API_KEY.")
    ] = None
