# SPDX-License-Identifier: Apache-2.0
"""A model too simple to be wrong, driven side by side with the real PrefixCache.

The model holds no tree. It keeps, for each physical slot, *what* the K/V in it were computed from (the whole
prefix up to that token, with its namespace), and for each lease the plain list of its tokens. After every
operation `verify` demands:

- each committed position of each live lease reads a slot whose content is exactly that lease's prefix;
- whatever the cache claims to match was committed by somebody in that namespace before;
- what live leases have committed (and may share) is found, to the last token;
- free + cached + held = total, and `check()` finds no broken invariant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from waiting import Clock

from radixkv import OutOfBlocks, PrefixCache
from radixkv.cache.accounts import QuotaUsage
from radixkv.cache.keys import NamespaceKey, NamespaceName, decode_tokens
from radixkv.cache.prefix_cache import Lease, Match
from radixkv.observe.residency import Residency

PUBLIC = ("(public)",)
NO_QUOTA = QuotaUsage((), 0, None, 0, 0)

Prefix = tuple[NamespaceName, tuple[int, ...]]


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(eq=False)
class Run:
    """What the model knows of one live lease."""

    lease: Lease
    namespace: NamespaceName
    tokens: list[int]
    committed: int
    public: int = 0  # leading tokens that were public when it was acquired
    promised: int = 0  # tokens that commit() made shareable
    shares: bool = True
    waits: bool = False  # others shared its blocks when it committed; it tries again at its next commit
    prefixes: list[int] = field(default_factory=list)  # identity of the prefix up to each token


class ModelledCache:
    """A PrefixCache, the model, and operations that run both and compare."""

    def __init__(self, num_blocks: int = 24, block_size: int = 4, **options: object) -> None:
        self.clock = Clock()
        self.cache = PrefixCache(num_blocks, block_size, clock=self.clock, **options)  # type: ignore[arg-type]
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.slots: dict[tuple[int, int], int] = {}
        self.runs: list[Run] = []
        self.ever_committed: dict[NamespaceName, set[int]] = {}
        self.matches: list[tuple[Match, list[int], NamespaceName]] = []
        self.pins: dict[Prefix, tuple[int, float]] = {}  # tokens pinned, time of expiry
        self.check_every = 1
        self.residency: Residency | None = None
        self.public: list[list[int]] = []  # prefixes whose K/V all namespaces share
        self._steps = 0

    def follow_events(self) -> None:
        """Rebuild residency from the stream from now on, and compare it in every `verify`."""
        self.residency = Residency()
        self.cache.subscribe(self.residency)

    def _verify_events(self) -> None:
        if self.residency is None:
            return
        tree = self.cache.tree.index
        size = self.block_size
        expected = set()
        for node in tree.nodes():
            tokens = decode_tokens(b"".join(n.key for n in tree.path(node)))
            for end in range(node.start + size, node.end + 1, size):
                expected.add((node.owner.key, tuple(tokens[:end])))
        assert self.residency.prefixes() == expected, "the follower's residency differs from the tree's"

    # ------------------------------------------------------------------ helpers

    def _public_length(self, tokens: list[int]) -> int:
        return max((len(p) for p in self.public if p and tokens[: len(p)] == p), default=0)

    def identities_of(self, namespace: NamespaceName, tokens: list[int]) -> list[int]:
        """The identities of a prompt; those of its public part are the same in every namespace."""
        length = self._public_length(tokens)
        shared = self.identities(PUBLIC, tokens[:length])
        return shared + self.identities(namespace, tokens)[length:]

    @staticmethod
    def identities(
        namespace: NamespaceName, tokens: list[int], start: int = 0, before: int | None = None
    ) -> list[int]:
        """One number per token that stands for the whole prefix up to it."""
        value = hash(("namespace", namespace)) if before is None else before
        out = []
        for token in tokens[start:]:
            value = hash((value, token))
            out.append(value)
        return out

    def _copies(self, run: Run) -> None:
        for source, target, slots in run.lease.take_copies():
            for slot in range(slots):
                assert (source, slot) in self.slots, "a copy reads a slot that was never written"
                self.slots[target, slot] = self.slots[source, slot]

    def _position(self, run: Run, position: int) -> tuple[int, int]:
        return int(run.lease.block_table[position // self.block_size]), position % self.block_size

    # ------------------------------------------------------------------ operations

    def match(self, tokens: list[int], namespace: NamespaceName) -> int:
        match = self.cache.match(tokens, namespace)
        known = self.ever_committed.get(namespace, set())
        for identity in self.identities_of(namespace, tokens)[: match.num_tokens]:
            assert identity in known or identity in self.ever_committed.get(PUBLIC, ()), (
                "a match was never committed in this namespace"
            )
        if len(self.matches) < 8:
            self.matches.append((match, list(tokens), namespace))
        return match.num_tokens

    def verify_matches(self) -> None:
        kept = []
        for match, tokens, namespace in self.matches:
            fresh = self.cache.match(tokens, namespace).num_tokens
            if self.cache.is_current(match):
                assert match.num_tokens == fresh, f"{match!r} is called current; a new one has {fresh}"
                kept.append((match, tokens, namespace))
        self.matches = kept

    def publish(self, tokens: list[int]) -> None:
        length = self.cache.publish(tokens)
        assert length == len(tokens) // self.block_size * self.block_size
        self.public.append(tokens[:length])

    def acquire(
        self, tokens: list[int], namespace: NamespaceName, use_match: bool = False, skip: bool = False
    ) -> Run | None:
        cache = self.cache
        match = cache.match(tokens, namespace)
        before = self._snapshot()
        needed = -(-len(tokens) // self.block_size)
        try:
            lease = cache.acquire(
                tokens, namespace, match=match if use_match else None, skip="asked for" if skip else None
            )
        except OutOfBlocks as error:
            assert error.needed > error.available, "there was room"  # noqa: PT017
            assert self._snapshot() == before, "a failed acquire changed something"
            assert cache.match(tokens, namespace).num_tokens == match.num_tokens
            self._recount(error, len(tokens), namespace, None if skip else match)
            return None
        assert lease.num_cached_tokens <= min(match.num_tokens, len(tokens) - 1)
        if skip:
            assert lease.num_cached_tokens == 0
            assert lease.report.reason == "skipped"
        elif lease.num_cached_tokens < min(match.num_tokens, len(tokens) - 1):
            assert lease.report is not None
            assert lease.report.reason in ("partial_block", "skipped"), lease.report
            assert min(match.num_tokens, len(tokens) - 1) - lease.num_cached_tokens < self.block_size
        assert len(lease.block_table) == needed
        run = Run(lease, namespace, list(tokens), lease.num_cached_tokens)
        run.prefixes = self.identities_of(namespace, tokens)
        run.public = self._public_length(tokens)
        self.runs.append(run)
        self._copies_are_sound(run)
        return run

    def _recount(
        self, error: OutOfBlocks, num_tokens: int, namespace: NamespaceName, match: Match | None
    ) -> None:
        """What a failed acquire says was needed and available, counted again the slow way."""
        walk = None if match is None else match.walk
        depth, held = 0, 0
        path: dict[object, int] = {}  # node -> its leading blocks that the request would hold
        if walk is not None:
            depth = held = walk.depth
            node = walk.node
            while node.parent is not None:
                path[node] = min(len(node.blocks), (depth - node.start) // self.block_size)
                node = node.parent
            source = walk.source
            if (
                source is not None
                and self.cache.partial_reuse
                and not source.holders
                and source.end == match.num_tokens
            ):
                held = source.end  # taken over and extended
                path[source] = len(source.blocks)
        needed = -(-num_tokens // self.block_size) - -(-held // self.block_size)
        assert error.needed == needed, f"{error.needed} blocks were said to be needed, {needed} are"
        self._recount_room(error.available, namespace, path)

    def _recount_room(self, available: int, namespace: NamespaceName, path: dict[object, int]) -> None:
        """Evict in thought, block by block, for as long as quotas and what is held allow."""
        cache = self.cache
        quotas = {quota.namespace: quota for quota in cache.quota_usage()}

        def quota_of(key: NamespaceKey) -> QuotaUsage:
            return quotas.get(key) or quotas.get(key[:1], NO_QUOTA)

        own = quota_of(cache.namespace_key(namespace))
        left = {node: len(node.blocks) for node in cache.tree.index.nodes()}
        children = Counter(node.parent for node in left)
        used = {quota: quota.used_blocks for quota in quotas.values()}
        own_evicted = evicted = 0
        todo = [node for node in left if not children[node]]
        while True:
            before = evicted
            for node in list(todo):
                quota = quota_of(node.owner.key)
                if node.refs:
                    continue
                while left[node] > path.get(node, 0) and (
                    quota in (own, NO_QUOTA) or used[quota] > quota.floor
                ):
                    left[node] -= 1
                    if quota is not NO_QUOTA:
                        used[quota] -= 1
                    evicted += 1
                    own_evicted += quota is own
                if not left[node]:
                    todo.remove(node)
                    children[node.parent] -= 1
                    if not children[node.parent] and node.parent in left:
                        todo.append(node.parent)
            if evicted == before:
                break
        room = cache.stats.free_blocks + evicted
        if own.ceiling is not None:
            room = max(0, min(room, own.ceiling - own.used_blocks + own_evicted))
        if self.public and any(quota.floor for quota in quotas.values()):
            assert available <= room, f"{available} blocks were called available, {room} are"
        else:
            assert available == room, f"{available} blocks were called available, {room} are"

    def _copies_are_sound(self, run: Run) -> None:
        for source, _, slots in run.lease.copies:
            for slot in range(slots):
                assert (source, slot) in self.slots, "a copy reads a slot that was never written"

    def append(self, run: Run, tokens: list[int]) -> bool:
        before = self._snapshot()
        table = run.lease.block_table.tolist()
        try:
            run.lease.append(tokens)
        except OutOfBlocks as error:
            assert error.needed > error.available  # noqa: PT017
            assert self._snapshot() == before
            missing = -(-(len(run.tokens) + len(tokens)) // self.block_size) - len(table)
            may_copy = len(run.tokens) % self.block_size > 0
            assert missing <= error.needed <= missing + may_copy  # noqa: PT017
            self._recount_room(error.available, run.namespace, {})
            assert run.lease.block_table.tolist() == table, "a failed append changed something"
            return False
        run.tokens += tokens
        run.prefixes += self.identities(run.namespace, run.tokens)[len(run.prefixes) :]
        return True

    def truncate(self, run: Run, num_tokens: int) -> None:
        room = self.cache.stats.free_blocks + self.cache.stats.cached_blocks
        run.lease.truncate(num_tokens)
        del run.tokens[num_tokens:], run.prefixes[num_tokens:]
        assert len(run.lease.block_table) == -(-num_tokens // self.block_size)
        assert self.cache.stats.free_blocks + self.cache.stats.cached_blocks >= room

    def commit(self, run: Run, num_tokens: int) -> None:
        before = run.committed
        self._copies(run)
        redundant = run.lease.commit(num_tokens)
        if num_tokens <= before:
            assert redundant == 0
            return
        assert 0 <= redundant <= num_tokens - before
        table = set(run.lease.block_table.tolist())
        assert len(table) == len(run.lease.block_table)
        for position in range(before + redundant, num_tokens):
            slot = self._position(run, position)
            # A block that others read as well must not get anything else at this place.
            for other in self.runs:
                if (
                    other is not run
                    and position < other.committed
                    and self._position(other, position) == slot
                ):
                    assert self.slots[slot] == run.prefixes[position], "a write into a block shared by others"
            self.slots[slot] = run.prefixes[position]
        run.committed = run.promised = num_tokens
        run.waits = False
        if run.shares and self.cache.enabled:
            for owner in (run.namespace, PUBLIC):
                self.ever_committed.setdefault(owner, set()).update(run.prefixes[:num_tokens])

    def fork(self, run: Run) -> Run:
        held = self.cache.stats.free_blocks
        child = run.lease.fork()
        assert self.cache.stats.free_blocks == held, "a fork took blocks"
        twin = Run(
            child,
            run.namespace,
            list(run.tokens),
            run.committed,
            public=run.public,
            promised=run.promised,
            shares=run.shares,
            waits=run.waits,
            prefixes=list(run.prefixes),
        )
        self.runs.append(twin)
        return twin

    def release(self, run: Run, discard: bool = False, keep: int | None = None, done: bool = False) -> None:
        self.runs.remove(run)
        run.lease.release(discard=discard, keep=keep, done=done)

    def rollback(self, run: Run, num_tokens: int) -> None:
        """A step failed: as the engine does, release all that had shared what is rolled back."""
        self._copies(run)
        run.lease.rollback(num_tokens)
        run.committed = min(run.committed, num_tokens)
        run.promised = min(run.promised, num_tokens)
        for other in list(self.runs):
            if not other.lease.shares and other.shares:
                other.shares = False

    def evict(self, count: int) -> None:
        evictable = self.cache.stats.cached_blocks
        free = self.cache.stats.free_blocks
        assert self.cache.evict(count) == min(count, evictable)
        assert self.cache.stats.free_blocks >= free + min(count, evictable)

    def pin(self, tokens: list[int], namespace: NamespaceName, ttl: float | None) -> None:
        pin = self.cache.pin(tokens, namespace, ttl=ttl)
        pinned = 0 if pin is None else pin.num_tokens
        assert pinned <= self.cache.match(tokens, namespace).num_tokens
        key = (namespace, tuple(tokens))
        self.pins.pop(key, None)
        if pinned:
            self.pins[key] = (pinned, self.clock.now + (ttl if ttl is not None else float("inf")))

    def unpin(self, tokens: list[int], namespace: NamespaceName) -> None:
        self.pins.pop((namespace, tuple(tokens)), None)
        self.cache.unpin(tokens, namespace)

    def reset(self) -> None:
        self.cache.reset()
        for run in self.runs:
            run.shares = False
        self.pins.clear()
        self.ever_committed.clear()
        assert self.cache.stats.cached_blocks == 0

    def discard(self, tokens: list[int], namespace: NamespaceName, keep: int) -> int:
        """Forget tokens; what other prompts share of the first `keep` stays. Returns how many went."""
        cache = self.cache
        before = cache.match(tokens, namespace).num_tokens
        bystanders = [
            (prompt, other, cache.match(prompt, other).num_tokens)
            for prompt, other in [(run.tokens, run.namespace) for run in self.runs]
        ]
        cache.discard(tokens, namespace, keep=keep)
        after = cache.match(tokens, namespace).num_tokens
        kept = keep if cache.partial_reuse else keep // self.block_size * self.block_size
        assert min(before, kept) <= after <= before, f"of {before} tokens {keep} were to stay, {after} did"
        if not self.runs and not cache.stats.num_pins and cache.stats.num_nodes == 1:
            assert after <= keep, "a lone cached run was not forgotten"
        for prompt, other, found in bystanders:
            if _common(prompt, tokens) <= kept:
                assert cache.match(prompt, other).num_tokens == found, "discard forgot somebody else's tokens"
        return before - after

    def rebuilt(self, damage: Callable[[PrefixCache], None] | None = None) -> None:
        """Replace the cache as an engine does that found it broken; `damage` breaks it first."""
        old = self.cache
        if damage is not None:
            damage(old)
            try:
                old.check()
            except AssertionError:
                pass
            else:
                raise AssertionError("check() did not see the damage")
        self.cache = fresh = old.rebuilt()
        assert fresh is not old
        assert fresh.stats.free_blocks == fresh.stats.total_blocks == self.num_blocks
        assert (fresh.block_size, fresh.policy.name) == (old.block_size, old.policy.name)
        assert (fresh.enabled, fresh.partial_reuse) == (old.enabled, old.partial_reuse)
        assert fresh.pin_budget == old.pin_budget
        assert fresh.declared == old.declared
        self.runs.clear()  # the old cache's leases are gone with it
        self.pins.clear()
        self.matches.clear()
        self.slots.clear()
        self.ever_committed.clear()

    # ------------------------------------------------------------------ verdict

    def _snapshot(self) -> tuple[object, ...]:
        s = self.cache.stats
        return s.free_blocks, s.cached_blocks, s.held_blocks, s.num_nodes, s.num_leases

    def verify(self) -> None:
        self._steps += 1
        stats = self.cache.stats
        assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == stats.total_blocks
        assert stats.num_leases == len(self.runs)
        for run in self.runs:
            lease = run.lease
            assert lease.num_tokens == len(run.tokens)
            assert lease.num_committed == run.committed
            pending = {target: slots for _, target, slots in lease.copies}
            table = lease.block_table.tolist()
            for position in range(run.committed):
                block, slot = table[position // self.block_size], position % self.block_size
                if slot < pending.get(block, 0):
                    continue
                assert self.slots.get((block, slot)) == run.prefixes[position], (
                    f"{lease!r} reads wrong K/V at {position}"
                )
        if self._steps % self.check_every:
            return
        self.cache.check()
        self._verify_events()
        held = {block for run in self.runs for block in run.lease.block_table.tolist()}
        assert len(held) <= stats.held_blocks
        if not self.runs and not stats.pinned_blocks:
            assert stats.held_blocks == 0, "blocks are held although nobody holds any"
        for run in self.runs:
            run.waits = run.waits or self._waits_for_others(run)
            if run.shares and self.cache.enabled and not run.waits:
                found = self.cache.match(run.tokens[: run.promised], run.namespace).num_tokens
                assert found == run.promised, f"{run.lease!r} committed {run.promised}, {found} are found"
        self.verify_matches()

    def _waits_for_others(self, run: Run) -> bool:
        """Whether blocks of this lease that left the tree are still held by, or to be copied for, others."""
        if run.lease.copies or run.public != self._public_length(run.tokens[: run.promised]):
            return True
        blocks = set(run.lease.block_table.tolist())
        return any(
            (not r.shares and blocks & set(r.lease.block_table.tolist()))
            or (r.lease.pending is not None and blocks & set(r.lease.pending.blocks))
            for r in self.runs
        )

    def drain(self) -> None:
        """Release all, evict all: every block must come back."""
        for run in list(self.runs):
            self.release(run)
        for namespace, tokens in list(self.pins):
            self.unpin(list(tokens), namespace)
        self.cache.evict(self.num_blocks)
        assert self.cache.stats.free_blocks == self.num_blocks, "blocks were leaked"
        assert self.cache.stats.num_nodes == 0
        self.cache.check()
