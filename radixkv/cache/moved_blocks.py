"""Moved: blocks that leave the tree while leases hold them."""

from __future__ import annotations

from radixkv.cache.retention.quota import QuotaGroup


class Moved:
    """Blocks that leave the tree without being freed: how many leases hold each, and whose they count as."""

    __slots__ = ("holders", "owners")

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.owners: dict[int, QuotaGroup] = {}

    def add(self, block: int, group: QuotaGroup) -> None:
        """One more lease holds a block. O(1)."""
        self.holders[block] = self.holders.get(block, 0) + 1
        self.owners.setdefault(block, group)
