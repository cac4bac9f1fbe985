"""First in, first out."""

from __future__ import annotations

from typing import Any

from radixkv.cache.eviction.policy import CachedRun, EvictionPolicy


class FIFO(EvictionPolicy):
    """The leaf whose blocks were cached first, whatever was used since."""

    name = "fifo"

    def on_insert(self, node: CachedRun, num_blocks: int) -> None:
        if node.data is None:
            node.data = self.tick

    def priority(self, node: CachedRun) -> Any:
        return node.data
