# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server, from the xllamacpp wheel: float32 weights and the model's own Q4_1, 8 slots and 1."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from benchmarks.peers.engines import Peer, Places, Setting, script, threads
from benchmarks.peers.environment import Environment, prepare_environment, run_step
from benchmarks.peers.process import RunningServer, free_port, running_server

#: What pip installs for llama.cpp.
REQUIREMENTS = ("xllamacpp==2026.10.11549", "gguf==0.19.0")


def prepare(places: Places) -> Peer:
    """Install llama.cpp and write the float32 GGUF file.

    Raises:
        PeerUnavailable: it can't be installed, or the file can't be made.
    """
    environment = prepare_environment("llamacpp", REQUIREMENTS, timeout=places.install_timeout)
    if places.only_gguf:
        return Peer(
            environment.versions("xllamacpp"), _settings(environment, places, ("GGUF", "packed", places.gguf))
        )
    plain = environment.folder / f"{places.gguf.stem}.F32.gguf"
    if not plain.exists():
        staging = plain.with_suffix(".part")
        command = [*script(environment, "gguf_float32.py"), str(places.gguf), str(staging)]
        run_step(command, timeout=300, what="writing the float32 GGUF file")
        staging.replace(plain)

    files = ("F32", "float32", plain), ("Q4_1", "quantised", places.gguf)
    return Peer(environment.versions("xllamacpp"), _settings(environment, places, *files))


def _settings(environment: Environment, places: Places, *files: tuple[str, str, Path]) -> list[Setting]:
    """Settings with 8 slots and 1 for each label, precision and file."""
    settings = []
    for label, precision, file in files:
        for slots in (8, 1):
            name = f"llama.cpp {label}, {slots} slot{'s' if slots > 1 else ''}"
            start = functools.partial(_start, environment, places, file, slots)
            settings.append(Setting(name, "llamacpp", precision, start))
    return settings


def _start(
    environment: Environment, places: Places, file: Path, slots: int
) -> contextlib.AbstractContextManager[RunningServer]:
    port = free_port()
    command = [*script(environment, "llamacpp_server.py"), str(file), str(port), str(slots), str(threads())]
    return running_server(command, port, log=places.logs / "llamacpp.log", timeout=places.start_timeout)
