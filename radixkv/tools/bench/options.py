"""The options of `radixkv bench`: their types and their help, one name each."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

_workloads = functools.partial(typer.Option, rich_help_panel="Fixed workloads")
_load = functools.partial(typer.Option, rich_help_panel="Load (--load)")

Url = Annotated[
    str | None, typer.Option(help="Measure this running server instead of starting one for each round.")
]
Model = Annotated[
    str | None, typer.Option(help="Name of the model to ask for; default: the first that is served.")
]
Seed = Annotated[int, typer.Option(help="Seed of the (first round's) prompts.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
Server = Annotated[
    list[str] | None, typer.Argument(help="After --: arguments of the `radixkv serve` that is started.")
]

Rounds = Annotated[int, _workloads(min=1, help="Rounds with new prompts; medians are shown.")]
Workloads = Annotated[
    str | None, _workloads(help="Which, separated by commas: W1 cold, W1 warm, W2, W3, single.")
]

Load = Annotated[
    str | None,
    _load(
        help="shared: questions after one long system prompt. agent: conversations of many turns. "
        "unique: prompts that share nothing. replay: the requests of --log."
    ),
]
Rate = Annotated[
    float, _load(min=0.0, help="Sessions that begin a second, at random times (Poisson); 0: all at once.")
]
Sessions = Annotated[int, _load(min=1, help="How many there are.")]
Turns = Annotated[int, _load(min=1, help="Turns of a session of an agent.")]
PromptWords = Annotated[int, _load(min=1, help="Words of the shared or the unique prompt.")]
MaxTokens = Annotated[int, _load(min=1, help="Most tokens of an answer.")]
ExactLength = Annotated[
    bool,
    _load("--exact-length", help="Ask for exactly that many (ignore_eos: vLLM, SGLang, radixkv)."),
]
AtOnce = Annotated[
    int | None,
    _load(
        min=1,
        help="Most requests in flight. The wait for a place counts; without it nobody waits for others.",
    ),
]
Log = Annotated[
    Path | None, _load(help='Chat log to replay, JSON lines {"messages", "timestamp", "max_tokens"}.')
]
Schedule = Annotated[Path | None, _load(help='Its schedule, lines {"t", "session", "upto", "max_tokens"}.')]
ToolFile = Annotated[Path | None, _load(help="Its tool definitions by key.")]
Speed = Annotated[float, _load(min=0.001, help="Replay so many times as fast as recorded.")]
ApiKeyFile = Annotated[
    Path | None, _load(help="File with the API key; default: the variable RADIXKV_API_KEY.")
]
