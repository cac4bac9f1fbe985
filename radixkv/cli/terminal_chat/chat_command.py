# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv chat`."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from radixkv.cli.brief_help import BriefHelp
from radixkv.cli.openai_http import read_key
from radixkv.cli.options import engine_options
from radixkv.cli.terminal_chat.partners import LocalPartner, RemotePartner
from radixkv.cli.terminal_chat.session import ChatSession
from radixkv.cli.terminal_chat.terminal import typed_messages
from radixkv.engine.config import EngineConfig
from radixkv.engine.interpreter import settle_process
from radixkv.entrypoints.extras import require_engine


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line's `app`."""
    app.command(name="chat", cls=BriefHelp)(engine_options(chat))


def chat(
    config: EngineConfig,
    url: Annotated[
        str | None, typer.Option(help="Chat with this server instead of loading a model.", metavar="URL")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="With --url: name of the model to ask for; default: the first.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="With --url: file with the API key; default: the variable RADIXKV_API_KEY."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
) -> None:
    """Chat with a model in the terminal; each turn says how much of it came from the cache.

    Arrow keys edit and recall, Alt-Enter begins another line, Ctrl-C stops an answer, /help lists commands.
    """
    console = Console(stderr=True, highlight=False)
    partner = (
        _server(url, served_model, api_key_file, max_tokens, temperature)
        if url is not None
        else _model(config, console, max_tokens, temperature)
    )

    def write(piece: str) -> None:
        print(piece, end="", flush=True)

    def note(line: str) -> None:
        console.print(line, style="dim", markup=False)

    session = ChatSession(partner, write=write, note=note, system=system)
    if sys.stdin.isatty():
        note("/help lists the commands; Ctrl-D ends the chat.")
    with closing(partner):
        for text in typed_messages():
            session.take(text)
            if session.has_ended:
                break


def _model(config: EngineConfig, console: Console, max_tokens: int, temperature: float) -> LocalPartner:
    require_engine("radixkv chat, without --url,")
    from radixkv.entrypoints.check_start import check_start  # it needs what the extras bring

    check_start(config, fetch=True)
    from radixkv.entrypoints.builder import build_engine  # heavy: it brings torch
    from radixkv.entrypoints.llm import LLM

    console.print(f"Loading {config.model} ...")
    llm = LLM.from_engine(build_engine(config))
    settle_process()
    return LocalPartner(llm, max_tokens=max_tokens, temperature=temperature)


def _server(
    url: str, model: str | None, key_file: Path | None, max_tokens: int, temperature: float
) -> RemotePartner:
    key = read_key(key_file)
    return RemotePartner(url, model=model, api_key=key, max_tokens=max_tokens, temperature=temperature)
