# SPDX-License-Identifier: Apache-2.0
"""ReplicaSettings: number and places of the replicas."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import ConfigError
from radixkv.option_names import place_of


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Number of the engine's replicas, and their places.

    Args:
        replicas: engines of one HTTP server, on Ray Serve; None: one engine, without Ray. Needs
            the extra `ray`.
        max_replicas: replicas are added up to this number while prompts wait; None: their number is fixed.
        target_queue_s: seconds that prompts may wait on average before a replica is added.
        scale_down_after_s: seconds with hardly any queue after which a replica is removed.
        replica_cpus: CPUs of each replica; None: an equal share of this machine's, or one on a cluster.
        replica_gpus: GPUs of each replica; None: one where there are any, unless the device is cpu.
        ray_address: the Ray cluster to join, as `auto` or HOST:PORT; None: one is started on this machine.

    Raises:
        ConfigError: a value is out of range, or is given without `replicas`.
    """

    replicas: int | None = None
    max_replicas: int | None = None
    target_queue_s: float = 2.0
    scale_down_after_s: float = 120.0
    replica_cpus: float | None = None
    replica_gpus: float | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, expected: str) -> None:
            if not condition:
                value = getattr(self, name)
                raise ConfigError(f"{name} must be {expected}, not {value!r} ({place_of(name)})")

        least = self.replicas or 1
        require(self.replicas is None or self.replicas >= 1, "replicas", "at least 1")
        require(self.max_replicas is None or self.max_replicas >= least, "max_replicas", f"at least {least}")
        for name in ("target_queue_s", "scale_down_after_s"):
            require(getattr(self, name) > 0, name, "above 0")
        for name in ("replica_cpus", "replica_gpus"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, "at least 0")
        if self.replicas is None:
            for name in ("max_replicas", "replica_cpus", "replica_gpus", "ray_address"):
                require(getattr(self, name) is None, name, "given together with --replicas")
