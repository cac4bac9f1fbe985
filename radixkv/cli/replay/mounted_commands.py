"""The commands `radixkv replay` and `radixkv simulate`, mounted on the main application."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from radixkv.cli.cluster_simulator.cluster_command import cluster_command
from radixkv.cli.cluster_simulator.fit_command import fit_command
from radixkv.cli.replay.replay_command import replay_command
from radixkv.cli.replay.simulate_command import simulate_command

_DEFAULT = "memory"


class _WithDefault(TyperGroup):
    """A group whose command `memory` need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name it where no command is."""
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


def add_commands(app: typer.Typer) -> None:
    """Mount both on the main application."""
    app.command("replay")(replay_command)
    simulate = typer.Typer(
        cls=_WithDefault,
        help="Simulate memory (the default), a cluster of replicas, or measure what the latter needs.",
    )
    simulate.command(_DEFAULT)(simulate_command)
    simulate.command("cluster")(cluster_command)
    simulate.command("fit")(fit_command)
    app.add_typer(simulate, name="simulate")
