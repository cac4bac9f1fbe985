# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.compare` measures: settings of radixkv and of its peers, and how each is started."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environment import Environment
from benchmarks.peers.process import RunningServer, free_port, running_server

ServerFactory = Callable[[], contextlib.AbstractContextManager[RunningServer]]


@dataclass(frozen=True)
class Setting:
    """One engine in one configuration.

    Attributes:
        name: what tables call it.
        engine: `radixkv`, `vllm`, `llamacpp` or `transformers`.
        precision: of the weights; settings of the same precision are compared with each other.
        start: a fresh server.
    """

    name: str
    engine: str
    precision: str
    start: ServerFactory


@dataclass(frozen=True)
class Places:
    """Where the inputs of all engines lie, and how patient to be.

    Attributes:
        only_gguf: the GGUF file is any one, which all engines serve in its own precision.
        llama_server: of a llama.cpp to measure in place of the wheel's.
    """

    model_folder: Path
    gguf: Path
    logs: Path
    install_timeout: float
    start_timeout: float
    only_gguf: bool = False
    llama_server: Path | None = None


@dataclass(frozen=True)
class Peer:
    """An installed peer: its versions, the exact recipe, and its settings."""

    versions: dict[str, str]
    settings: list[Setting]


def threads() -> int:
    """CPU threads for every engine: the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def script(environment: Environment, name: str) -> list[str]:
    """The command that runs a script of this folder in a peer's environment."""
    return [str(environment.python), str(Path(__file__).with_name(name))]


def start_radixkv(
    places: Places, *options: str, log: str = "radixkv.log"
) -> contextlib.AbstractContextManager[RunningServer]:
    """A fresh `radixkv serve` with these options."""
    port = free_port()
    command = [sys.executable, "-m", "radixkv", "serve", str(places.model_folder)]
    command += ["--port", str(port), *options]
    return running_server(command, port, log=places.logs / log, timeout=places.start_timeout)


def radixkv_settings(places: Places) -> list[Setting]:
    """radixkv itself, as it starts by default, and with int8 weights; or with a GGUF file's blocks."""
    if places.only_gguf:
        return [Setting("radixkv packed", "radixkv", "packed", lambda: start_radixkv(places))]
    return [
        Setting("radixkv float32", "radixkv", "float32", lambda: start_radixkv(places)),
        Setting(
            "radixkv int8", "radixkv", "quantised", lambda: start_radixkv(places, "--quantization", "int8")
        ),
    ]
