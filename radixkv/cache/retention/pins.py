"""Pinning: prefixes that eviction spares, within a budget and for a time.

A pin is a reference like a lease's, without a block table. What several pins have in common counts once.
Expired pins are taken off when the cache is next used: `expire` costs one comparison while none is due.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isinf

from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, decode_tokens
from radixkv.cache.node import Namespace, Node
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retention.quota import QuotaGroup
from radixkv.cache.tree_nodes import Walk

PinKey = tuple[NamespaceKey, str]  # namespace, id
_ID_DIGITS = 24
_SPARE_ENTRIES = 64  # of dropped pins that the heap may keep


class _PinnedNode:
    """The pins that end at one node, and when a request last renewed them."""

    __slots__ = ("pins", "renewed_at")

    def __init__(self) -> None:
        self.pins: dict[Pin, None] = {}
        self.renewed_at = float("-inf")


@dataclass(eq=False, slots=True, repr=False)
class Pin:
    """A prefix kept in the cache for `ttl` seconds (or for ever) from when it was set or last renewed.

    Attributes:
        key: its namespace, and its id there.
        identity: of the tokens it was set with, of which there are `length` bytes.
        space: whose it is, in use as long as the pin is there: its blocks may all be public ones.
    """

    key: PinKey
    identity: bytes
    length: int
    space: Namespace
    node: Node
    num_tokens: int
    ttl: float
    set_at: float
    place: _PinnedNode

    @property
    def expires(self) -> float:
        """Clock seconds; infinity: only `unpin` ends it."""
        return max(self.set_at, self.place.renewed_at) + self.ttl

    def __repr__(self) -> str:
        return f"Pin({self.num_tokens} tokens of {self.key[0]!r}, expires at {self.expires:g})"


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin as it can be seen.

    Attributes:
        token_ids: what is pinned: as many leading tokens as were cached and fitted into the budget.
        num_tokens: how many that are.
        expires_in_s: seconds until it ends, if no hit renews it; None: it stays until `unpin`.
        id: names it within its namespace: the identity of the tokens it was set with.
        node: the first block of the node that it ends at, which names that node in a `TreeWalk`.
    """

    namespace: NamespaceKey
    token_ids: tuple[int, ...]
    num_tokens: int
    expires_in_s: float | None
    id: str = ""
    node: int = -1

    @property
    def tenant(self) -> str:
        """The first part of its namespace."""
        return self.namespace[0]

    @property
    def salt(self) -> str:
        """The second part of its namespace; empty where that has one part."""
        return self.namespace[1] if len(self.namespace) > 1 else ""


