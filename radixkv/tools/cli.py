"""The command line: `radixkv serve`, `keys`, `chat`, `pull`, `explain`, `cache`, `bench`, `replay` ...

Every mistake of a user ends as one paragraph on standard error and a non-zero exit, without a traceback.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Annotated

import typer

import radixkv
from radixkv.config import EMBEDDED_MODEL
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
    from radixkv.model.loading.loader import pull as pull_model

    print(pull_model(name, trust_remote_code=trust_remote_code))


@functools.cache
def command_tree() -> typer.Typer:
    """All commands, those included that live with what they run."""
    from radixkv.tools.bench import cli as bench
    from radixkv.tools.cache_folder import cli as cache_folder
    from radixkv.tools.chat import cli as chat
    from radixkv.tools.explain import cli as explain
    from radixkv.tools.replay import cli as replay
    from radixkv.tools.serve import cli as serve

    for commands in (serve, chat, explain, cache_folder, bench, replay):
        commands.add_commands(app)
    return app


def main() -> None:
    """Entry point of the `radixkv` command."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command_tree()()
    except RadixKVError as error:
        print(f"radixkv: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
