"""CacheParts: the parts of one cache, each of which owns its state, and what outlives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.keys import NamespaceKey
from radixkv.cache.leasing import Leasing
from radixkv.cache.lookup import Lookup
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retention.capacity import Capacity
from radixkv.cache.retention.pins import PinBoard
from radixkv.cache.retention.quota import Quota, QuotaGroups


class Declared(NamedTuple):
    """What users declared to a cache, which outlives what is cached."""

    quotas: dict[NamespaceKey, Quota]  # by framed namespace
    public_prefixes: tuple[tuple[NamespaceKey, bytes], ...]  # what computes them, and their encoded tokens


@dataclass(slots=True)
class CacheParts:
    """The parts that `PrefixCache` joins, for those who read them all."""

    clock: Callable[[], float]
    groups: QuotaGroups
    tree: RadixTree
    namespaces: Namespaces
    ghosts: GhostIndex
    pins: PinBoard
    capacity: Capacity
    lookup: Lookup
    leasing: Leasing
    num_resets: int = 0