class PinBoard:
    """The pins of one cache.

    Args:
        budget_blocks: most blocks that pins may protect together.
        clock: seconds.

    Attributes:
        pinned_blocks: blocks that pins protect now.
        given_way: pins that were ended early, for a request that could never run beside them.
        any_lapsed: whether some node may carry the mark of an expired pin.
        by_key: the pins.
    """

    def __init__(self, tree: RadixTree, budget_blocks: int, clock: Callable[[], float]) -> None:
        self.budget_blocks = budget_blocks
        self.pinned_blocks = 0
        self.any_lapsed = False
        self.given_way = 0
        self.by_key: dict[PinKey, Pin] = {}
        self._by_identity: dict[tuple[NamespaceKey, bytes], list[Pin]] = {}
        self._by_node: dict[Node, _PinnedNode] = {}
        self._heap: list[tuple[float, int, Pin]] = []  # with an expiry that may have been put off since
        self._serial = 0
        self._tree = tree
        self._clock = clock

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self.by_key.values())

    def listing(self, most_tokens: int | None = None) -> list[PinInfo]:
        """What is pinned, oldest first. O(pins and their tokens).

        Args:
            most_tokens: show only so many leading tokens of each.
        """
        self.expire()
        now = self._clock()
        return [
            PinInfo(
                pin.key[0],
                tuple(decode_tokens(self._tokens_of(pin, most_tokens))),
                pin.num_tokens,
                None if isinf(pin.expires) else pin.expires - now,
                pin.key[1],
                pin.node.blocks[0],
            )
            for pin in self
        ]

    def _tokens_of(self, pin: Pin, most: int | None) -> bytes:
        """The leading tokens of what is pinned, at most so many, four bytes each. O(those)."""
        left = (pin.num_tokens if most is None else min(most, pin.num_tokens)) * TOKEN_BYTES
        parts = []
        for node in self._tree.path(pin.node):
            parts.append(bytes(node.key[:left]))
            left -= len(parts[-1])
            if not left:
                break
        return b"".join(parts)

    def of_id(self, wanted: str, namespace: NamespaceKey) -> Pin | None:
        """The pin of that id in a namespace, or None. O(1)."""
        return self.by_key.get((namespace, wanted))

    def __repr__(self) -> str:
        return f"PinBoard({len(self)} pins, {self.pinned_blocks} of {self.budget_blocks} blocks)"

    def get(self, data: bytes, space: Namespace, walk: Walk | None) -> Pin | None:
        """The pin that was set with these tokens, of which a lookup found `walk`; or None. O(tokens)."""
        for pin in self._by_identity.get((space.key, self._identity(data, space, walk)), ()):
            if pin.length == len(data) and data.startswith(self._tokens_of(pin, None)):  # tokens decide
                return pin
        return None

    def _identity(self, data: bytes, space: Namespace, walk: Walk | None) -> bytes:
        """Of tokens in a namespace, whatever of them is public or cached. O(tokens that were not found)."""
        identities, before, start = self._tree.identities, space.seed, 0
        if walk is not None and not space.declared.length_in(data):
            node, depth = (
                walk.node,
                min(walk.depth, len(data) // self._tree.block_bytes * self._tree.block_size),
            )
            while node.parent is not None and node.start >= depth:
                node = node.parent
            before, start = node.identity((depth - node.start) // self._tree.block_size), depth * TOKEN_BYTES
        return identities.of_tokens(before, data[start:])

    def ending_with(self, walk: Walk, space: Namespace) -> Pin | None:
        """A namespace's oldest pin of exactly what a lookup found, or None. O(pins that end at that node)."""
        place = self._by_node.get(walk.node if walk.source is None else walk.source)
        pins = place.pins if place is not None else ()
        found = walk.depth + walk.partial
        return next((pin for pin in pins if pin.space is space and pin.num_tokens == found), None)

    def add(
        self, data: bytes, space: Namespace, walk: Walk, ttl: float | None, at_least: bool = False
    ) -> int:
        """Pin what a lookup found, as far as the budget goes; returns the tokens pinned. O(path).

        Args:
            at_least: as one pin of what is pinned, which takes the place of a shorter one.
        """
        node, num_tokens = self._target(walk)
        if node is None:
            return 0
        life = float("inf") if ttl is None else float(ttl)
        if at_least:
            data = data[: num_tokens * TOKEN_BYTES]
            old = self.get(data, space, walk)
            if old is not None:
                life = max(life, old.ttl)
                self.drop(old)
        self.pinned_blocks += self._tree.pin(node)
        place = self._by_node.setdefault(node, _PinnedNode())
        identity = self._identity(data, space, walk)
        pin_id = identity.hex()[:_ID_DIGITS]
        if (space.key, pin_id) in self.by_key:  # other tokens have the same identity
            pin_id += f"-{self._serial}"
        key, now = (space.key, pin_id), self._clock()
        pin = Pin(key, identity, len(data), space, node, num_tokens, life, now, place)
        self._register(pin)
        return num_tokens

    def _register(self, pin: Pin) -> None:
        self.by_key[pin.key] = pin
        self._by_identity.setdefault((pin.key[0], pin.identity), []).append(pin)
        pin.place.pins[pin] = None
        self._serial += 1
        heapq.heappush(self._heap, (pin.expires, self._serial, pin))

    def _target(self, walk: Walk) -> tuple[Node | None, int]:
        """The node that ends with the match, or earlier where the budget ends; splits as needed."""
        size = self._tree.block_size
        budget = self.budget_blocks - self.pinned_blocks
        last = walk.source if walk.source is not None else walk.node
        for node in self._tree.path(last):
            if node.pins:
                continue
            found = min(node.end, walk.depth + walk.partial)
            wanted = -(-(found - node.start) // size)
            count = min(wanted, budget)
            budget -= count
            if count < wanted:
                if not count:
                    return (node.parent, node.start) if node.start else (None, 0)
                upper = self._tree.split(node, count)
                return upper, upper.end
        if last.parent is None:
            return None, 0
        found = walk.depth + walk.partial
        count = -(-(found - last.start) // size)
        return (last if count == len(last.blocks) else self._tree.split(last, count)), found

    def drop(self, pin: Pin, lapsed: bool = False) -> None:
        """End a pin; `lapsed`: its blocks are marked, so that their eviction is explained as an expiry.

        O(path), amortised.
        """
        del self.by_key[pin.key]
        same = self._by_identity[pin.key[0], pin.identity]
        same.remove(pin)
        if not same:
            del self._by_identity[pin.key[0], pin.identity]
        place = self._by_node[pin.node]
        del place.pins[pin]
        if not place.pins:
            del self._by_node[pin.node]
        if len(self._heap) > 2 * len(self.by_key) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self.by_key.get(entry[2].key) is entry[2]]
            heapq.heapify(self._heap)
        self.pinned_blocks -= self._tree.unpin(pin.node)
        if lapsed:
            self._mark_lapsed(pin.node)

    def _mark_lapsed(self, node: Node | None) -> None:
        while node is not None and not node.pins:
            node.lapsed = self.any_lapsed = True
            node = node.parent

    def _soonest(self) -> Pin | None:
        """The pin that expires first, or None. Amortised O(log pins)."""
        heap = self._heap
        while heap:
            at, serial, pin = heap[0]
            if self.by_key.get(pin.key) is not pin:
                heapq.heappop(heap)
            elif pin.expires > at:
                heapq.heapreplace(heap, (pin.expires, serial, pin))
            else:
                return pin
        return None

    def give_way(self, is_enough: Callable[[], bool], group: QuotaGroup | None = None) -> bool:
        """End pins for a request that could never run beside them, those first that would expire first.

        One after the other until there is enough; where there never is, none has ended. O(pins log pins), and
        a call of `is_enough` for each.

        Args:
            group: end only those of this quota's namespaces; None: of all.
        """
        before, ended = self.by_key.copy(), []
        for pin in sorted(self, key=lambda pin: pin.expires):
            if group is None or pin.space.group is group:
                self.drop(pin)
                ended.append(pin)
                if is_enough():
                    self.given_way += len(ended)
                    for pin in ended:
                        self._mark_lapsed(pin.node)
                    return True
        for pin in ended:
            self._put_back(pin)
        for key in before:  # in the old order
            self.by_key[key] = self.by_key.pop(key)
        for place in {pin.place for pin in ended}:
            place.pins = {pin: None for pin in self if pin in place.pins}
        return False

    def _put_back(self, pin: Pin) -> None:
        """A pin that was dropped is there again."""
        self.pinned_blocks += self._tree.pin(pin.node)
        self._by_node[pin.node] = pin.place
        self._register(pin)

    def expire(self) -> None:
        """End the pins whose time has run out. O(1) when there are none."""
        if not self._heap:
            return
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            pin = self._soonest()
            if pin is not None and pin.expires <= now:
                self.drop(pin, lapsed=True)

    def refresh(self, node: Node) -> None:
        """A request hit the path to `node`: pins on it live on for their TTL. O(path)."""
        now = self._clock()
        current: Node | None = node
        while current is not None:
            current.lapsed = False
            if current.pins_here:
                self._by_node[current].renewed_at = now
            current = current.parent
