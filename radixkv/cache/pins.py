# SPDX-License-Identifier: Apache-2.0
"""Pins: prefixes that eviction spares, within a budget and for a time.

A pin is a reference like a lease's, without a block table. What several pins have in common counts once.
Expired pins are taken off when the cache is next used: `expire` costs one comparison while none is due.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from math import isinf

from radixkv.cache.accounts import BlockAccount
from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, decode_tokens
from radixkv.cache.node import Namespace, Node
from radixkv.cache.radix_tree import RadixTree, Walk

PinKey = tuple[NamespaceKey, str]  # namespace, id
_Longer = tuple[bytes, int]
_ID_DIGITS = 24
_NOTHING = hash(b"")
_MAX_LONGER = 64  # remembered of a pin, the latest ones
_SPARE_ENTRIES = 64  # of dropped pins that the heap may keep


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin as its users see it."""

    id: str  # names it within its namespace: the identity of the tokens it was set with
    namespace: NamespaceKey
    num_tokens: int  # what is pinned: as many leading tokens as were cached and fitted into the budget
    token_key: bytes  # these, or as many leading ones as were asked for: four bytes each
    expires_in_s: float | None  # seconds until it ends, if no hit renews it; None: it stays until `unpin`
    node: int = -1  # the first block of the node that it ends at, which names that node in a `TreeWalk`

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The pinned tokens, or the first of them. O(tokens)."""
        return tuple(decode_tokens(self.token_key))

    @property
    def tenant(self) -> str:
        """The first part of its namespace."""
        return self.namespace[0]

    @property
    def salt(self) -> str:
        """The second part of its namespace; empty where that has one part."""
        return self.namespace[1] if len(self.namespace) > 1 else ""


@dataclass(eq=False, slots=True, repr=False)
class Pin:
    """A prefix kept in the cache for `ttl` seconds (or for ever) from when it was set or last renewed."""

    key: PinKey  # its namespace, and its id there
    # Python's hash of its tokens that were not cached or did not fit into the budget: they are not
    # kept.
    beyond: int
    # Identity, and the same hash, of other prefixes set `at_least` with just this pinned part.
    longer: dict[_Longer, None]
    owner: Namespace  # kept in use as long as the pin is there: its blocks may all be public ones
    node: Node
    num_tokens: int
    ttl: float
    set_at: float
    names: tuple[bytes, ...]  # all identities by which it is found

    @property
    def expires(self) -> float:
        """Clock seconds; infinity: only `unpin` ends it."""
        return max(self.set_at, self.node.renewed_at) + self.ttl


class Pins:
    """The pins of one cache.

    Attributes:
        budget_blocks: most blocks that pins may protect together.
        pinned_blocks: blocks that pins protect now.
        by_key: the pins, oldest first.
        any_lapsed: whether some node may carry the mark of an expired pin.
        given_way: pins that were ended early, for a request that could never run beside them.
    """

    def __init__(self, tree: RadixTree, budget_blocks: int, clock: Callable[[], float]) -> None:
        self.budget_blocks = budget_blocks
        self.pinned_blocks = self.given_way = 0
        self.by_key: dict[PinKey, Pin] = {}
        self.any_lapsed = False
        self._by_name: dict[tuple[NamespaceKey, bytes], list[Pin]] = {}
        self._heap: list[tuple[float, int, Pin]] = []  # with an expiry that may be later by now
        self._serial = 0
        self._tree = tree
        self._clock = clock  # seconds

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self.by_key.values())

    def show(self, pin: Pin, max_tokens: int | None = None) -> PinInfo:
        """Return a pin for others, with at most `max_tokens` leading tokens (None: all). O(tokens)."""
        shown = pin.num_tokens if max_tokens is None else min(max_tokens, pin.num_tokens)
        expires_in_s = None if isinf(pin.expires) else pin.expires - self._clock()
        tokens, first_block = self._tokens_of(pin, shown), pin.node.blocks[0]
        return PinInfo(pin.key[1], pin.key[0], pin.num_tokens, tokens, expires_in_s, first_block)

    def _tokens_of(self, pin: Pin, count: int) -> bytes:
        """Return the leading tokens of the pinned prefix, four bytes each. O(tokens)."""
        left = count * TOKEN_BYTES
        parts = []
        for node in self._tree.path(pin.node):
            parts.append(bytes(node.key[:left]))
            left -= len(parts[-1])
            if not left:
                break
        return b"".join(parts)

    # ------------------------------------------------------------------ finding

    def set_with(self, data: bytes, owner: Namespace, walk: Walk | None) -> Pin | None:
        """Return the pin set with these tokens, whose lookup found `walk`; or None. O(tokens)."""
        for pin in self._named(self._identity(data, owner, walk), owner):
            if pin.beyond == self._beyond(pin, data):
                return pin
        return None

    def find(self, data: bytes, owner: Namespace, walk: Walk | None) -> Pin | None:
        """Return the pin set with these tokens, or of just these, or set `at_least` with them. O(tokens)."""
        pin = self.set_with(data, owner, walk)
        if pin is not None:
            return pin
        identity = self._identity(data, owner, walk)
        for pin in self._named(identity, owner):
            beyond = self._beyond(pin, data)
            if beyond == _NOTHING or (identity, beyond) in pin.longer:
                return pin
        return None

    def _beyond(self, pin: Pin, data: bytes) -> int | None:
        """Return the hash of `data` after the pinned tokens; None: it begins with others. O(tokens)."""
        if not data.startswith(self._tokens_of(pin, pin.num_tokens)):  # tokens decide
            return None
        return hash(data[pin.num_tokens * TOKEN_BYTES :])

    def _named(self, identity: bytes, owner: Namespace) -> list[Pin]:
        return self._by_name.get((owner.key, identity), [])

    def _identity(self, data: bytes, owner: Namespace, walk: Walk | None) -> bytes:
        """Return the identity of tokens in a namespace, public and cached or not. O(tokens not found)."""
        tree, before, start = self._tree, owner.seed, 0
        if walk is not None and not owner.declared.length_in(data):
            node = walk.node
            depth = min(walk.depth, len(data) // tree.block_bytes * tree.block_size)
            while node.parent is not None and node.start >= depth:
                node = node.parent
            before, start = node.identity((depth - node.start) // tree.block_size), depth * TOKEN_BYTES
        return tree.identities.of_tokens(before, data[start:])

    # ------------------------------------------------------------------ setting and ending

    def add(self, data: bytes, owner: Namespace, walk: Walk, ttl: float | None, at_least: bool) -> Pin | None:
        """Pin the result of a lookup, as far as the budget goes; None: nothing is left. O(path).

        `at_least`: as one pin of the pinned part, which takes the place of a shorter one.
        """
        node, num_tokens = self._target(walk)
        if node is None:
            return None
        life = float("inf") if ttl is None else float(ttl)
        longer: dict[_Longer, None] = {}
        pinned = data[: num_tokens * TOKEN_BYTES]
        beyond = hash(data[len(pinned) :])
        if at_least and beyond != _NOTHING:
            longer[self._identity(data, owner, walk), beyond] = None
            data, beyond = pinned, _NOTHING
        old = self.set_with(data, owner, walk)
        if old is not None:
            life = max(life, old.ttl) if at_least else life
            longer = dict.fromkeys([*old.longer, *longer][-_MAX_LONGER:])
            self.drop(old)
        self.pinned_blocks += self._tree.pin(node)
        if node.pins_here == 1:
            node.renewed_at = float("-inf")
        identity = self._identity(data, owner, walk)
        names = dict.fromkeys([identity, self._identity(pinned, owner, walk), *(name for name, _ in longer)])
        pin_id = identity.hex()[:_ID_DIGITS]
        if (owner.key, pin_id) in self.by_key:  # other tokens have the same identity
            pin_id += f"-{self._serial}"
        pin = Pin(
            (owner.key, pin_id),
            beyond,
            longer,
            owner,
            node,
            num_tokens,
            life,
            self._clock(),
            tuple(names),
        )
        self._register(pin)
        return pin

    def _register(self, pin: Pin) -> None:
        self.by_key[pin.key] = pin
        for name in pin.names:
            self._by_name.setdefault((pin.key[0], name), []).append(pin)
        self._serial += 1
        heapq.heappush(self._heap, (pin.expires, self._serial, pin))

    def _target(self, walk: Walk) -> tuple[Node | None, int]:
        """Return the node that ends with the match, or where the budget ends; split as needed."""
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
        """End a pin; `lapsed`: its blocks are marked, so that their eviction is explained as an expiry."""
        del self.by_key[pin.key]
        for name in pin.names:
            same = self._by_name[pin.key[0], name]
            same.remove(pin)
            if not same:
                del self._by_name[pin.key[0], name]
        if len(self._heap) > 2 * len(self.by_key) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self.by_key.get(entry[2].key) is entry[2]]
            heapq.heapify(self._heap)
        self.pinned_blocks -= self._tree.unpin(pin.node)
        if lapsed:
            self._mark_lapsed(pin.node)

    def drop_in(self, nodes: Container[Node]) -> None:
        """End the pins that end at these nodes. O(pins)."""
        for pin in [pin for pin in self if pin.node in nodes]:
            self.drop(pin)

    def _mark_lapsed(self, node: Node | None) -> None:
        while node is not None and not node.pins:
            node.lapsed = self.any_lapsed = True
            node = node.parent

    def _soonest(self) -> Pin | None:
        """Return the pin that expires first, or None. Amortised O(log pins)."""
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

    def give_way(self, is_enough: Callable[[], bool], account: BlockAccount | None = None) -> bool:
        """End pins (of a quota's namespaces, or all) for a request that could never run beside them.

        One after the other, the soonest to expire first, until there is enough; where there never is, none
        has ended.
        """
        ended, before = [], list(self)
        for pin in sorted(before, key=lambda pin: pin.expires):
            if account is None or pin.owner.account is account:
                self.drop(pin)
                ended.append(pin)
                if is_enough():
                    self.given_way += len(ended)
                    for pin in ended:
                        self._mark_lapsed(pin.node)
                    return True
        for pin in ended:
            self.pinned_blocks += self._tree.pin(pin.node)
            self._register(pin)
        self.by_key.clear()
        self.by_key.update((pin.key, pin) for pin in before)  # in the old order
        return False

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
        """Renew the pins on the path to `node`, which a request hit. O(path)."""
        now = self._clock()
        current: Node | None = node
        while current is not None:
            current.lapsed = False
            if current.pins_here:
                current.renewed_at = now
            current = current.parent
