"""Least frequently used first."""

from __future__ import annotations

from typing import Any

from radixkv.cache.eviction.policy import CachedRun, EvictionPolicy


class LFU(EvictionPolicy):
    """Fewest hits while cached first; among equals the least recently used."""

    name = "lfu"
    tracks_path = True

    def priority(self, node: CachedRun) -> Any:
        return node.hits, node.last_access
