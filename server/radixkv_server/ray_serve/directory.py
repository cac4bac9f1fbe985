# SPDX-License-Identifier: Apache-2.0
"""ReplicaDirectory: a request router of Ray Serve that lists the replicas, and calls a given one.

`radixkv.cluster.routing` chooses the replica of a prompt by token ids and exact block events, before anything
is sent; Ray Serve calls that replica and no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

#: Called with the names of all replicas of a deployment whenever these change; on any thread.
Listener = Callable[[frozenset[str]], None]


class _Watched:
    """Replicas that this process may call, shared by all routers, which Ray Serve makes itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, frozenset[str]] = {}
        self._listeners: dict[str, Listener] = {}

    def listen(self, deployment: str, listener: Listener) -> None:
        with self._lock:
            self._listeners[deployment] = listener
            names = self._names.get(deployment)
        if names is not None:
            listener(names)

    def update(self, deployment: str, names: frozenset[str]) -> None:
        with self._lock:
            self._names[deployment] = names
            listener = self._listeners.get(deployment)
        if listener is not None:
            listener(names)


_WATCHED = _Watched()


def watch(deployment: str, listener: Listener) -> None:
    """Subscribe to a deployment's replicas, beginning with the known ones."""
    _WATCHED.listen(deployment, listener)


class ReplicaDirectory(RequestRouter):
    """Router to the replica named by a call's keyword `replica`, or to any."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the called replica, or, if it is gone, the others, which refuse calls for another one."""
        wanted = None if pending_request is None else pending_request.kwargs.get("replica")
        named = [one for one in candidate_replicas if one.replica_id.unique_id == wanted]
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in a new list of replicas from Ray Serve."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Drop a replica found dead before Ray Serve's controller reports it."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        names = frozenset(replica_id.unique_id for replica_id in self.curr_replicas)
        _WATCHED.update(f"{self.app_name}#{self._deployment_id.name}", names)
