"""The commands of this package, below `radixkv simulate`."""

from __future__ import annotations

import typer

from radixkv.tools.cluster.cluster_command import cluster_command
from radixkv.tools.cluster.fit_command import fit_command


def add_commands(app: typer.Typer) -> None:
    """Mount them on `radixkv simulate`."""
    app.command("cluster")(cluster_command)
    app.command("fit")(fit_command)
