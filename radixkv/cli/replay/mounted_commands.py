# SPDX-License-Identifier: Apache-2.0
"""The commands `radixkv replay` and `radixkv simulate`, mounted on the main application."""

from __future__ import annotations

import typer

from radixkv.cli.replay.replay_command import replay_command
from radixkv.cli.replay.simulate_command import simulate_command


def add_commands(app: typer.Typer) -> None:
    """Mount both on the main application."""
    app.command("replay")(replay_command)
    app.command("simulate")(simulate_command)
