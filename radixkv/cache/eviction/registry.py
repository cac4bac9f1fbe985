"""The eviction policies by name."""

from __future__ import annotations

from radixkv.cache.eviction.adaptive import Adaptive
from radixkv.cache.eviction.classic import FIFO, GDSF, LFU, LRU, SLRU
from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.eviction.s3fifo import S3FIFO
from radixkv.errors import ConfigError

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (LRU, LFU, SLRU, S3FIFO, GDSF, FIFO, Adaptive)
}


def make_eviction_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by name, or as given; ConfigError: no policy has that name."""
    if isinstance(policy, EvictionPolicy):
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"unknown eviction policy {policy!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()
