"""PrefixCache: the one entry point to cached state. Match, acquire, evict, pin, reset, explain, check.

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
from typing import NamedTuple

import numpy as np
import xxhash

from radixkv.cache.admission import Admission
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.cache_stats import CacheStats
from radixkv.cache.detach import retire
from radixkv.cache.eviction.policy import EvictionPolicy, hook
from radixkv.cache.eviction.registry import make_eviction_policy
from radixkv.cache.forgetting import discard_from
from radixkv.cache.insight.advisor import Advisor, BreakPoint
from radixkv.cache.insight.continuation import continuation
from radixkv.cache.insight.events import EventStream, Listener, Listeners
from radixkv.cache.insight.evicted_ages import EvictedAges
from radixkv.cache.insight.explain import CACHE_IS_OFF, Explainer, MissReport
from radixkv.cache.insight.ghost import GhostIndex
from radixkv.cache.insight.prefix_hash import space_seed
from radixkv.cache.insight.report_queue import ReportQueue
from radixkv.cache.insight.tree_text import show_tree
from radixkv.cache.insight.tree_walk import TreeWalk
from radixkv.cache.insight.use_times import UseTimes
from radixkv.cache.integrity import check
from radixkv.cache.keys import (
    TOKEN_BYTES,
    EncodedTokens,
    Namespace,
    NamespaceKey,
    TokenIds,
    decode_tokens,
    encode_known,
    encode_tokens,
    frame_namespace,
)
from radixkv.cache.lease import Lease
from radixkv.cache.leases import Leases
from radixkv.cache.lookup import Lookup, Match
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.node import HashFunction, Node, Space
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.retention.capacity import Capacity
from radixkv.cache.retention.pins import PinBoard, PinInfo
from radixkv.cache.retention.public_prefixes import PublicPrefixes
from radixkv.cache.retention.quota import Quota, QuotaGroups, QuotaUsage, framed_quotas
from radixkv.cache.room import Room
from radixkv.cache.state import CacheState
from radixkv.cache.tree_nodes import Walk
from radixkv.errors import ConfigError, InvalidRequestError

__all__ = ["CacheStats", "Lease", "Match", "MissReport", "PrefixCache", "Quota"]


def _check_options(num_blocks: int, block_size: int, ghost_blocks: int | None, pin_budget: float) -> None:
    """Raise ConfigError for an option that is out of range."""
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}")
    if num_blocks >= 2**31:
        raise ConfigError(f"num_blocks must be below 2**31, not {num_blocks}")
    if ghost_blocks is not None and (type(ghost_blocks) is not int or ghost_blocks < 0):
        raise ConfigError(f"ghost_blocks must be an integer of at least 0, not {ghost_blocks!r}")
    if not 0.0 <= pin_budget <= 1.0:
        raise ConfigError(f"pin_budget must be a share of the pool in [0, 1], not {pin_budget!r}")


class Declared(NamedTuple):
    """What users declared to a cache: quotas by framed namespace, public prefixes as encoded tokens."""

    quotas: dict[NamespaceKey, Quota]
    public_prefixes: tuple[bytes, ...]


class PrefixCache:
    """A radix tree over a pool of blocks, with leases, eviction, pins, quotas and explanations.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block, at least 1.
        policy: order of eviction: a name from `radixkv.cache.eviction.registry`, or a policy object.
        enabled: False: nothing is ever matched or kept.
        clock: seconds, for TTLs and ages.
        ghost_blocks: evicted blocks to remember (hashes only); None: 4 * num_blocks; 0: none.
        hash_function: bytes -> int for the lookup of children; every hit is confirmed by its tokens, so any
            function is right. None: xxh3_64.
        pin_budget: share of the pool that pins may protect.
        quotas: namespace -> Quota, or (floor, ceiling) in blocks. A quota of a plain name also counts the
            namespaces that begin with it and have none of their own: a tenant's salts share one quota.
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
        _check_options(num_blocks, block_size, ghost_blocks, pin_budget)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enabled = enabled
        self.partial_reuse = partial_reuse
        self.explains = explain
        self.policy = make_eviction_policy(policy)
        self._clock = clock
        self._tree = tree = RadixTree(
            block_size, hash_function or xxhash.xxh3_64_intdigest, self.policy, UseTimes(clock)
        )
        self._evicted_ages = EvictedAges()
        self._groups = groups = QuotaGroups(num_blocks, self.policy)
        groups.set(framed_quotas(quotas))
        self._namespaces = Namespaces(groups)
        everybody = Space((), groups.common, space_seed(()), is_public=True)
        self._public = PublicPrefixes(everybody, tree.block_bytes)
        self._lookup = Lookup(tree, self._public, enabled)
        self._last: Match | None = None  # a request is usually matched, then acquired
        self._capacity = Capacity(BlockPool(num_blocks), tree, groups, everybody, self._on_evict)
        self._ghosts = GhostIndex(tree.block_bytes, 4 * num_blocks if ghost_blocks is None else ghost_blocks)
        self._explainer = Explainer(
            self._ghosts, self._public, clock, enabled=enabled, partial_reuse=partial_reuse
        )
        self._advisor = Advisor(block_size)
        self._reports = ReportQueue(self._ghosts, self._advisor, self._public)
        self.policy.attach(num_blocks, block_size, self._ghosts)
        self._policy_on_evict = hook(self.policy, "on_evict")
        self._ghost_data = hook(self.policy, "ghost_data")
        self._on_family = hook(self.policy, "on_family")
        self._pins = PinBoard(tree, int(num_blocks * pin_budget), clock)
        self._pinned = self._pins.by_key
        leases = Leases()
        self._room = Room(self._capacity, self._pins, leases, everybody)
        self._state = CacheState(
            tree=tree,
            capacity=self._capacity,
            public=self._public,
            pins=self._pins,
            leases=leases,
            room=self._room,
            ghosts=self._ghosts,
            reports=self._reports,
            explainer=self._explainer,
            enabled=enabled,
            partial_reuse=partial_reuse,
            explains=explain,
        )
        self._admission = Admission(self._state, clock)
        self._follow(Listeners())
        self._resets = 0

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
        self._reports.flush()
        length = self._public.add(encode_tokens(token_ids))
        self._lookup.outdate()
        self._ghosts.hasher.has_public |= length > 0
        return length // TOKEN_BYTES

    def unpublish(self, token_ids: TokenIds) -> bool:
        """Take a declaration back: the prefix is no longer shared by new requests. False: there was none."""
        self._reports.flush()
        self._lookup.outdate()
        return self._public.discard(encode_tokens(token_ids))

    # ------------------------------------------------------------------ lookup

    @staticmethod
    def encode(token_ids: TokenIds) -> EncodedTokens:
        """Check and encode a prompt once; what it returns stands for the token ids in every other call. O(n).

        Raises:
            InvalidRequestError: something is not an integer, or lies outside [0, 2**31).
        """
        return EncodedTokens(encode_tokens(token_ids))

    def match(self, token_ids: TokenIds, namespace: Namespace = "") -> Match:
        """The longest cached prefix. Read-only: changes neither order nor structure. O(tokens + path).

        Raises:
            InvalidRequestError: token ids or namespace are malformed.
        """
        if self._pinned:
            self._pins.expire()
        data = encode_tokens(token_ids)
        space = self._namespaces.known(namespace)
        self._last = match = self._lookup.match(data, space, namespace)
        return match

    def following(self, token_ids: TokenIds, namespace: Namespace = "", most: int = 64) -> list[int]:
        """What was cached behind these tokens before, in the same namespace: a guess of what comes next.

        At most `most` tokens; of several continuations the latest used one. Of public text only a prefix that
        was declared is followed. Read-only. O(tokens + path).
        """
        data = encode_tokens(token_ids)
        found = self._lookup.following(data, self._namespaces.known(namespace), most * TOKEN_BYTES)
        return np.frombuffer(found, dtype=np.int32).tolist()

    def is_current(self, match: Match) -> bool:
        """Whether a new lookup would give the same length. O(1); O(log siblings) after a change there."""
        if self._pinned:
            self._pins.expire()
        space = match.space
        if space is None:
            space = self._namespaces.known(match.namespace)
        return self._lookup.is_current(match, space)

    # ------------------------------------------------------------------ acquire

    def acquire(
        self,
        token_ids: TokenIds,
        namespace: Namespace = "",
        *,
        match: Match | None = None,
        skip: str | None = None,
        family: str = "",
    ) -> Lease:
        """Protect the longest cached prefix and take blocks for the rest. O(tokens + path).

        Args:
            token_ids: the prompt, at least one token.
            namespace: whose cache to look in.
            match: an earlier `match` of the same tokens, used if it is still current.
            skip: a reason not to look anything up (all tokens will be computed).
            family: a name that requests of the namespace which come back together share, for policies that
                learn when what is cached is used again; empty: nothing is known.

        Raises:
            OutOfBlocks: too few blocks are free or evictable; nothing was changed.
            InvalidRequestError: token ids or namespace are malformed, or there are none.
        """
        if self._pinned:
            self._pins.expire()
        if match is None:
            match = self._last
        data = encode_tokens(token_ids) if match is None else encode_known(token_ids, match.data)
        if not data:
            raise InvalidRequestError("a prompt needs at least one token", param="token_ids")
        space = None if match is None else self._lookup.space_of(match, namespace)
        if space is None:
            space = self._namespaces.obtain(namespace)
        if skip is None and self.enabled:
            if match is None or not self._lookup.still_holds(match, data, space):
                match = self._lookup.match(data, space)
            walk = match.walk
        else:
            walk = None
            if skip is None:
                skip = CACHE_IS_OFF
        if walk is None:
            is_public = self._public.prefixes and self._public.length_in(data)
            root = self._tree.root(self._public.space if is_public else space)
            walk = Walk(root, 0, 0, None, None, b"")
        if self._on_family is not None:
            self._on_family((space.key, family) if family else None)
        return self._admission.admit(data, namespace, space, walk, skip)

    def _on_evict(self, node: Node, num_blocks: int, by: str) -> None:
        if self._policy_on_evict is not None:
            self._policy_on_evict(node, num_blocks)
        self._evicted_ages.add(self._tree.use_times.age_s(node.last_access), num_blocks)
        if self._ghosts.capacity:
            data = None if self._ghost_data is None else self._ghost_data(node)
            reason = "expired" if node.lapsed else "evicted"
            self._ghosts.remember(node, num_blocks, reason, self._clock(), by, data)

    # ------------------------------------------------------------------ room

    def available_blocks(self, namespace: Namespace = "") -> int:
        """Blocks that a request of this namespace could get now: free and evictable. O(quota groups)."""
        if self._pinned:
            self._pins.expire()
        return self._capacity.available(self._groups.of(frame_namespace(namespace)))

    def room(self, namespace: Namespace = "") -> tuple[int, int | None]:
        """Blocks that the pool could give this namespace now, and what its ceiling leaves it, if it has one.

        The smaller one is `available_blocks`. O(quota groups).
        """
        if self._pinned:
            self._pins.expire()
        group = self._groups.of(frame_namespace(namespace))
        return self._capacity.in_pool(group), self._capacity.below_ceiling(group)

    def ceiling(self, namespace: Namespace = "") -> int:
        """Most blocks that a namespace may have: its quota's ceiling, or the pool. O(1)."""
        ceiling = self._groups.of(frame_namespace(namespace)).ceiling
        return self.num_blocks if ceiling is None else ceiling

    def evict(self, num_blocks: int) -> int:
        """Evict exactly min(num_blocks, evictable) blocks; returns how many. O(log leaves) per leaf."""
        if self._pinned:
            self._pins.expire()
        return self._capacity.evict(num_blocks, "evict()")

    def reset(self) -> None:
        """Forget everything. Blocks held by leases stay valid for them but are not shared again.

        The rest is free at once; its nodes are taken apart later, piece by piece.
        O(leases * depth + pins * depth + namespaces); with subscribers O(blocks).
        """
        retired = retire(self._state)
        self._ghosts.remember_all(retired, retired.num_blocks, "reset", self._clock(), "reset()")
        self._lookup.outdate()
        self._last = None
        self._resets += 1
        self.policy.on_reset()

    def discard(self, token_ids: TokenIds, namespace: Namespace = "", keep: int = 0) -> None:
        """Forget what is cached of some tokens beyond the first `keep`, unless leases or pins need it.

        For tokens that turned out to be wrong, whoever contributed them. What continues them without a branch
        goes with them; where cached prefixes branch off behind, they stay. Nothing happens if no token behind
        the first `keep` is cached. Leaves no ghosts.

        O(tokens + path).
        """
        walk = self._lookup.match(encode_tokens(token_ids), self._namespaces.known(namespace)).walk
        if walk is not None and walk.depth + walk.partial > keep:
            discard_from(self._capacity, walk.source if walk.source is not None else walk.node, keep)

    @property
    def declared(self) -> Declared:
        """What users declared, which outlives what is cached: quotas and public prefixes. O(their number)."""
        return Declared(self._groups.quotas, tuple(self._public.prefixes))

    def declare(self, declared: Declared) -> None:
        """Declare what was declared to another cache, on one that is new.

        Raises:
            ConfigError: the quotas' floors exceed the pool.
        """
        self._groups.set(declared.quotas)
        for prefix in declared.public_prefixes:
            self._ghosts.hasher.has_public |= self._public.add(prefix) > 0

    def rebuilt(self) -> PrefixCache:
        """An empty cache with the same settings, clock, quotas, public prefixes and listeners.

        For the caller who found a broken invariant: this cache and its leases must not be used any more. The
        policy is a new one of the same class; pins, ghosts, advice and counters begin anew. O(nodes).
        """
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
            partial_reuse=self.partial_reuse,
            explain=self.explains,
        )
        fresh._pins.budget_blocks = self._pins.budget_blocks
        fresh.declare(self.declared)
        fresh._follow(self._events.listeners)
        self._follow(Listeners())
        return fresh

    # ------------------------------------------------------------------ quotas

    def set_quotas(self, quotas: Mapping[Namespace, Quota | tuple[int, int | None]]) -> None:
        """Replace all quotas (see the constructor); nothing changes if it raises.

        Above a ceiling that was lowered, what is cached goes at once; what requests hold, when they want more
        or end. O(groups + namespaces in use), and as `evict`.

        Raises:
            ConfigError: a quota is malformed, the floors together exceed the pool, or a name that has never
                had a quota has blocks already, which count for all others (`reset` frees it of them).
        """
        framed = framed_quotas(quotas)
        used = {space.key for space in self._tree.roots} | {lease.space.key for lease in self._state.leases}
        for key in framed:
            if not self._groups.is_known(key) and any(key in (name, name[:1]) for name in used):
                raise ConfigError(
                    f"{key[0]!r} has blocks in the cache already, which count for those without a quota: "
                    "give its quota before its first request, or reset the cache"
                )
        self._groups.set(framed)
        self._namespaces.regroup()
        self._capacity.keep_ceilings()

    # ------------------------------------------------------------------ pins

    def pin(
        self,
        token_ids: TokenIds,
        namespace: Namespace = "",
        ttl: float | None = None,
        *,
        at_least: bool = False,
    ) -> int:
        """Keep the cached part of a prefix from eviction; each hit renews the time.

        At most the pin budget is protected, leading blocks first. Pinning a prefix again extends and renews.

        Args:
            ttl: seconds; None: until `unpin`.
            at_least: make no pin shorter than it was, and of a prefix that is pinned in part one pin of that
                part: for those who ask often, and for prefixes that others may have pinned, too.

        Returns:
            Leading tokens that are pinned now; 0 when nothing of it is cached or the budget is spent.

        O(tokens + path).
        """
        self._pins.expire()
        data = encode_tokens(token_ids)
        if ttl is not None and not ttl > 0:
            raise InvalidRequestError(f"ttl must be above 0 seconds, not {ttl!r}", param="ttl")
        space = self._namespaces.obtain(namespace)  # what is pinned may all be public
        old = self._pins.get(data, space)
        if old is not None and not at_least:
            self._pins.drop(old)
        walk = self._lookup.match(data, space).walk
        if walk is None:
            return 0
        return self._pins.add(data, space, walk, ttl, at_least)

    def unpin(self, token_ids: TokenIds, namespace: Namespace = "") -> bool:
        """End a pin set with these tokens, or that pins just these; False: there is none. O(path)."""
        self._pins.expire()
        data = encode_tokens(token_ids)
        space = self._namespaces.known(namespace)
        if space is None:
            return False
        pin = self._pins.get(data, space)
        if pin is None:
            walk = self._lookup.match(data, space).walk
            if walk is not None and walk.depth + walk.partial == len(data) // TOKEN_BYTES:
                pin = self._pins.ending_with(walk, space)
        if pin is not None:
            self._pins.drop(pin)
        return pin is not None

    def unpin_id(self, pin_id: str, namespace: Namespace = "") -> bool:
        """End the pin of that id in a namespace; False: there is none. O(pins)."""
        self._pins.expire()
        pin = self._pins.of_id(pin_id, frame_namespace(namespace))
        if pin is not None:
            self._pins.drop(pin)
        return pin is not None

    def pins(self, most_tokens: int | None = None) -> list[PinInfo]:
        """The pins, oldest first. O(pins and their tokens).

        Args:
            most_tokens: show only so many leading tokens of each.
        """
        return self._pins.listing(most_tokens)

    def quota_usage(self) -> list[QuotaUsage]:
        """What each quota allows and how much of it is used. O(quotas)."""
        return self._groups.usage()

    # ------------------------------------------------------------------ insight

    @property
    def stats(self) -> CacheStats:
        """A snapshot of the counters. O(quota groups)."""
        if self._pinned:
            self._pins.expire()
        free = self._capacity.pool.num_free
        cached = self._capacity.evictable()
        return CacheStats(
            total_blocks=self.num_blocks,
            free_blocks=free,
            cached_blocks=cached,
            held_blocks=self.num_blocks - free - cached,
            pinned_blocks=self._pins.pinned_blocks,
            num_nodes=self._tree.num_nodes,
            num_leases=len(self._state.leases),
            num_pins=len(self._pins),
            acquires=self._admission.admitted,
            queried_tokens=self._admission.queried_tokens,
            hit_tokens=self._admission.hit_tokens,
            evicted_blocks=self._capacity.evicted_blocks,
            evicted_by_age=tuple(self._evicted_ages.counts),
            evicted_age_s=self._evicted_ages.total_s,
            out_of_blocks=self._room.refused,
            resets=self._resets,
            pins_given_way=self._pins.given_way,
            ghost_blocks=len(self._ghosts),
        )

    @property
    def num_resets(self) -> int:
        """How often `reset` was called. O(1)."""
        return self._resets

    def subscribe(self, listener: Listener, *, replay: bool = True) -> Callable[[], None]:
        """Call `listener` with every block stored or removed from now on; see `radixkv.cache.insight.events`.

        Args:
            replay: first tell it what is cached already; what it raises then goes to the caller.

        Returns:
            A function that ends the subscription, also with what `rebuilt` puts in this cache's place.

        What a listener raises later is logged; one that fails many times in a row is dropped.
        """
        if replay:
            self._events.replay(list(self._tree.nodes()), listener)
        return self._events.listeners.add(listener)

    def _follow(self, listeners: Listeners) -> None:
        """Tell these of events from now on."""
        self._events = EventStream(self._ghosts.hasher, self._tree.block_bytes, listeners)
        listeners.on_change = self._on_listeners
        self._on_listeners(len(listeners) > 0)

    def _on_listeners(self, any_listen: bool) -> None:
        self._tree.listener = self._events if any_listen else None
        if not any_listen:
            self._events.forget()

    def explain(self, token_ids: TokenIds, namespace: Namespace = "", *, admin: bool = False) -> MissReport:
        """Why a prompt would miss if it were acquired now; changes nothing. O(tokens + path).

        Args:
            admin: also look under other namespaces (the 256 cached latest), and say so (`namespace`).
        """
        if self._pinned:
            self._pins.expire()
        data = encode_tokens(token_ids)
        if not data:
            raise InvalidRequestError("a prompt needs at least one token", param="token_ids")
        space = self._namespaces.obtain(namespace)
        walk = self._lookup.match(data, space).walk
        elsewhere = self._lookup.found_elsewhere(data, space) if admin else None
        return self._explainer.dry(data, space, walk, elsewhere)

    def continuation(self, token_ids: TokenIds, namespace: Namespace = "", limit: int = 64) -> list[int]:
        """With what the nearest prompt that the namespace itself cached goes on where a prompt's match ends.

        Empty if nothing does, or if it is public: what others declared is not told. O(tokens + path).
        """
        space = self._namespaces.known(namespace)
        walk = self._lookup.match(encode_tokens(token_ids), space).walk
        if walk is None or space is None:
            return []
        size = limit * TOKEN_BYTES
        return decode_tokens(continuation(walk, size, space)[:size])

    def path(self, token_ids: TokenIds, namespace: Namespace = "") -> list[int]:
        """The nodes that a lookup finds, from the top down: the ids that a `walk` gives them.

        The last one may be found in part. Read-only. O(tokens + path).
        """
        walk = self._lookup.match(encode_tokens(token_ids), self._namespaces.known(namespace)).walk
        if walk is None:
            return []
        last = walk.node if walk.source is None else walk.source
        return [node.blocks[0] for node in self._tree.path(last) if node.blocks]

    def walk(
        self,
        namespace: Namespace | None = None,
        *,
        shown_tokens: int = 0,
        most_nodes: int = 50_000,
        most_bytes: int = 8 * 1024 * 1024,
    ) -> TreeWalk | None:
        """A walk through the nodes of a namespace and the public ones, or of all; None: there are none.

        The caller calls its `advance`, between calls of this cache; see `radixkv.cache.insight.tree_walk`.
        """
        self._reports.flush()
        space = None if namespace is None else self._namespaces.known(namespace)
        if space is None and namespace is not None:
            return None
        return TreeWalk(
            self._tree,
            space,
            self._public.space,
            shown_tokens=shown_tokens,
            most_nodes=most_nodes,
            most_bytes=most_bytes,
        )

    @property
    def counts_hits(self) -> bool:
        """Whether nodes count the requests that find them: where the policy asks for it."""
        return self.policy.tracks_path

    @property
    def evicts_in_order(self) -> bool:
        """Whether eviction takes candidates strictly in the order of their priorities."""
        return hook(self.policy, "victim") is None

    def use_times(self) -> tuple[float, list[tuple[int, float]]]:
        """The clock now, and when the use counter stood where: see `radixkv.cache.insight.use_times`."""
        self._reports.flush()
        return self._clock(), self._tree.use_times.readings()

    def advice(self, limit: int = 10, namespace: Namespace | None = None) -> list[BreakPoint]:
        """Where recent prompts broke off from cached ones, and what moving that place would bring.

        Args:
            namespace: whose prompts; None: everybody's.
        """
        self._reports.flush()
        return self._advisor.advice(limit, None if namespace is None else frame_namespace(namespace))

    def check(self) -> None:
        """Assert every invariant of pool, tree, leases and index. O(blocks).

        Raises:
            AssertionError: says which invariant is broken and where.
        """
        if self._pinned:
            self._pins.expire()
        check(self._state)

    def show(self, max_lines: int = 50) -> str:
        """The tree as ASCII, at most `max_lines` lines and one to say that there is more. O(lines)."""
        return show_tree(self._tree, max_lines)
