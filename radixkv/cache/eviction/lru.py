# SPDX-License-Identifier: Apache-2.0
"""The least-recently-used order of eviction."""

from __future__ import annotations

from typing import Any

from radixkv.cache.eviction.policy import CachedRun, EvictionPolicy


class LRU(EvictionPolicy):
    """Least recently used leaf first."""

    name = "lru"

    def priority(self, node: CachedRun) -> Any:
        return node.last_access
