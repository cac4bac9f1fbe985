# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: the one entry point to cached state. Match, acquire, evict, pin, reset, explain, check.

The life of a cached block:

1. `acquire` finds the longest cached prefix, protects it, and takes free blocks (evicting if need be) for the
   rest: they are private to the lease.
2. `commit` puts them into the tree: from then on others can match them.
3. `release` drops the protection: leaves become candidates for eviction.
4. Eviction trims candidates from their tail and gives the blocks back to the pool; the ghost index remembers
   that they were here.

The cache moves no memory: `lease.copies` lists the copies for the caller. It is not thread-safe; one thread
(the engine's) owns it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple, Self

from radixkv.cache.accounts import BlockAccount, BlockAccounts, Quota, QuotaUsage, framed_quotas
from radixkv.cache.block_identity import BlockIdentities, HashFunction, what_computes
from radixkv.cache.block_leases import BlockLeases
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.cache_stats import CacheStats, snapshot
from radixkv.cache.capacity import Capacity
from radixkv.cache.eviction.policy import EvictionPolicy, overridden
from radixkv.cache.eviction.registry import make_eviction_policy
from radixkv.cache.integrity import check
from radixkv.cache.invalidation import invalidate_all
from radixkv.cache.keys import (
    TOKEN_BYTES,
    EncodedTokens,
    NamespaceKey,
    NamespaceName,
    TokenIds,
    encode_tokens,
)
from radixkv.cache.lease import Lease
from radixkv.cache.leasing import Leasing
from radixkv.cache.lookup import Lookup, Match
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.pins import Pin, PinInfo, Pins
from radixkv.cache.radix_tree import RadixTree, Walk
from radixkv.cache.reporting.ages import UseTimes
from radixkv.cache.reporting.divergence import DivergenceObserver
from radixkv.cache.reporting.events import ChangeLog, Listener
from radixkv.cache.reporting.explain import CACHE_IS_OFF, MissReport, due_report, report_of
from radixkv.cache.reporting.ghost import GhostIndex
from radixkv.cache.reporting.reasons import Reason
from radixkv.cache.reporting.tree_view import TreeView
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.window_checkpoints import make_checkpoints
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.errors import ConfigError, InvalidRequestError

__all__ = ["CacheStats", "Lease", "Match", "MissReport", "PrefixCache"]


class Declared(NamedTuple):
    """Declarations of users, which outlive the contents of the cache."""

    quotas: dict[NamespaceKey, Quota]
    public_prefixes: tuple[tuple[NamespaceKey, bytes], ...]  # what computes them, and their encoded tokens

    def of_model(self, model: str) -> Declared:
        """Return them for another model: what computes a prefix is (adapter, model, and more)."""
        moved = [
            ((*computes[:1], model, *computes[2:]) if len(computes) > 1 else computes, data)
            for computes, data in self.public_prefixes
        ]
        return Declared(self.quotas, tuple(moved))


class PrefixCache:
    """A radix tree over a pool of blocks, with leases, eviction, pins, quotas and explanations.

    Calls raise InvalidRequestError where token ids (`encode`) or a namespace (`namespace_key`) is malformed.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block, at least 1.
        policy: order of eviction: a name from `radixkv.cache.eviction.registry`, or a policy object.
        enabled: False: nothing is ever matched or kept.
        clock: seconds, for TTLs and ages.
        ghost_blocks: evicted blocks to remember (hashes only); None: 4 * num_blocks; 0: none.
        hash_function: bytes -> int for the identities of blocks; every hit is confirmed by its tokens, so any
            function is right, and a bad one only makes reports and followers of events guess. None: xxh3_128.
        model: fingerprint of the model; completes the key (tenant, salt, adapter, model) of namespaces that
            name fewer parts. Empty: namespaces are taken as they are.
        past_models: fingerprints that this one has replaced, whose namespaces are taken for its own.
        partial_reuse: share parts of blocks by copying; False: whole blocks only.
        explain: False: leases carry no report (`skipped`), for measuring the cost of reports.
        observer: receives every acquired prompt that parts from cached text.
        num_state_slots: states that there is memory for, of a model with layers that keep one; 0: it has
            none. With states, whole blocks are shared only, and requests resume at checkpoints.
        windows: sizes of the memory for layers with a sliding window, where it is apart; then, too, requests
            resume at checkpoints. None: their K/V is in the same blocks as that of other layers.
        pin_budget: share of the pool that pins may protect.
        quotas: namespace -> Quota, or (floor, ceiling) in blocks. A quota of a plain name also counts the
            namespaces that begin with it and have none of their own: a tenant's salts share one quota.

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
        model: str = "",
        past_models: frozenset[str] = frozenset(),
        partial_reuse: bool = True,
        explain: bool = True,
        observer: DivergenceObserver | None = None,
        num_state_slots: int = 0,
        windows: WindowSpec | None = None,
        pin_budget: float = 0.5,
        quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]] | None = None,
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if type(value) is not int or not 1 <= value < 2**31:
                raise ConfigError(f"{name} must be an integer in [1, 2**31), not {value!r}")
        if ghost_blocks is not None and (type(ghost_blocks) is not int or ghost_blocks < 0):
            raise ConfigError(f"ghost_blocks must be an integer of at least 0, not {ghost_blocks!r}")
        if not 0.0 <= pin_budget <= 1.0:
            raise ConfigError(f"pin_budget must be a share of the pool in [0, 1], not {pin_budget!r}")
        self._options: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "enabled": enabled,
            "clock": clock,
            "ghost_blocks": ghost_blocks,
            "hash_function": hash_function,
            "model": model,
            "past_models": past_models,
            "partial_reuse": partial_reuse,
            "explain": explain,
            "observer": observer,
            "num_state_slots": num_state_slots,
            "windows": windows,
            "pin_budget": pin_budget,
        }
        partial_reuse = partial_reuse and not num_state_slots and windows is None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enabled = enabled
        self.observer = observer
        self.num_resets = 0  # how often `reset` was called
        self.partial_reuse = partial_reuse
        self.pin_budget = pin_budget
        self.policy = policy = make_eviction_policy(policy)
        self._accounts = accounts = BlockAccounts(num_blocks, policy)
        identities = BlockIdentities(block_size * TOKEN_BYTES, hash_function)
        self._tree = tree = RadixTree(block_size, identities, policy, UseTimes(clock))
        #: The checkpoints of a model with states or with windows that are freed; None: it has neither.
        self.states: Checkpoints | None = None
        if num_state_slots or windows is not None:
            self.states = make_checkpoints(num_state_slots, windows, block_size, num_blocks)
        tree.states = self.states
        self._namespaces = names = Namespaces(accounts, identities, tree.block_bytes, model, past_models)
        ghosts = GhostIndex(4 * num_blocks if ghost_blocks is None else ghost_blocks, clock)
        policy.attach(num_blocks, block_size, ghosts)
        self._pins = pins = Pins(tree, int(num_blocks * pin_budget), clock)
        self._capacity = capacity = Capacity(
            BlockPool(num_blocks), tree, accounts, names.publics, pins, ghosts
        )
        self._lookup = lookup = Lookup(tree, names, enabled)
        self._leasing = leasing = Leasing(capacity, observer, explain, enabled, partial_reuse)
        self._changes: ChangeLog | None = None  # nobody has subscribed so far
        self._last: Match | None = None  # a request is usually matched, then acquired
        self._on_session = overridden(policy, "on_session")
        #: Leases on whole blocks, to copy them in or out.
        self.block_leases = BlockLeases(tree, lookup, names, leasing)
        accounts.replace(self._framed(quotas or {}))

    def __repr__(self) -> str:
        s = self.stats
        return (
            f"PrefixCache({s.total_blocks} blocks of {self.block_size} tokens: {s.free_blocks} free, "
            f"{s.cached_blocks} cached, {s.held_blocks} held; {s.num_leases} leases, {s.num_nodes} nodes, "
            f"{self.policy.name})"
        )

    def namespace_key(self, namespace: NamespaceName) -> NamespaceKey:
        """Return the whole key of a namespace, which stands for its name in every other call.

        Raises:
            InvalidRequestError: neither a string nor a tuple of at least one string, or it names another
                model than the cache's.
        """
        return self._namespaces.key(namespace)

    @functools.cached_property
    def tree(self) -> TreeView:
        """The tree for readers: as text, as data, and the continuation of a prompt."""
        return TreeView(self._tree, self._lookup, self._namespaces, self._options["clock"])

    # ------------------------------------------------------------------ lookup

    @staticmethod
    def encode(token_ids: TokenIds) -> EncodedTokens:
        """Check and encode a prompt once; the result stands for the token ids in every other call. O(n).

        Raises:
            InvalidRequestError: something is not an integer, or lies outside [0, 2**31).
        """
        return EncodedTokens(encode_tokens(token_ids))

    def match(self, token_ids: TokenIds, namespace: NamespaceName = "") -> Match:
        """Return the longest cached prefix; change neither order nor structure. O(tokens + path)."""
        if self._pins.by_key:
            self._pins.expire()
        data = encode_tokens(token_ids)
        owner = self._namespaces.known(namespace)
        self._last = match = self._lookup.match(data, owner, namespace)
        return match

    def is_current(self, match: Match) -> bool:
        """Return True if a new lookup would give the same length. O(1), O(log siblings) after a change."""
        if self._pins.by_key:
            self._pins.expire()
        return self._lookup.is_current(match, match.owner or self._namespaces.known(match.namespace))

    def identity(self, match: Match) -> tuple[bytes, int]:
        """Return the identity of a match's whole blocks (of none, the seed), and their tokens. O(1).

        The match must be current; empty where nothing has been cached in its namespace.
        """
        tree, walk = self._tree, match.walk
        return (b"", 0) if walk is None else (tree.identity_of_match(walk, walk.node.owner), walk.depth)

    # ------------------------------------------------------------------ acquire

    def acquire(
        self,
        token_ids: TokenIds,
        namespace: NamespaceName = "",
        *,
        match: Match | None = None,
        skip: str | None = None,
        cache_key_hint: str = "",
        most_shared: int | None = None,
    ) -> Lease:
        """Protect the longest cached prefix and take blocks for the rest. O(tokens + path).

        Args:
            token_ids: the prompt, at least one token.
            namespace: whose cache to look in.
            match: an earlier `match` of the same tokens, at most `most_shared`, used if it is still current.
            skip: a reason not to look anything up (all tokens will be computed).
            most_shared: leading tokens that may be found, and shared when they are committed; None: all.
            cache_key_hint: a name shared by requests of the namespace that come back together, for policies
                that learn times of reuse; empty: nothing is known.

        Raises:
            OutOfBlocks: too few blocks are free or evictable; nothing was changed.
            InvalidRequestError: there are no tokens.
        """
        if self._pins.by_key:
            self._pins.expire()
        if match is None:
            match = self._last
        data = encode_tokens(token_ids)
        if not data:
            raise InvalidRequestError("a prompt needs at least one token", param="token_ids")
        if skip is None and not self.enabled:
            skip = CACHE_IS_OFF
        walk: Walk | None = None
        looked_up = data if most_shared is None else data[: most_shared * TOKEN_BYTES]
        if skip is None and match is not None and self._lookup.still_holds(match, looked_up, namespace):
            owner, walk = match.owner, match.walk
        else:
            owner = self._namespaces.obtain(namespace)
            if skip is None:
                walk = self._lookup.match(looked_up, owner).walk
        assert owner is not None
        if walk is None:
            walk = self._lookup.nothing_found(looked_up, owner)
        if self._on_session is not None:
            self._on_session((owner.key, cache_key_hint) if cache_key_hint else None)
        lease = self._leasing.make(data, namespace, owner, walk, skip)
        if most_shared is not None:
            lease.most_shared = most_shared
        return lease

    # ------------------------------------------------------------------ room

    def available_blocks(self, namespace: NamespaceName = "") -> int:
        """Count the blocks that a request of a namespace could get now, free and evictable. O(accounts)."""
        self._pins.expire()
        return min(self._capacity.room(self._account(namespace)))

    def room(self, namespace: NamespaceName = "") -> tuple[int, int | None]:
        """Return how many blocks the pool could give a namespace, and how many its ceiling allows, if any.

        The smaller one is `available_blocks`. O(accounts).
        """
        self._pins.expire()
        account = self._account(namespace)
        in_pool, below = self._capacity.room(account)
        return in_pool, None if account.ceiling is None else below

    def displaces_younger(self, num_blocks: int, age_s: float, namespace: NamespaceName = "") -> bool:
        """Return True if `num_blocks` for a namespace would evict prefixes used within the last `age_s` s.

        By the order of eviction as it is now. O(leaves that would be evicted and their ancestors).
        """
        return self._capacity.displaces_younger(self._account(namespace), num_blocks, age_s)

    def _account(self, namespace: NamespaceName) -> BlockAccount:
        return self._accounts.of(self._namespaces.key(namespace))

    def ceiling(self, namespace: NamespaceName = "") -> int:
        """Return the most blocks that a namespace may have: its quota's ceiling, or the pool. O(1)."""
        ceiling = self._account(namespace).ceiling
        return self.num_blocks if ceiling is None else ceiling

    def max_blocks(self, token_ids: TokenIds, namespace: NamespaceName = "") -> int:
        """Return the most blocks that a request which begins with these tokens may have, whatever else runs.

        The pool, or the namespace's ceiling, for which public blocks don't count. O(tokens) where there are
        public prefixes, else O(1).
        """
        ceiling = self._account(namespace).ceiling
        if ceiling is None:
            return self.num_blocks
        if self._namespaces.any_declared:
            declared = self._namespaces.public_of(namespace).declared
            ceiling += declared.length_in(encode_tokens(token_ids)) // self._tree.block_bytes
        return min(ceiling, self.num_blocks)

    def shares_quota(self, one: NamespaceName, other: NamespaceName) -> bool:
        """Return True if the blocks of two namespaces count for the same quota, or for none. O(1)."""
        return self._account(one) is self._account(other)

    def evict(self, num_blocks: int) -> int:
        """Evict exactly min(num_blocks, evictable) blocks; returns how many. O(log leaves) per leaf."""
        self._pins.expire()
        return self._capacity.evict(num_blocks, "evict()")

    def reset(self) -> None:
        """Forget everything. Blocks held by leases stay valid for them but are not shared again.

        The rest is free at once; its nodes are taken apart later, piece by piece.
        O(leases * depth + pins * depth + namespaces); with subscribers O(blocks).
        """
        self._capacity.ghosts.remember_all(invalidate_all(self._capacity), "reset()")
        self.num_resets += 1
        self._lookup.version += 1
        self._last = None
        self.policy.on_reset()

    def put_first(self, token_ids: TokenIds, namespace: NamespaceName = "") -> int:
        """Evict the last cached blocks of a finished conversation's prompt before all others. O(n).

        They stay until their room is needed; a use before that restores their place in the order. Blocks that
        are held, public, or in front of other cached tokens keep their place.

        Returns:
            The cached tokens of the prompt, if its last blocks are evicted first now; else 0.
        """
        owner = self._namespaces.known(namespace)
        walk = self._lookup.match(encode_tokens(token_ids), owner, namespace).walk
        node = None if walk is None else walk.source or walk.node
        if walk is None or node is None or node.entry is None or node.owner is not owner:
            return 0
        owner.account.index.put_first(node)
        return walk.depth + walk.partial

    def discard(self, token_ids: TokenIds, namespace: NamespaceName = "", keep: int = 0) -> None:
        """Forget the cached part of some tokens beyond the first `keep`, unless leases or pins need it.

        For tokens that turned out to be wrong, whoever contributed them. What continues them without a branch
        goes with them; where cached prefixes branch off after, they stay. Nothing happens if no token after
        the first `keep` is cached. Leaves no ghosts.

        O(tokens + path).
        """
        walk = self._lookup.match(encode_tokens(token_ids), self._namespaces.known(namespace), namespace).walk
        if walk is not None and walk.depth + walk.partial > keep:
            self._capacity.discard_from(walk.source if walk.source is not None else walk.node, keep)
            self._tree.end_changes()

    # ------------------------------------------------------------------ public prefixes

    def publish(self, token_ids: TokenIds, namespace: NamespaceName = "") -> int:
        """Declare a prefix public: from now on its whole blocks are shared.

        By all namespaces whose K/V is computed as that of `namespace` is: whose keys agree in all parts from
        the third on, after tenant and salt. What namespaces cached of it before stays theirs. O(tokens).

        Returns:
            Tokens of the prefix that are shared: its whole blocks.
        """
        length = self._namespaces.declare(self._computes(namespace), encode_tokens(token_ids))
        self._lookup.version += 1
        return length // TOKEN_BYTES

    def unpublish(self, token_ids: TokenIds, namespace: NamespaceName = "") -> bool:
        """Take a declaration back: the prefix is no longer shared by new requests. False: there was none."""
        self._lookup.version += 1
        return self._namespaces.undeclare(self._computes(namespace), encode_tokens(token_ids))

    def _computes(self, namespace: NamespaceName) -> NamespaceKey:
        return what_computes(self._namespaces.key(namespace))

    # ------------------------------------------------------------------ quotas

    def set_quotas(self, quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]]) -> None:
        """Replace all quotas (see the constructor); nothing changes if it raises.

        Above a lowered ceiling, cached blocks go at once; held ones, when their requests want more
        or end. O(accounts + namespaces in use), and as `evict`.

        Raises:
            ConfigError: a quota is malformed, the floors together exceed the pool, or a name that has never
                had a quota has blocks already, which count for all others (`reset` frees it of them).
        """
        framed, known = self._framed(quotas), self._accounts.quotas
        used = {owner.key for owner in self._tree.roots}
        used |= {lease.owner.key for lease in self._capacity.leases.values()}
        for key in framed:
            if key not in known and any(key in (name, name[:1]) for name in used):
                raise ConfigError(
                    f"{key[0]!r} has blocks in the cache already, which count for those without a quota: "
                    "give its quota before its first request, or reset the cache"
                )
        self._accounts.replace(framed)
        self._namespaces.move_to_accounts()
        self._capacity.keep_ceilings()

    def _framed(
        self, quotas: Mapping[NamespaceName, Quota | tuple[int, int | None]]
    ) -> dict[NamespaceKey, Quota]:
        return {self._namespaces.quota_key(name): quota for name, quota in framed_quotas(quotas).items()}

    def quota_usage(self) -> list[QuotaUsage]:
        """Return limits and use of each quota. O(quotas)."""
        return self._accounts.usage()

    # ------------------------------------------------------------------ pins

    def pin(
        self,
        token_ids: TokenIds,
        namespace: NamespaceName = "",
        ttl: float | None = None,
        *,
        at_least: bool = False,
    ) -> PinInfo | None:
        """Keep the cached part of a prefix from eviction; each hit renews the time.

        At most the pin budget is protected, leading blocks first. Pinning a prefix again extends and renews.

        Args:
            ttl: seconds; None: until `unpin`.
            at_least: make no pin shorter than it was, and of a prefix that is pinned in part one pin of that
                part: for frequent calls, and for prefixes that others may have pinned, too.

        Returns:
            The pin; None: nothing of the prefix is cached, or the budget is spent.

        Raises:
            InvalidRequestError: ttl is not a number above 0.

        O(tokens + path).
        """
        pins = self._pins
        pins.expire()
        data = encode_tokens(token_ids)
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, Real) or not ttl > 0):
            raise InvalidRequestError(
                f"ttl must be a number of seconds above 0, or None, not {ttl!r}", param="ttl"
            )
        owner = self._namespaces.obtain(namespace)  # what is pinned may all be public
        walk = self._lookup.match(data, owner).walk
        pin = None if walk is None else pins.add(data, owner, walk, ttl, at_least)
        return None if pin is None else pins.show(pin)

    def unpin(self, token_ids: TokenIds, namespace: NamespaceName = "") -> bool:
        """End a pin set with these tokens, or that pins just these; False: there is none. O(path)."""
        self._pins.expire()
        data, owner = encode_tokens(token_ids), self._namespaces.known(namespace)
        if owner is None:
            return False
        return self._unpin(self._pins.find(data, owner, self._lookup.match(data, owner).walk))

    def unpin_id(self, pin_id: str, namespace: NamespaceName = "") -> bool:
        """End the pin of that id in a namespace; False: there is none. O(path)."""
        self._pins.expire()
        return self._unpin(self._pins.by_key.get((self._namespaces.key(namespace), pin_id)))

    def _unpin(self, pin: Pin | None) -> bool:
        if pin is not None:
            self._pins.drop(pin)
        return pin is not None

    def pins(self, max_tokens: int | None = None) -> list[PinInfo]:
        """Return the pins, oldest first, with at most `max_tokens` leading tokens each. O(pins, tokens)."""
        self._pins.expire()
        return [self._pins.show(pin, max_tokens) for pin in self._pins]

    # ------------------------------------------------------------------ what outlives the contents

    @property
    def declared(self) -> Declared:
        """Quotas and public prefixes, which outlive the cache's contents. O(their number)."""
        return Declared(self._accounts.quotas, self._namespaces.declared())

    def declare(self, declared: Declared) -> None:
        """Repeat the declarations of another cache, on a new one.

        Raises:
            ConfigError: the quotas' floors exceed the pool.
        """
        self._accounts.replace(declared.quotas)
        for computes, prefix in declared.public_prefixes:
            self._namespaces.declare(computes, prefix)

    def rebuilt(self, model: str | None = None) -> Self:
        """Return an empty cache with the same settings, clock, declarations, counters and listeners.

        For a caller that found a broken invariant, or whose K/V is worth nothing any more: this cache and its
        leases must not be used any more. The policy is a new one of the same class; pins and ghosts start
        empty.

        Args:
            model: fingerprint of the model from now on: namespaces of this cache's one are taken for its.
        """
        with contextlib.suppress(Exception):  # tells followers that the blocks have gone, as far as it can
            self.reset()
        options, declared = self._options, self.declared
        if model is not None:
            past = (options["past_models"] | {options["model"]}) - {model}
            options = {**options, "model": model, "past_models": past}
            declared = declared.of_model(model)
        fresh = type(self)(policy=type(self.policy)(), **options)
        fresh.declare(declared)
        fresh._continue_counts(self)
        fresh._changes, fresh._tree.changes = self._changes, self._tree.changes
        if fresh.states is not None and self.states is not None:
            fresh.states.changes, self.states.changes = self.states.changes, None
        self._changes = self._tree.changes = None
        return fresh

    def _continue_counts(self, earlier: PrefixCache) -> None:
        """Count on from another cache's counts since the start."""
        self.num_resets = earlier.num_resets
        pairs: list[tuple[Any, Any, tuple[str, ...]]] = [
            (self._leasing, earlier._leasing, ("made", "queried_tokens", "hit_tokens")),
            (self._capacity, earlier._capacity, ("refused", "evicted_blocks", "evicted_ages")),
            (self._pins, earlier._pins, ("given_way",)),
        ]
        for ours, theirs, names in pairs:
            for name in names:
                setattr(ours, name, getattr(theirs, name))

    # ------------------------------------------------------------------ statistics, events, explanations

    @property
    def stats(self) -> CacheStats:
        """A snapshot of the counters. O(accounts)."""
        self._pins.expire()
        return snapshot(self._capacity, self._leasing, self.num_resets)

    def subscribe(self, listener: Listener, *, replay: bool = True) -> Callable[[], None]:
        """Call `listener` with the blocks that each call stores or removes.

        The changes are those of `radixkv.cache.reporting.events`.

        Args:
            replay: first send it the cached blocks; its errors meanwhile go to the caller.

        Returns:
            A function that ends the subscription, also with what `rebuilt` puts in this cache's place.

        Later errors of a listener are logged; one that fails many times in a row is dropped.
        """
        tree = self._tree
        if self._changes is None:
            self._changes = ChangeLog(tree.block_bytes)
        changes = self._changes
        if replay:
            changes.replay(tree.nodes(), listener)
        tree.changes = changes
        if self.states is not None:
            self.states.changes = changes
        return changes.add(listener)

    def explain(
        self, token_ids: TokenIds, namespace: NamespaceName = "", *, admin: bool = False
    ) -> MissReport:
        """Return why a prompt would miss if it were acquired now; change nothing. O(tokens + path).

        With `admin`, other namespaces (the 256 cached latest) are looked into and may be the reason.
        """
        self._pins.expire()
        data = encode_tokens(token_ids)
        if not data:
            raise InvalidRequestError("a prompt needs at least one token", param="token_ids")
        owner = self._namespaces.obtain(namespace)
        walk = self._lookup.match(data, owner).walk
        num_tokens = len(data) // TOKEN_BYTES
        if not self.enabled:
            return MissReport(Reason.SKIPPED, num_tokens, 0, skipped=CACHE_IS_OFF)
        cached = 0
        if walk is not None:
            cached = min(walk.depth + (walk.partial if self.partial_reuse else 0), num_tokens - 1)
        states_at = None
        if self.states is not None:
            found = None if walk is None else self.states.deepest(walk.node, cached)
            states_at = 0 if found is None else found.end
        due = due_report(self._capacity.ghosts, self._tree, data, owner, walk)
        elsewhere = self._lookup.found_elsewhere(data, owner) if admin else None
        return report_of(due, data, cached, elsewhere, states_at=states_at)

    def check(self) -> None:
        """Assert all invariants of pool, tree, leases and index; errors name the broken one. O(blocks)."""
        self._pins.expire()
        check(self._capacity)
