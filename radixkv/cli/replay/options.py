# SPDX-License-Identifier: Apache-2.0
"""Options and outputs shared by the commands `radixkv replay` and `radixkv simulate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from radixkv.cli.options import with_options
from radixkv.cli.output_files import check_writable
from radixkv.cli.replay.plots import require_matplotlib
from radixkv.cli.replay.readers import BLOCK_IDS, ReadOptions
from radixkv.errors import ConfigError

JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this JSON file.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Also draw the figures (.png, .svg, .pdf).")]
TokenizerOption = Annotated[
    str, typer.Option(help="For message logs: 'bytes', or a tokenizer's folder, tokenizer.json or hub id.")
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only the first so many requests of each.")]


def trace_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a typer command, which takes `options: ReadOptions`, the options that say how traces are read.

    That of the block size is its own: commands have it under several names.
    """
    return with_options(command, "options", _read_options)


def _read_options(
    block_ids: Annotated[
        str,
        typer.Option(
            help="What a hash id names: its whole 'prefix', the 'content' of its block, or 'auto' "
            "(content in Qwen's form, prefix otherwise)."
        ),
    ] = "auto",
    schedule: Annotated[
        Path | None, typer.Option(help="Schedule of a message log; found beside it if its name says so.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(help="Tool definitions of a message log; found beside it if its name says so."),
    ] = None,
    tokenizer: TokenizerOption = "bytes",
    limit: LimitOption = None,
) -> ReadOptions:
    if block_ids not in BLOCK_IDS:
        raise ConfigError(f"--block-ids must be one of {', '.join(BLOCK_IDS)}, not {block_ids!r}")
    return ReadOptions(None, block_ids, schedule, tools, tokenizer, limit)


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Look before a long run whether its figures can be written and drawn.

    Raises:
        ConfigError: they can't.
    """
    check_writable("--json", json_file)
    if plot is not None:
        require_matplotlib(plot)
    check_writable("--plot", plot)


def wide_console() -> Console:
    """Return the console for tables: as wide as the terminal, and 200 columns in a file."""
    return Console(width=None if Console().is_terminal else 200)
