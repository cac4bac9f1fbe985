"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache.eviction.classic import FIFO, GDSF, LFU, LRU, SLRU
from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.cache.eviction.s3fifo import S3FIFO
from radixkv.errors import ConfigError


def _adaptive() -> EvictionPolicy:
    """The one that computes with numpy, which the cache does without."""
    try:
        from radixkv.cache.eviction.adaptive import Adaptive
    except ImportError as error:
        raise ConfigError(
            f"the eviction policy adaptive computes with numpy: pip install numpy ({error})"
        ) from None
    return Adaptive()


#: Name -> what makes one.
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    **{policy.name: policy for policy in (LRU, LFU, SLRU, S3FIFO, GDSF, FIFO)},
    "adaptive": _adaptive,
}


def make_eviction_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by name, or as given; ConfigError: no policy has that name."""
    if isinstance(policy, EvictionPolicy):
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"unknown eviction policy {policy!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()
