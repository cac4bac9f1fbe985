# SPDX-License-Identifier: Apache-2.0
"""The command line: `radixkv serve`, `key`, `chat`, `pull`, `explain`, `cache`, `audit` ...

Every mistake of a user ends as one paragraph on standard error and a non-zero exit, without a traceback.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

import radixkv
from radixkv.engine.config import EMBEDDED_MODEL
from radixkv.entrypoints.extras import missing_package
from radixkv.errors import RadixKVError

app = typer.Typer(
    name="radixkv",
    help="A prefix-caching LLM serving engine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(radixkv.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("radixkv").setLevel(logging.DEBUG if verbose else logging.INFO)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Embedded model or hub id.")] = EMBEDDED_MODEL,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Fetch its Python code, too; nothing is run."),
    ] = False,
) -> None:
    """Fetch (and convert) a model ahead of time; print its folder."""
    from radixkv.model.loading.loader import pull as pull_model  # heavy: it brings torch

    print(pull_model(name, trust_remote_code=trust_remote_code))


#: Module of this room -> the commands that it adds.
_COMMANDS = {
    "audit_command.audit_command": ("audit",),
    "serve_command": ("serve", "key"),
    "terminal_chat.chat_command": ("chat",),
    "explain_command": ("explain",),
    "cache_folder_command": ("cache",),
    "dashboards_command": ("dashboards",),
    "run_batch_command": ("run-batch",),
    "bench.bench_command": ("bench",),
    "replay.replay_command": ("replay",),
    "replay.simulate_command": ("simulate",),
    "proxy_command": ("proxy",),
}


def command_tree(command: str = "") -> typer.Typer:
    """Return the application with all commands, imported from their modules.

    Args:
        command: name of the one that will run: no other module need be imported. Any other text: all are.
    """
    chosen = [module for module, names in _COMMANDS.items() if command in names]
    for module in chosen or _COMMANDS:
        _add_commands(module)
    return app


@functools.cache
def _add_commands(module: str) -> None:
    try:
        commands = importlib.import_module(f"radixkv.cli.{module}")
    except ModuleNotFoundError as error:
        _add_refusals(_COMMANDS[module], error)
    else:
        commands.add_commands(app)


def _add_refusals(names: Sequence[str], error: ModuleNotFoundError) -> None:
    """Add commands that name the missing package, in the place of commands that can't be imported."""
    if missing_package(error, "") is None:
        raise error
    for name in names:
        missing = missing_package(error, f"radixkv {name}")
        assert missing is not None

        def refuse(context: typer.Context, missing: RadixKVError = missing) -> None:
            raise missing

        app.command(
            name,
            help=escape(f"{missing}."),  # of `[cpu]` markup would leave nothing
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(refuse)


def main() -> None:
    """Entry point of the `radixkv` command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command_tree(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))()
    except RadixKVError as error:
        _end(error)
    except ModuleNotFoundError as error:
        missing = missing_package(error, "this")
        if missing is None:
            raise
        _end(missing)
    except KeyboardInterrupt:
        sys.exit(130)


def _end(error: RadixKVError) -> NoReturn:
    print(f"radixkv: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
