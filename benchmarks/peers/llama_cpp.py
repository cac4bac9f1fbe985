# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server: the xllamacpp wheel's, compiled for AVX2, or one that was compiled for this processor.

It serves float32 weights and the model's own Q4_1, or one GGUF file, with 8 slots and 1.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.engines import Peer, Places, Setting, script, threads
from benchmarks.peers.environment import Environment, prepare_environment, run_step
from benchmarks.peers.process import RunningServer, free_port, running_server

#: What pip installs for llama.cpp.
REQUIREMENTS = ("xllamacpp==2026.10.11549", "gguf==0.19.0")


@dataclass(frozen=True)
class Build:
    """A llama.cpp.

    Attributes:
        command: that starts its server; options of `llama-server` follow.
        versions: which one it is.
    """

    command: list[str]
    versions: dict[str, str]

    def start(
        self, file: Path, *options: str, slots: int, context: int, threads: int, log: Path, timeout: float
    ) -> contextlib.AbstractContextManager[RunningServer]:
        """A fresh server of a file.

        Args:
            context: tokens of each slot.
            log, timeout: of `running_server`.
        """
        port = free_port()
        command = [*self.command, "--model", str(file), "--port", str(port), "--parallel", str(slots)]
        command += ["--ctx-size", str(context * slots), "--threads", str(threads), *options]
        return running_server(command, port, log=log, timeout=timeout)


def find_build(program: Path | None, install_timeout: float) -> Build:
    """The build of a `llama-server`, or without one the wheel's.

    Raises:
        PeerUnavailable: the wheel can't be installed, or the program does not run.
    """
    if program is None:
        environment = _environment(install_timeout)
        return Build(script(environment, "llamacpp_server.py"), environment.versions("xllamacpp"))
    printed = run_step([str(program), "--version"], timeout=60, what=f"{program} --version")
    return Build([str(program)], {"llama-server": f"{' '.join(printed.split())}: {program}"})


def _environment(timeout: float) -> Environment:
    return prepare_environment("llamacpp", REQUIREMENTS, timeout=timeout)


def prepare(places: Places) -> Peer:
    """Find or install llama.cpp and write the float32 GGUF file.

    Raises:
        PeerUnavailable: it can't be installed or does not run, or the file can't be made.
    """
    build = find_build(places.llama_server, places.install_timeout)
    if places.only_gguf:
        return Peer(build.versions, _settings(build, places, ("GGUF", "packed", places.gguf)))
    environment = _environment(places.install_timeout)
    plain = environment.folder / f"{places.gguf.stem}.F32.gguf"
    if not plain.exists():
        staging = plain.with_suffix(".part")
        command = [*script(environment, "gguf_float32.py"), str(places.gguf), str(staging)]
        run_step(command, timeout=300, what="writing the float32 GGUF file")
        staging.replace(plain)

    files = ("F32", "float32", plain), ("Q4_1", "quantised", places.gguf)
    return Peer(build.versions, _settings(build, places, *files))


def _settings(build: Build, places: Places, *files: tuple[str, str, Path]) -> list[Setting]:
    """Settings with 8 slots and 1 for each label, precision and file."""
    settings = []
    for label, precision, file in files:
        for slots in (8, 1):
            name = f"llama.cpp {label}, {slots} slot{'s' if slots > 1 else ''}"
            start = functools.partial(
                build.start, file, slots=slots, context=4096, threads=threads(),
                log=places.logs / "llamacpp.log", timeout=places.start_timeout,
            )  # fmt: skip
            settings.append(Setting(name, "llamacpp", precision, start))
    return settings
