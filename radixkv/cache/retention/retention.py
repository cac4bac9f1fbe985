"""Retention: quotas per namespace, and pins with a time to live.

A quota has a floor (blocks that other namespaces can't push it under) and a ceiling (blocks it may occupy,
cached and held together). Namespaces with a quota are counted and indexed apart; all others form one group.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from radixkv.cache.eviction.policies import EvictionIndex, EvictionPolicy
from radixkv.cache.keys import Namespace, NamespaceKey, frame_namespace
from radixkv.cache.node import Node
from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on the blocks of one namespace, cached and held together.

    Attributes:
        floor: blocks under which requests of other namespaces can't push it.
        ceiling: blocks it can't exceed; None: the pool.
    """

    floor: int = 0
    ceiling: int | None = None

    def __post_init__(self) -> None:
        if self.floor < 0 or (self.ceiling is not None and self.ceiling < max(1, self.floor)):
            raise ConfigError(
                f"a quota needs 0 <= floor <= ceiling and a ceiling of at least 1, not {self!r}"
            )


class QuotaGroup:
    """The namespaces that share one quota, and the count of their blocks.

    Attributes:
        used: blocks in the tree and private to leases.
        blocks: blocks in the tree.
        protected: blocks in the tree that leases, pins or pending copies protect.
        index: the leaves that may be evicted.
    """

    __slots__ = ("blocks", "ceiling", "floor", "index", "protected", "used")

    def __init__(self, policy: EvictionPolicy, floor: int = 0, ceiling: int | None = None) -> None:
        self.floor = floor
        self.ceiling = ceiling
        self.used = 0
        self.blocks = 0
        self.protected = 0
        self.index = EvictionIndex(policy)

    @property
    def evictable(self) -> int:
        """Blocks that could be evicted, quotas aside."""
        return self.blocks - self.protected

    def yields(self) -> int:
        """Blocks that other namespaces may take from it."""
        evictable = self.blocks - self.protected
        return min(evictable, max(0, self.used - self.floor)) if self.floor else evictable


def quota_groups(
    quotas: Mapping[Namespace, Quota | tuple[int, int | None]] | None,
    num_blocks: int,
    policy: EvictionPolicy,
) -> dict[NamespaceKey, QuotaGroup]:
    """One group per namespace with a quota.

    Raises:
        ConfigError: the floors together exceed the pool, or one quota is malformed.
    """
    groups = {}
    for namespace, quota in (quotas or {}).items():
        bounds = quota if isinstance(quota, Quota) else Quota(*quota)
        groups[frame_namespace(namespace)] = QuotaGroup(policy, bounds.floor, bounds.ceiling)
    floors = sum(group.floor for group in groups.values())
    if floors > num_blocks:
        raise ConfigError(f"the quotas' floors sum up to {floors} blocks; the pool has {num_blocks}")
    return groups


class Pin:
    """A prefix kept in the cache until `expires` (clock seconds; infinity: until unpinned)."""

    __slots__ = ("expires", "key", "namespace", "node", "num_tokens", "ttl")

    def __init__(
        self, key: bytes, namespace: NamespaceKey, node: Node, num_tokens: int, ttl: float, expires: float
    ) -> None:
        self.key = key
        self.namespace = namespace
        self.node = node
        self.num_tokens = num_tokens
        self.ttl = ttl
        self.expires = expires

    def __repr__(self) -> str:
        return f"Pin({self.num_tokens} tokens of {self.namespace!r}, expires at {self.expires:g})"


class Pins:
    """The pins by prefix, by node and by expiry. A refreshed pin moves in the heap only when it comes up."""

    __slots__ = ("_heap", "_serial", "by_key", "by_node")

    def __init__(self) -> None:
        self.by_key: dict[tuple[NamespaceKey, bytes], Pin] = {}
        self.by_node: dict[Node, list[Pin]] = {}
        self._heap: list[tuple[float, int, Pin]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, pin: Pin) -> None:
        """Register a pin. O(log pins)."""
        self.by_key[pin.namespace, pin.key] = pin
        self.by_node.setdefault(pin.node, []).append(pin)
        self._serial += 1
        heapq.heappush(self._heap, (pin.expires, self._serial, pin))

    def remove(self, pin: Pin) -> None:
        """Forget a pin; its heap entry lapses by itself. O(pins of its node)."""
        del self.by_key[pin.namespace, pin.key]
        here = self.by_node[pin.node]
        here.remove(pin)
        if not here:
            del self.by_node[pin.node]

    def pop_expired(self, now: float) -> Pin | None:
        """The next pin whose time has run out, or None. Amortised O(log pins)."""
        while self._heap and self._heap[0][0] <= now:
            _, _, pin = heapq.heappop(self._heap)
            if self.by_key.get((pin.namespace, pin.key)) is not pin:
                continue
            if pin.expires > now:
                self._serial += 1
                heapq.heappush(self._heap, (pin.expires, self._serial, pin))
                continue
            return pin
        return None

    def soonest(self) -> Pin | None:
        """The pin that expires first, or None. O(pins)."""
        return min(self.by_key.values(), key=lambda pin: pin.expires, default=None)
