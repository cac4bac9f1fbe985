# SPDX-License-Identifier: Apache-2.0
"""EngineReplica: an engine that Ray Serve makes, watches, drains and replaces.

Requests come over connections of their own (`radixkv.cluster.remote.tcp`), which cost microseconds where a
call through Ray costs milliseconds, and which show at once that a reader, or the whole replica, has gone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator

import ray
from ray import serve

from radixkv.cluster.remote.tcp import EngineAddress
from radixkv.engine.config import EngineConfig
from radixkv.errors import EngineStoppedError
from radixkv_server.log_format import configure_logging
from radixkv_server.ray_serve.autoscaling import QUEUE_S
from radixkv_server.ray_serve.replica_engines import ForkedEngine, OwnEngine, ReplicaEngine, may_fork

# Seconds in which a front must connect, and between two checks for connected fronts.
_CONNECT_S = 30.0
_LOOK_S = 0.2
# A front's report of the queue that is older than this no longer counts.
_STALE_S = 10.0


class EngineReplica:
    """Actor with an engine.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        configure_logging("text", None)
        self._engine = _make_engine(config)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._queues: dict[str, tuple[float, float]] = {}  # by front: time of its report, seconds

    async def name(self) -> str:
        """Name by which it is called."""
        return self._name

    async def attach(self, *, replica: str) -> AsyncGenerator[EngineAddress]:
        """Yield the address of the engine; go on while a front is connected, so that Ray Serve waits for it.

        Raises:
            LookupError: another replica was meant.
        """
        self._check(replica)
        yield self._engine.address
        deadline = time.monotonic() + _CONNECT_S
        while self._engine.num_clients or time.monotonic() < deadline:
            if self._engine.num_clients:
                deadline = 0.0
            await asyncio.sleep(_LOOK_S)

    async def note_queue(self, front: str, queue_s: float, *, replica: str) -> None:
        """Note a front's report of the prompts' waiting time, for the autoscaler."""
        self._check(replica)
        self._queues[front] = (time.monotonic(), queue_s)

    @property
    def queue_s(self) -> float:
        """Seconds until it has computed the prompts of all fronts, by their latest reports."""
        now = time.monotonic()
        return sum(queue_s for at, queue_s in self._queues.values() if now - at < _STALE_S)

    def _check(self, replica: str) -> None:
        if replica != self._name:
            raise LookupError(f"the replica {replica} has gone; this is {self._name}")

    async def check_health(self) -> None:
        """Check the engine for Ray Serve, which replaces a replica that raises.

        Raises:
            EngineStoppedError: the engine has failed.
        """
        if not self._engine.is_healthy:
            raise EngineStoppedError("the engine has failed")

    def __del__(self) -> None:
        """Write pending blocks to the tiers after Ray Serve has drained it."""
        self._engine.close()


def _make_engine(config: EngineConfig) -> ReplicaEngine:
    host = ray.util.get_node_ip_address()
    if not may_fork(config, len(ray.get_gpu_ids())):
        return OwnEngine(config, host)
    # At its next check Ray Serve finds this process dead, sooner than it would find it unhealthy.
    return ForkedEngine(config, host, ray.get_runtime_context().get_node_id(), lambda: os._exit(1))


class AutoscaledReplica(EngineReplica):
    """Replica that reports its queue, which Ray Serve rejects for a fixed number of replicas."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the report to Ray Serve's autoscaler."""
        return {QUEUE_S: self.queue_s}
