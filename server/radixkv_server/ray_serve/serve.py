# SPDX-License-Identifier: Apache-2.0
"""`radixkv serve --replicas N`: start a cluster of Ray on this machine or join one, and serve."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from radixkv.engine.config import EngineConfig
from radixkv.entrypoints.extras import install_command
from radixkv.errors import ConfigError, EngineStoppedError, MissingPackageError
from radixkv_server.http.listener import bind_socket
from radixkv_server.ray_serve.settings import ReplicaSettings
from radixkv_server.settings import ServerSettings

#: Of the application on the cluster.
APPLICATION = "radixkv"
_REACHABLE_S = 5.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # nothing large goes through it
# Processes of Ray that would idle, and its output between our own lines.
_LEAN = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}

OnReady = Callable[[str, int], None]


def serve_replicas(
    config: EngineConfig,
    settings: ServerSettings,
    replicas: ReplicaSettings,
    *,
    on_ready: OnReady | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish running requests and remove the application.

    Args:
        on_ready: called with host and port once requests are accepted.

    Raises:
        ConfigError: a setting is wrong, the port can't be had, or the cluster can't be reached.
        MissingPackageError: Ray is not installed.
        EngineStoppedError: no replica could be started.
    """
    try:  # optional: the extra `ray`
        import ray
        from ray import serve
    except ImportError as error:
        raise MissingPackageError(
            f"radixkv serve --replicas needs {error.name}: {install_command('ray')}", name=error.name
        ) from None
    from radixkv_server.ray_serve.application import application, placed  # imports ray

    host, port = settings.host, settings.port or _free_port(settings.host)
    _connect(ray, replicas)
    # It warns that `serve.run` finds the HTTP server that was started with our address.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        resources = ray.cluster_resources()
        placed_config, placed_replicas = placed(
            config, replicas, resources.get("CPU", 1.0), resources.get("GPU", 0.0)
        )
        serve.start(
            proxy_location="HeadOnly",
            http_options={
                "host": settings.host,
                "port": port,
                "keep_alive_timeout_s": max(1, round(settings.keep_alive_s)),
            },
        )
        if replicas.ray_address is not None:
            host, port = _joined(serve, settings)
        app = application(placed_config, settings, placed_replicas)
        with _Signals() as signals:
            _run(serve, app)
            if on_ready is not None:
                on_ready(host, port)
            signals.wait()
            serve.delete(APPLICATION)
    finally:
        if replicas.ray_address is None:
            serve.shutdown()
        ray.shutdown()


def _connect(ray: Any, replicas: ReplicaSettings) -> None:
    try:
        if replicas.ray_address is not None:
            _check_reachable(replicas.ray_address)
            # What its processes say is in the cluster's own logs.
            ray.init(address=replicas.ray_address, logging_level=logging.WARNING, log_to_driver=False)
            return
        for name, value in _LEAN.items():
            os.environ.setdefault(name, value)
        number = replicas.max_replicas or replicas.replicas or 1
        cpus = max(float(os.cpu_count() or 1), number * (replicas.replica_cpus or 1.0))
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            num_cpus=int(cpus) + 1,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
            log_to_driver=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        where = f"--ray-address {replicas.ray_address}" if replicas.ray_address else "a local cluster"
        raise ConfigError(f"{where}: Ray can't be reached or started: {error}") from error


def _check_reachable(address: str) -> None:
    """Check that the cluster is reachable, since Ray itself would try for minutes.

    Raises:
        OSError, ValueError: no server listens at HOST:PORT, or it is no address.
    """
    host, _, port = address.rpartition(":")
    if host and "/" not in host:  # neither `auto` nor a URL
        socket.create_connection((host, int(port)), _REACHABLE_S).close()


def _joined(serve: Any, settings: ServerSettings) -> tuple[str, int]:
    """Return the address of the cluster's Ray Serve, as chosen by its first user.

    Raises:
        ConfigError: it has another port than is asked for, or runs an application of this name.
    """
    if APPLICATION in serve.status().applications:
        raise ConfigError(
            f"the cluster runs an application named {APPLICATION} already; end it first: by `serve "
            "shutdown`, or where it was started"
        )
    options = serve.context._get_global_client().http_config  # Ray has no public way to ask
    if settings.port not in (0, options.port):
        raise ConfigError(
            f"the cluster's Ray Serve listens on port {options.port} already, not {settings.port}; use "
            f"--port {options.port}, or `serve shutdown` first"
        )
    return options.host, options.port


def _run(serve: Any, app: Any) -> None:
    try:
        serve.run(app, name=APPLICATION, route_prefix="/", logging_config={"log_level": "WARNING"})
    except (RuntimeError, ValueError, serve.exceptions.RayServeException) as error:
        raise EngineStoppedError(f"no replica could be started: {_reason(serve) or error}") from error


def _reason(serve: Any) -> str:
    """Return the last line of a replica's exception."""
    app = serve.status().applications.get(APPLICATION)
    deployments = {} if app is None else app.deployments
    lines = [line for one in deployments.values() for line in one.message.splitlines() if line.strip()]
    found = [line for line in lines if line.startswith("radixkv.errors.")]
    return found[-1].partition(": ")[2] if found else ""


def _free_port(host: str) -> int:
    with bind_socket(host, 0) as sock:
        port: int = sock.getsockname()[1]
        return port


class _Signals:
    """Wait for the first SIGINT or SIGTERM; without end where signals can't be received."""

    def __init__(self) -> None:
        self._told = threading.Event()

    def __enter__(self) -> _Signals:
        self._before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        if self._told.is_set():
            raise KeyboardInterrupt
        self._told.set()

    def wait(self) -> None:
        self._told.wait()
