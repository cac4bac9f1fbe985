# SPDX-License-Identifier: Apache-2.0
"""The command `radixkv dashboards`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from radixkv.errors import ConfigError


def add_commands(commands: typer.Typer) -> None:
    """Put the command into the command line's `commands`."""
    commands.command()(dashboards)


def dashboards(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; made if it is missing.")] = Path("."),
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
) -> None:
    """Write the Grafana dashboard (radixkv.json) and Prometheus' alert rules (alerts.yml).

    They belong to this version's metrics; the guide to monitoring says where they go.
    """
    files = {
        file.name: file.read_bytes()
        for file in (resources.files("radixkv_server.metrics") / "dashboards").iterdir()
        if file.name.endswith((".json", ".yml"))
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in sorted(files.items()):
            target = folder / name
            if target.exists() and target.read_bytes() != content and not force:
                raise ConfigError(f"{target} is there and differs; name another folder, or use --force")
        for name, content in sorted(files.items()):
            (folder / name).write_bytes(content)
            print(folder / name)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror or error}; name a folder that can be written"
        ) from error
