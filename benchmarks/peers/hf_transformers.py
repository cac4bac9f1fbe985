# SPDX-License-Identifier: Apache-2.0
"""transformers' `generate`, static batches of at most 8, behind a small HTTP server."""

from __future__ import annotations

import contextlib

from benchmarks.peers.engines import Peer, Places, Setting, script, threads
from benchmarks.peers.environment import prepare_environment
from benchmarks.peers.process import RunningServer, free_port, running_server

_REQUIREMENTS = ("torch==2.13.0", "transformers==5.23.0", "accelerate")


def prepare(places: Places) -> Peer:
    """Install transformers.

    Raises:
        PeerUnavailable: it can't be installed.
    """
    environment = prepare_environment("transformers", _REQUIREMENTS, timeout=places.install_timeout)

    def start() -> contextlib.AbstractContextManager[RunningServer]:
        port = free_port()
        command = [*script(environment, "transformers_server.py"), str(places.model_folder), str(port)]
        return running_server(
            [*command, str(threads())],
            port,
            log=places.logs / "transformers.log",
            timeout=places.start_timeout,
            environment={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )

    versions = environment.versions("transformers", "torch")
    return Peer(versions, [Setting("transformers, static batch of 8", "transformers", "float32", start)])
