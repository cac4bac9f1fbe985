# SPDX-License-Identifier: Apache-2.0
"""The eviction policies by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from radixkv.cache.eviction.lru import LRU
from radixkv.cache.eviction.policy import EvictionPolicy
from radixkv.errors import ConfigError


def _adaptive() -> EvictionPolicy:
    """Import the one policy that computes with numpy, which the cache does without."""
    try:
        from radixkv.cache.eviction.adaptive import Adaptive  # it needs numpy, which the cache does without
    except ImportError as error:
        raise ConfigError(
            f"the eviction policy adaptive computes with numpy: pip install numpy ({error})"
        ) from None
    return Adaptive()


#: Name -> factory.
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {LRU.name: LRU, "adaptive": _adaptive}


def make_eviction_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Return the policy of a name, of an import path `MODULE:CLASS`, or as given.

    Raises:
        ConfigError: no policy has that name, or the import fails.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if ":" in policy:
        return _imported(policy)
    if policy not in POLICIES:
        raise ConfigError(
            f"unknown eviction policy {policy!r}; there are {', '.join(sorted(POLICIES))}, and any "
            "EvictionPolicy as MODULE:CLASS (in a checkout, benchmarks.classic_policies:LFU and others)"
        )
    return POLICIES[policy]()


def _imported(path: str) -> EvictionPolicy:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"eviction policy {path!r} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(f"eviction policy {path!r} is no subclass of EvictionPolicy")
    return found()


def parse_policies(text: str) -> list[str]:
    """Split names separated by commas, each once; `all` stands for every registered one.

    Raises:
        ConfigError: a name is unknown, its import fails, or there is none.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ["all"]:
        return sorted(POLICIES)
    for name in names or [""]:
        make_eviction_policy(name)
    return names
