"""PrefixCache: the one door to cached state. Match, acquire, evict, pin, reset, explain, check.

The life of a cached block:

1. `acquire` finds the longest cached prefix, protects it, and takes free blocks (evicting if need be) for the
   rest: they are private to the lease.
2. `commit` puts them into the tree: from then on others can match them.
3. `release` drops the protection: leaves become candidates for eviction.
4. Eviction trims candidates from their tail and gives the blocks back to the pool; the ghost index remembers
   that they were here.

The cache moves no memory: `lease.copies` says what the caller must copy. It is not thread-safe; one thread
(the engine's) owns it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from radixkv.cache.advisor import Advisor, BreakPoint
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.capacity import Capacity
from radixkv.cache.detach import detach
from radixkv.cache.events import EventStream, Listener
from radixkv.cache.eviction import EvictionPolicy, make_policy
from radixkv.cache.explain import CACHE_IS_OFF, Explainer, MissReport, continuation
from radixkv.cache.ghost import GhostIndex, GhostRecord, make_space, space_seed
from radixkv.cache.integrity import check_cache, show_tree
from radixkv.cache.keys import (
    TOKEN_BYTES,
    Namespace,
    NamespaceKey,
    TokenIds,
    encode_tokens,
    frame_namespace,
)
from radixkv.cache.lease import Lease
from radixkv.cache.node import HashFunction, Node, Space
from radixkv.cache.pinning import PinBoard
from radixkv.cache.radix_tree import RadixTree, Walk
from radixkv.cache.retention import Quota, QuotaGroup, quota_groups
from radixkv.errors import ConfigError, InvalidRequestError, OutOfBlocks

__all__ = ["CacheStats", "Lease", "Match", "MissReport", "PrefixCache", "Quota"]


class Match:
    """The longest cached prefix of some tokens, at the time of the lookup.

    Attributes:
        num_tokens: its length, token-granular; may be the whole prompt.
    """

    __slots__ = ("_data", "_key", "_source_version", "_space", "_version", "_walk", "num_tokens")

    def __init__(self, data: bytes, space: Space | None, walk: Walk | None) -> None:
        self._data = data
        self._key: NamespaceKey = () if space is None else space.key
        self._space = space
        self.num_tokens = 0 if walk is None else walk.depth + walk.partial
        self._walk: Walk | None = None
        self._version = self._source_version = 0
        self._ends_at(walk)

    def _ends_at(self, walk: Walk | None) -> None:
        self._walk = walk
        if walk is not None:
            self._version = walk.node.version
            self._source_version = 0 if walk.source is None else walk.source.version

    def _is_untouched(self) -> bool:
        """Whether the node the match ends at, and the one to copy its last tokens from, are unchanged."""
        walk = self._walk
        return (
            walk is not None
            and walk.node.version == self._version
            and (walk.source is None or walk.source.version == self._source_version)
        )

    def __repr__(self) -> str:
        return f"Match({self.num_tokens} of {len(self._data) // TOKEN_BYTES} tokens)"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of the cache's counters. Blocks: free + cached + held = total.

    Attributes:
        cached_blocks: in the tree and evictable.
        held_blocks: held by leases or pins.
        pinned_blocks: of the held ones, those that pins protect.
        queried_tokens: prompt tokens of all acquires.
        hit_tokens: those of them found cached.
        evicted_blocks: evicted since the start (not those discarded or reset).
        out_of_blocks: how often OutOfBlocks was raised.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    pinned_blocks: int
    num_nodes: int
    num_leases: int
    num_pins: int
    acquires: int
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    out_of_blocks: int
    resets: int
    pins_given_way: int
    ghost_blocks: int


def _nothing() -> int:
    return 0


class PrefixCache:
    """A radix tree over a pool of blocks, with leases, eviction, pins, quotas and explanations.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block, at least 1.
        policy: order of eviction: a name from `radixkv.cache.eviction.POLICIES`, or a policy object.
        enabled: False: nothing is ever matched or kept.
        clock: seconds, for TTLs and ages.
        ghost_blocks: evicted blocks to remember (hashes only); None: 4 * num_blocks; 0: none.
        hash_function: bytes -> int for the lookup of children; every hit is confirmed by its tokens, so any
            function is right. None: xxh3_64.
        pin_budget: share of the pool that pins may protect.
        quotas: namespace -> Quota, or (floor, ceiling) in blocks.
        partial_reuse: share parts of blocks by copying; False: whole blocks only.
        explain: False: leases carry no report (`skipped`), for measuring what reports cost.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: str | EvictionPolicy = "lru",
        *,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
        ghost_blocks: int | None = None,
        hash_function: HashFunction | None = None,
        pin_budget: float = 0.5,
        quotas: Mapping[Namespace, Quota | tuple[int, int | None]] | None = None,
        partial_reuse: bool = True,
        explain: bool = True,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")
        if num_blocks >= 2**31:
            raise ConfigError(f"num_blocks must be below 2**31, not {num_blocks}")
        if ghost_blocks is not None and (type(ghost_blocks) is not int or ghost_blocks < 0):
            raise ConfigError(f"ghost_blocks must be an integer of at least 0, not {ghost_blocks!r}")
        if not 0.0 <= pin_budget <= 1.0:
            raise ConfigError(f"pin_budget must be a share of the pool in [0, 1], not {pin_budget!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enabled = enabled
        self.partial_reuse = partial_reuse
        self.explains = explain
        self.policy = make_policy(policy)
        self._clock = clock
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(block_size, hash_function or xxhash.xxh3_64_intdigest, self.policy)
        self._spaces: dict[NamespaceKey, Space] = {}
        self._published: list[bytes] = []  # public prefixes, longest first
        self._groups_by_key = quota_groups(quotas, num_blocks, self.policy)
        self._common = QuotaGroup(self.policy)
        self._public = Space((), self._common, space_seed(()), is_public=True)
        self._groups = [self._common, *self._groups_by_key.values()]
        self._capacity = Capacity(self._pool, self._tree, self._groups, self._on_evict)
        self._explainer = Explainer(self)
        self._advisor = Advisor(self._tree)
        self._ghosts = GhostIndex(self._tree, 4 * num_blocks if ghost_blocks is None else ghost_blocks)
        self.policy.attach(num_blocks, block_size, self._ghosts)
        self._pins = PinBoard(self._tree, int(num_blocks * pin_budget), clock)
        self._leases: dict[int, Lease] = {}
        self._lagging: dict[Lease, None] = {}
        self._events = EventStream(self._ghosts.hasher, self._tree.block_bytes)
        self._lease_ids = 0
        self._tick = 0
        self._acquires = self._queried_tokens = self._hit_tokens = 0
        self._out_of_blocks = self._resets = self._pins_given_way = 0

    def __repr__(self) -> str:
        s = self.stats
        return (
            f"PrefixCache({s.total_blocks} blocks of {self.block_size} tokens: {s.free_blocks} free, "
            f"{s.cached_blocks} cached, {s.held_blocks} held; {s.num_leases} leases, {s.num_nodes} nodes, "
            f"{self.policy.name})"
        )

    # ------------------------------------------------------------------ public prefixes

    def publish(self, token_ids: TokenIds) -> int:
        """Declare a prefix public: its whole blocks are shared by all namespaces from now on.

        What namespaces cached of it before stays theirs alone. O(tokens).

        Returns:
            Tokens of the prefix that are shared: its whole blocks.
        """
        data = encode_tokens(token_ids)
        data = data[: len(data) - len(data) % self._tree.block_bytes]
        if data and data not in self._published:
            self._published.append(data)
            self._published.sort(key=len, reverse=True)
            self._ghosts.hasher.has_public = True
        return len(data) // TOKEN_BYTES

    def unpublish(self, token_ids: TokenIds) -> bool:
        """Take a declaration back: the prefix is no longer shared by new requests. False: there was none."""
        data = encode_tokens(token_ids)
        data = data[: len(data) - len(data) % self._tree.block_bytes]
        if data not in self._published:
            return False
        self._published.remove(data)
        return True

    def _public_bytes(self, data: bytes) -> int:
        """Length in bytes of the longest public prefix of `data`. O(public prefixes)."""
        for prefix in self._published:
            if data.startswith(prefix):
                return len(prefix)
        return 0

    def _seed_and_mark(self, data: bytes, space: Space, depth: int) -> tuple[int, int]:
        """What the prefix hash of the block behind the first `depth` tokens of a prompt starts from."""
        public = self._public_bytes(data) if self._published else 0
        if not public:
            return space.seed, 0
        return self._public.seed, self._public.seed ^ space.seed if depth * TOKEN_BYTES >= public else 0

    # ------------------------------------------------------------------ lookup

    def _space(self, namespace: Namespace) -> Space:
        key = frame_namespace(namespace)
        space = self._spaces.get(key)
        if space is None:
            group = self._groups_by_key.get(key, self._common)
            space = self._spaces[key] = make_space(self._tree, key, group)
        return space

    def match(self, token_ids: TokenIds, namespace: Namespace = "") -> Match:
        """The longest cached prefix. Read-only: changes neither order nor structure. O(tokens + path).

        Raises:
            InvalidRequestError: token ids or namespace are malformed.
        """
        if self._pins.pins.by_key:
            self._pins.expire()
        key = frame_namespace(namespace)
        match = self._match(encode_tokens(token_ids), self._spaces.get(key))
        match._key = key
        return match

    def _match(self, data: bytes, space: Space | None) -> Match:
        if not self.enabled:
            return Match(data, space, None)
        tree = self._tree
        if self._published:
            public = self._public_bytes(data)
            if public:
                return Match(data, space, self._walk_public(data, space, public))
        root = tree.roots.get(space) if space is not None else None
        if root is None:
            return Match(data, space, None)
        assert space is not None
        return Match(data, space, tree.walk(root, space, data, 0, len(data)))

    def _walk_public(self, data: bytes, space: Space | None, public: int) -> Walk | None:
        """Follow the public part of a prompt in the shared tree, the rest in the namespace's own."""
        tree = self._tree
        root = tree.roots.get(self._public)
        if root is None:
            return None
        walk = tree.walk(root, self._public, data, 0, public)
        node = walk.node
        if walk.depth * TOKEN_BYTES < public or node.end > walk.depth or space is None:
            return walk
        return tree.walk(node, space, data, public, len(data)) if public < len(data) else walk

    def is_current(self, match: Match) -> bool:
        """Whether a new lookup would give the same length. O(1); O(log siblings) after a change there."""
        if self._pins.pins.by_key:
            self._pins.expire()
        if not self.enabled:
            return True
        walk = match._walk
        if walk is None:
            if not self._published and match._space is not None and match._space not in self._tree.roots:
                return True
            return self._match(match._data, self._spaces.get(match._key)).num_tokens == 0
        if match._is_untouched():
            return True
        return self._renew(match)

    def _renew(self, match: Match) -> bool:
        """Look again from where the match ended; True (and the match refreshed) if its length is the same."""
        walk = match._walk
        data = match._data
        if self._published:
            new_match = self._match(data, match._space)
            if new_match.num_tokens != match.num_tokens:
                return False
            match._ends_at(new_match._walk)
            return True
        if walk is None or walk.node.version < 0:
            return False
        node: Node | None = walk.node
        depth = walk.depth
        while node is not None and node.start >= depth and node.parent is not None:
            node = node.parent
        if node is None or node.end < depth:
            return False
        if node.end > depth:  # the match ends inside the run: start again from the node above
            parent = node.parent
            assert parent is not None
            pos = node.start
            node = parent
        else:
            pos = depth
        assert match._space is not None
        new = self._tree.walk(node, match._space, data, pos * TOKEN_BYTES, len(data))
        if new.depth + new.partial != match.num_tokens:
            return False
        match._ends_at(new)
        return True

    # ------------------------------------------------------------------ acquire

    def acquire(
        self,
        token_ids: TokenIds,
        namespace: Namespace = "",
        *,
        match: Match | None = None,
        skip: str | None = None,
    ) -> Lease:
        """Protect the longest cached prefix and take blocks for the rest. O(tokens + path).

        Args:
            token_ids: the prompt, at least one token.
            namespace: whose cache to look in.
            match: an earlier `match` of the same tokens, used if it is still current.
            skip: a reason not to look anything up (all tokens will be computed).

        Raises:
            OutOfBlocks: too few blocks are free or evictable; nothing was changed.
            InvalidRequestError: token ids or namespace are malformed, or there are none.
        """
        if self._pins.pins.by_key:
            self._pins.expire()
        data = encode_tokens(token_ids)
        if not data:
            raise InvalidRequestError("a prompt needs at least one token", param="token_ids")
        space = self._space(namespace)
        tree = self._tree
        if skip is None and self.enabled:
            if match is None or match._space is not space or match._data != data or not match._is_untouched():
                match = self._match(data, space)
            walk = match._walk or Walk(self._root_for(data, space), 0, 0, None, None)
        else:
            walk = Walk(tree.root(space), 0, 0, None, None)
            if skip is None:
                skip = CACHE_IS_OFF
        return self._lease(data, namespace, space, walk, skip)

    def _root_for(self, data: bytes, space: Space) -> Node:
        return self._tree.root(self._public if self._published and self._public_bytes(data) else space)

    def _lease(self, data: bytes, namespace: Namespace, space: Space, walk: Walk, skip: str | None) -> Lease:
        """Plan what to hold, copy and allocate; make sure that there is room; only then change anything."""
        size = self.block_size
        num_tokens = len(data) // TOKEN_BYTES
        found = walk.depth + walk.partial
        cached = min(found, num_tokens - 1)
        source = walk.source
        takes_over = False  # the partial block itself is extended: nobody else holds it
        slots = 0  # tokens of the partial block to copy
        if source is not None:
            if not self.partial_reuse:
                source, cached = None, min(walk.depth, num_tokens - 1)
            elif not source.holders and source.end == found:
                takes_over = True
            else:
                slots = cached - walk.depth
                if slots <= 0:
                    source = None
        after = continuation(walk, found) if self.explains else b""
        total = -(-num_tokens // size)
        held_tokens = found if takes_over else walk.depth
        needed = total - -(-held_tokens // size)
        if needed > self._pool.num_free or space.group.ceiling is not None:
            if slots and not self._fits(needed, space, self._locked_by(walk, source)):
                source, slots, cached = None, 0, walk.depth
            whole = source  # held to its end, because it is copied from or taken over
            self._check_room(needed, space, total, lambda: self._locked_by(walk, whole))
        node = source if takes_over else self._cut(walk)
        assert node is not None
        lease = Lease(
            self,
            self._next_lease_id(),
            namespace,
            space,
            bytearray(data),
            node,
            np.empty(total + 4, np.int32),
            total,
            held_tokens,
            cached,
        )
        if self._published:
            lease._public_tokens = self._public_bytes(data) // TOKEN_BYTES
        self._grant(lease, total - needed, source if slots else None, slots)
        if self.explains:
            now = self._clock() if len(self._ghosts) else 0.0
            seed, mark = self._seed_and_mark(data, space, walk.depth) if self._published else (space.seed, 0)
            lease._report = (data, seed, walk.depth, found, cached, after, skip, now, mark)
            if after and cached < num_tokens - 1:
                self._advisor.observe(data, walk, found)
        self._count(data, space, walk, cached)
        return lease

    def _grant(self, lease: Lease, held: int, source: Node | None, slots: int) -> None:
        """Protect the prefix and the source of a copy, fill the block table: `held` blocks, then new ones."""
        node = lease._node
        total = lease._num_blocks
        table = lease._table
        self._hold(node)
        if source is not None:
            self._tree.protect(source)
        self._touch(node)
        if held:
            blocks = b"".join([n.blocks for n in self._tree.path(node)]) if node.start else node.blocks
            table[:held] = np.frombuffer(blocks, np.int32)
        if total > held:
            table[held:total] = self._capacity.allocate(total - held, lease._space.group)
        if source is not None:
            block = source.blocks[0]  # the prefix was cut just before it
            lease._sources.append((source, block))
            lease.copies.append((block, int(table[held]), slots))
        self._leases[lease.id] = lease

    def _count(self, data: bytes, space: Space, walk: Walk, cached: int) -> None:
        """Account for a lease just granted, and tell the policy."""
        num_tokens = len(data) // TOKEN_BYTES
        self._acquires += 1
        self._queried_tokens += num_tokens
        self._hit_tokens += cached
        policy = self.policy
        policy.on_acquire(num_tokens, cached)
        found = walk.depth + walk.partial
        if policy.uses_ghosts and found < num_tokens:
            seed, mark = self._seed_and_mark(data, space, walk.depth)
            record = self._ghosts.find(data, seed, walk.depth, found, mark)
            if record is not None:
                policy.on_ghost_hit(walk.depth, record)
        if self._lagging:
            self._resync()

    def _cut(self, walk: Walk) -> Node:
        """The node that ends exactly where the whole blocks of a match end; splits if there is none."""
        node = walk.node
        if walk.depth == node.start + len(node.blocks) * self.block_size:
            return node
        return self._tree.split(node, (walk.depth - node.start) // self.block_size)

    def _locked_by(self, walk: Walk, source: Node | None) -> int:
        """Evictable blocks that would be protected by holding the match, and all of `source` if given."""
        locked = 0
        node = walk.node
        if source is not None and not source.refs:
            locked = len(source.blocks)
        if node is not source and not node.refs:
            locked += (walk.depth - node.start) // self.block_size
        current = node.parent
        while current is not None and not current.refs:
            locked += len(current.blocks)
            current = current.parent
        return locked

    def _fits(self, needed: int, space: Space, locked: int) -> bool:
        return needed <= self._capacity.available(space.group, locked)

    def _check_room(
        self,
        needed: int,
        space: Space,
        total: int,
        locked: Callable[[], int],
        lease: Lease | None = None,
    ) -> None:
        """Raise OutOfBlocks unless `needed` blocks can be had; pins give way to what could never fit."""
        if self._fits(needed, space, locked()):
            return
        while self._pins_must_yield(space, total, lease):
            pin = self._pins.pins.soonest()
            assert pin is not None
            self._pins.drop(pin, lapsed=True)
            self._pins_given_way += 1
            if self._fits(needed, space, locked()):
                return
        available = self._capacity.available(space.group, locked())
        self._out_of_blocks += 1
        self._tree.drop_empty_root(space)
        self._tree.drop_empty_root(self._public)
        quota = "" if space.group.ceiling is None else f" within the quota of {space.group.ceiling}"
        raise OutOfBlocks(
            f"{needed} blocks are needed, {available} of {self.num_blocks} are free or evictable{quota}",
            needed=needed,
            available=available,
        )

    def _pins_must_yield(self, space: Space, total: int, lease: Lease | None) -> bool:
        """Whether waiting can't help a request of `total` blocks: it is alone, and fits but for the pins."""
        if not len(self._pins) or len(self._leases) > (lease is not None):
            return False
        if lease is not None and (lease._sources or lease._source_blocks):
            return False
        group = space.group
        floors = sum(min(g.floor, g.used) for g in self._groups if g is not group)
        return total <= min(self.num_blocks - floors, group.ceiling or self.num_blocks)

    def _touch(self, node: Node) -> None:
        """The path to `node` is used now."""
        self._tick += 1
        self.policy.tick = node.last_access = self._tick
        if self.policy.tracks_path:
            current = node
            while current.parent is not None:
                current.hits += 1
                self.policy.on_hit(current)
                current = current.parent
        if self._pins.pins.by_node or self._pins.any_lapsed:
            self._pins.refresh(node)

    def _on_evict(self, node: Node, num_blocks: int, by: str) -> None:
        policy = self.policy
        policy.on_evict(node, num_blocks)
        if self._ghosts.capacity:
            reason = "expired" if node.lapsed else "evicted"
            record = GhostRecord(reason, self._clock(), by, policy.ghost_data(node))
            self._ghosts.remember(node, num_blocks, record)

    # ------------------------------------------------------------------ used by leases

    def _next_lease_id(self) -> int:
        self._lease_ids += 1
        return self._lease_ids

    def _allocate(self, count: int, group: QuotaGroup, lease: Lease) -> npt.NDArray[np.int32]:
        if count > self._pool.num_free or group.ceiling is not None:
            self._check_room(count, lease._space, lease._num_blocks + count, _nothing, lease)
        return self._capacity.allocate(count, group)

    def _free_private(self, blocks: npt.NDArray[np.int32], group: QuotaGroup) -> None:
        self._capacity.free_private(blocks, group)

    def _hold(self, node: Node) -> None:
        node.holders += 1
        self._tree.protect(node)

    def _release_hold(self, node: Node) -> None:
        node.holders -= 1
        self._unprotect(node)

    def _unprotect(self, node: Node) -> None:
        self._tree.unprotect(node)
        if not node.refs and len(node.key) < self._tree.block_bytes and node.parent is not None:
            siblings = self._tree.children_of(node.parent, node.space)
            if siblings is not None and siblings.covers_more(bytes(node.key)) is not None:
                self._forget(node, 1)

    def _drop_covered(self, node: Node) -> None:
        """Free unheld partial blocks whose tokens `node` begins with, now that it holds them, too."""
        parent = node.parent
        assert parent is not None
        siblings = self._tree.children_of(parent, node.space)
        if siblings is None or len(siblings) == 1:
            return
        first = bytes(node.key[: self._tree.block_bytes])
        while (stub := siblings.covered_by(first)) is not None and not stub.refs:
            self._forget(stub, 1)

    def _forget(self, leaf: Node, num_blocks: int) -> None:
        """Trim blocks that are not worth a ghost: duplicates, and what was asked to be forgotten."""
        group = leaf.space.group
        self._capacity.free_tree_blocks(self._tree.trim(leaf, num_blocks), group)

    def _end(self, lease: Lease, keep: int | None) -> None:
        """Release a lease; tokens beyond `keep` that it contributed are forgotten."""
        del self._leases[lease.id]
        self._lagging.pop(lease, None)
        if lease._family is not None:
            lease._family.remove(lease)
        private = lease._private_blocks()
        if len(private):
            self._free_private(private, lease._space.group)
        node = lease._node
        self._tick += 1
        self.policy.tick = node.last_access = self._tick
        if keep is None:
            self._release_hold(node)
        else:
            node.holders -= 1
            self._tree.unprotect(node)
            self._discard(node, max(keep, lease._own_from))
        if self._lagging:
            self._resync()

    def _discard(self, node: Node, cut: int) -> None:
        """Forget the tokens from `cut` on along the path that ends at `node`, unless something needs them."""
        size = self.block_size
        while node.parent is not None and not node.refs and node.is_leaf and node.end > cut:
            parent = node.parent
            keep = max(0, -(-(cut - node.start) // size))
            if keep < len(node.blocks):
                self._forget(node, len(node.blocks) - keep)
            if keep:
                if node.end > cut and not self._tree.truncate_tail(node, cut):
                    self._forget(node, 1)
                return
            node = parent

    def _resync(self) -> None:
        """Blocks have gone: partial blocks that waited behind them may enter the tree now."""
        for lease in list(self._lagging):
            if not lease._sources and not lease._source_blocks:  # else its copies have not run yet
                lease._sync()

    def _detach_from(self, lease: Lease, cut: int) -> None:
        cut -= cut % self.block_size
        node = lease._node
        while node.start > cut:
            assert node.parent is not None
            node = node.parent
        if node.start < cut:
            self._tree.split(node, (cut - node.start) // self.block_size)
        detach(self, [node], lease)

    # ------------------------------------------------------------------ room

    def available_blocks(self, namespace: Namespace = "") -> int:
        """Blocks that a request of this namespace could get now: free and evictable. O(quota groups)."""
        if self._pins.pins.by_key:
            self._pins.expire()
        group = self._groups_by_key.get(frame_namespace(namespace), self._common)
        return self._capacity.available(group)

    def evict(self, num_blocks: int) -> int:
        """Evict exactly min(num_blocks, evictable) blocks; returns how many. O(log leaves) per leaf."""
        if self._pins.pins.by_key:
            self._pins.expire()
        freed = self._capacity.evict(num_blocks, "evict()")
        if self._lagging:
            self._resync()
        return freed

    def reset(self) -> None:
        """Forget everything. Blocks held by leases stay valid for them but are not shared again. O(nodes)."""
        for pin in list(self._pins.pins.by_key.values()):
            self._pins.drop(pin)
        if self._ghosts.capacity:
            record = GhostRecord("reset", self._clock(), "reset()")
            for node in self._tree.nodes():
                self._ghosts.remember(node, len(node.blocks), record)
        detach(self, [child for root in list(self._tree.roots.values()) for child in root.each_child()], None)
        for lease in self._leases.values():
            lease._is_unshareable = True
        self._lagging.clear()
        self._resets += 1
        self.policy.on_reset()

    def discard(self, token_ids: TokenIds, namespace: Namespace = "", keep: int = 0) -> None:
        """Forget what is cached of some tokens beyond the first `keep`, unless leases or pins need it.

        For tokens that turned out to be wrong, whoever contributed them. O(tokens + path).
        """
        walk = self._match(encode_tokens(token_ids), self._spaces.get(frame_namespace(namespace)))._walk
        if walk is not None:
            self._discard(walk.source if walk.source is not None else walk.node, keep)
            if self._lagging:
                self._resync()

    def rebuilt(self) -> PrefixCache:
        """An empty cache with the same settings, clock, quotas, public prefixes and listeners.

        For the caller who found a broken invariant: this cache and its leases must not be used any more.
        O(nodes).
        """
        listeners = list(self._events.listeners)
        with contextlib.suppress(Exception):  # tells followers that the blocks have gone, as far as it can
            self.reset()
        policy = type(self.policy)()
        fresh = PrefixCache(
            self.num_blocks,
            self.block_size,
            policy,
            enabled=self.enabled,
            clock=self._clock,
            ghost_blocks=self._ghosts.capacity,
            hash_function=self._tree.hash_function,
            quotas={key: (group.floor, group.ceiling) for key, group in self._groups_by_key.items()},
            partial_reuse=self.partial_reuse,
            explain=self.explains,
        )
        fresh._pins.budget_blocks = self._pins.budget_blocks
        fresh._published = list(self._published)
        fresh._events.sequence = self._events.sequence
        for listener in listeners:
            fresh.subscribe(listener, replay=False)
        return fresh

    # ------------------------------------------------------------------ pins

    def pin(self, token_ids: TokenIds, namespace: Namespace = "", ttl: float | None = None) -> int:
        """Keep the cached part of a prefix from eviction; each hit renews the time.

        At most the pin budget is protected, leading blocks first. Pinning a prefix again extends and renews.

        Args:
            ttl: seconds; None: until `unpin`.

        Returns:
            Leading tokens that are pinned now; 0 when nothing of it is cached or the budget is spent.

        O(tokens + path).
        """
        self._pins.expire()
        data = encode_tokens(token_ids)
        if ttl is not None and not ttl > 0:
            raise InvalidRequestError(f"ttl must be above 0 seconds, not {ttl!r}", param="ttl")
        space = self._space(namespace)
        old = self._pins.get(data, space)
        if old is not None:
            self._pins.drop(old)
        walk = self._match(data, space)._walk
        if walk is None:
            return 0
        return self._pins.add(data, space, walk, ttl)

    def unpin(self, token_ids: TokenIds, namespace: Namespace = "") -> bool:
        """End a pin that was set with the same tokens; False when there is none. O(path)."""
        self._pins.expire()
        pin = self._pins.get(encode_tokens(token_ids), self._space(namespace))
        if pin is not None:
            self._pins.drop(pin)
        return pin is not None

    # ------------------------------------------------------------------ insight

    @property
    def stats(self) -> CacheStats:
        """A snapshot of the counters. O(quota groups)."""
        if self._pins.pins.by_key:
            self._pins.expire()
        free = self._pool.num_free
        cached = self._capacity.evictable()
        return CacheStats(
            total_blocks=self.num_blocks,
            free_blocks=free,
            cached_blocks=cached,
            held_blocks=self.num_blocks - free - cached,
            pinned_blocks=self._pins.pinned_blocks,
            num_nodes=self._tree.num_nodes,
            num_leases=len(self._leases),
            num_pins=len(self._pins),
            acquires=self._acquires,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            evicted_blocks=self._capacity.evicted_blocks,
            out_of_blocks=self._out_of_blocks,
            resets=self._resets,
            pins_given_way=self._pins_given_way,
            ghost_blocks=len(self._ghosts),
        )

    def subscribe(self, listener: Listener, *, replay: bool = True) -> Callable[[], None]:
        """Call `listener` with every block stored or removed from now on; see `radixkv.cache.events`.

        Args:
            replay: first tell it what is cached already.

        Returns:
            A function that ends the subscription.
        """
        if replay:
            self._events.replay(list(self._tree.nodes()), listener)
        self._events.listeners.append(listener)
        self._tree.listener = self._events

        def unsubscribe() -> None:
            if listener in self._events.listeners:
                self._events.listeners.remove(listener)
            if not self._events.listeners:
                self._tree.listener = None

        return unsubscribe

    def explain(self, token_ids: TokenIds, namespace: Namespace = "", *, admin: bool = False) -> MissReport:
        """Why a prompt would miss if it were acquired now; changes nothing. O(tokens + path).

        Args:
            admin: also look under other namespaces, and say so (`namespace`).
        """
        if self._pins.pins.by_key:
            self._pins.expire()
        data = encode_tokens(token_ids)
        if not data:
            raise InvalidRequestError("a prompt needs at least one token", param="token_ids")
        space = self._space(namespace)
        walk = self._match(data, space)._walk
        return self._explainer.dry(data, space, walk, admin)

    def advice(self, limit: int = 10) -> list[BreakPoint]:
        """Where recent prompts broke off from cached ones, and what moving that place would bring."""
        return self._advisor.advice(limit)

    def check(self) -> None:
        """Assert every invariant of pool, tree, leases and index. O(blocks).

        Raises:
            AssertionError: says which invariant is broken and where.
        """
        if self._pins.pins.by_key:
            self._pins.expire()
        check_cache(self)

    def show(self, max_lines: int = 50) -> str:
        """The tree as ASCII, at most `max_lines` lines."""
        return show_tree(self._tree, max_lines)
