# SPDX-License-Identifier: Apache-2.0
"""The commands of the simulator: `cluster` and `fit`."""

from __future__ import annotations

import sys

import typer

from benchmarks.cluster_simulator.cluster_command import cluster_command
from benchmarks.cluster_simulator.fit_command import fit_command
from radixkv.errors import RadixKVError

app = typer.Typer(
    name="python -m benchmarks.cluster_simulator",
    help="Simulate a cluster of replicas, or measure what the simulation needs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("cluster")(cluster_command)
app.command("fit")(fit_command)


def main() -> None:
    """Run a command; print a user's mistake as one line and exit with 2."""
    try:
        app()
    except RadixKVError as error:
        print(f"radixkv: {error}", file=sys.stderr)
        sys.exit(2)
