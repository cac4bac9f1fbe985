"""CacheState: the parts of one cache, in one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixkv.cache.insight.advisor import Advisor
from radixkv.cache.insight.explain import Explainer
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.insight.removals import Removals
from radixkv.cache.leases import Leases
from radixkv.cache.lookup import Lookup
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retention.capacity import Capacity
from radixkv.cache.retention.pins import PinBoard
from radixkv.cache.room import Room


@dataclass(frozen=True, slots=True)
class CacheState:
    """Each part owns its state; this only says which ones belong together.

    Attributes:
        clock: seconds.
        enabled: False: nothing is matched or kept.
        partial_reuse: whether parts of blocks are shared.
        explains: whether leases carry reports.
    """

    tree: RadixTree
    namespaces: Namespaces
    lookup: Lookup
    capacity: Capacity
    pins: PinBoard
    leases: Leases
    room: Room
    ghosts: GhostIndex
    removals: Removals
    advisor: Advisor
    explainer: Explainer
    clock: Callable[[], float]
    enabled: bool
    partial_reuse: bool
    explains: bool
