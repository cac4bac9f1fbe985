# SPDX-License-Identifier: Apache-2.0
"""Capacity: who may have how many blocks, and making room for them by eviction.

Quotas act here. At its ceiling, an account evicts blocks of its own. Blocks of another account are evicted
only down to that account's floor, together with the public blocks above them. Pins give way to a request that
could never run beside them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from radixkv.cache.accounts import BlockAccount, BlockAccounts, Quota
from radixkv.cache.block_identity import IDENTITY_BYTES
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.eviction.policy import overridden
from radixkv.cache.keys import NamespaceKey
from radixkv.cache.node import Namespace, Node
from radixkv.cache.pins import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.reporting.ages import EvictedAges
from radixkv.cache.reporting.ghost import GhostIndex
from radixkv.errors import OutOfBlocks


class Capacity:
    """The pool's blocks, divided among accounts, with the leases, pins and nodes that hold them.

    Attributes:
        refused: how often there were too few blocks.
        evicted_blocks: since the start.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: RadixTree,
        accounts: BlockAccounts,
        publics: Mapping[NamespaceKey, Namespace],
        pins: Pins,
        ghosts: GhostIndex,
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.accounts = accounts  # all of them
        self.pins = pins
        self.leases: dict[int, Any] = {}  # those that live, by number
        self.refused = self.evicted_blocks = 0
        self._last_lease = 0
        self.publics = publics  # the public text, by what computes it
        self.evicted_ages = EvictedAges()  # how old they had become
        self.ghosts = ghosts  # remember what is evicted
        self._on_evict = overridden(tree.policy, "on_evict")
        self._victim = overridden(tree.policy, "victim")
        self._trim_limit = overridden(tree.policy, "trim_limit")

    def add_lease(self, lease: Any) -> int:
        """Register a new lease; return its number. O(1)."""
        self._last_lease = number = self._last_lease + 1
        self.leases[number] = lease
        return number

    # ------------------------------------------------------------------ how much there is

    def room(
        self, account: BlockAccount, node: Node | None = None, depth: int = 0, source: Node | None = None
    ) -> tuple[int, int]:
        """Return how many blocks the pool could give `account` now, and how many its ceiling or pool allows.

        All of `source` is held meanwhile, and `node` with its ancestors up to token `depth`.

        O(log accounts), amortised, and the nodes that were not held; with floors and public prefixes O(public
        nodes * namespaces below them).
        """
        locked = shared = 0  # evictable blocks that holding would protect: the account's own, and public ones
        if source is not None and not source.refs:
            if source.owner.account is account:
                locked = len(source.blocks)
            else:
                shared = len(source.blocks)
        current = source.parent if source is not None and node is source else node
        while current is not None and not current.refs:
            count = len(current.blocks)
            if current is node:
                count = (depth - node.start) // self.tree.block_size
            if current.owner.account is account:
                locked += count
            else:
                shared += count
            current = current.parent
        own = account.blocks - account.protected - locked
        below = (
            self.pool.num_blocks if account.ceiling is None else max(0, account.ceiling - account.used + own)
        )
        if not self.accounts.are_several:
            return self.pool.num_free + own, below
        total = self.pool.num_free + own + self.accounts.reclaimable_beside(account) - shared
        end, until = (node, depth) if source is None else (source, source.end)
        return max(0, total - self._below_floors(self.accounts.kept_back(), account, end, until)), below

    def displaces_younger(self, account: BlockAccount, count: int, age_s: float) -> bool:
        """Return True if `count` blocks for `account` would evict leaves used less than `age_s` seconds ago.

        Leaves of sessions that are over are evicted first, whatever their age, and with a leaf the ancestors
        that it alone keeps. Where nothing can be evicted, nothing is displaced. Changes nothing.

        O(leaves that would be evicted and their ancestors).
        """
        left, victims = count - self.pool.num_free, account
        over = 0 if account.ceiling is None else account.used + count - account.ceiling
        if over <= 0 < left:
            if self.room(account)[0] <= self.pool.num_free:  # requests and floors hold the rest
                return False
            victims = self.accounts.first_for(account)
        left = max(left, over)
        if left <= 0:
            return False
        index, age_of = victims.index, self.tree.use_times.age_s
        done = {id(leaf): leaf for leaf in index.all_done()}
        left -= sum(_alone(leaf) for leaf in done.values())
        for leaf in index:
            if left <= 0:
                return False
            if id(leaf) in done:
                continue
            if age_of(leaf.last_access) < age_s:
                return True
            left -= _alone(leaf)
        return False

    def require(
        self,
        needed: int,
        owner: Namespace,
        total: int,
        node: Node,
        depth: int,
        source: Node | None = None,
        lease: Any = None,
    ) -> None:
        """Make sure that `needed` blocks can be had; pins give way only to requests that could never fit.

        Args:
            total: blocks of the whole request.
            node, depth, source: the part of them in the tree, as of `room`.
            lease: the growing lease; None: a new one.

        Raises:
            OutOfBlocks: they can't; nothing was changed.
        """
        account = owner.account

        def room() -> tuple[int, int]:
            return self.room(account, node, depth, source)

        if needed <= min(room()) or self._pins_give_way(needed, account, total, node, depth, room, lease):
            return
        available = min(room())
        self.refused += 1
        for root in (self.tree.roots.get(owner), self.tree.roots.get(owner.public)):
            self.tree.drop_empty_root(root)
        quota = "" if account.ceiling is None else f" within the quota of {account.ceiling}"
        raise OutOfBlocks(
            f"{needed} blocks are needed, {available} of {self.pool.num_blocks} are free or evictable{quota}",
            needed=needed,
            available=available,
        )

    def _pins_give_way(
        self,
        needed: int,
        account: BlockAccount,
        total: int,
        node: Node,
        depth: int,
        room: Callable[[], tuple[int, int]],
        lease: Any,
    ) -> bool:
        """End pins if nothing else can ever make room for the request; False: nothing was changed.

        That is so where the account is at its ceiling and has no other lease, or where there is no other
        lease at all.
        """
        if not len(self.pins) or (lease is not None and lease.has_pending_copies):
            return False
        if account.ceiling is not None:
            last: Node | None = node
            while last is not None and last.owner.account is account:
                last = last.parent
            public = 0 if last is None else min(last.end, depth) // self.tree.block_size
            if total - public > account.ceiling:
                return False

        def is_enough() -> bool:
            return needed <= min(room())

        if account.ceiling is not None and needed > room()[1]:
            others = any(
                other is not lease and other.owner.account is account for other in self.leases.values()
            )
            if not others and self.pins.give_way(is_enough, account):
                return True
        if len(self.leases) > (lease is not None):  # it is not alone: waiting may help
            return False
        fits_without_pins = total <= self.pool.num_blocks - self._kept_by_floors(account)
        return fits_without_pins and self.pins.give_way(is_enough)

    def _below_floors(
        self, kept_back: set[BlockAccount], account: BlockAccount, end: Node | None, depth: int
    ) -> int:
        """Count the unprotected public blocks that stay because others' floors keep what hangs below them."""
        if not kept_back:
            return 0
        path = set()
        while end is not None:
            path.add(end)
            end = end.parent
        blocks = 0
        for node in self._public_nodes_above(lambda other: other in kept_back and other is not account):
            if not node.refs:
                beyond = node.end - depth if node in path else node.end - node.start
                blocks += max(0, beyond) // self.tree.block_size
        return blocks

    def _kept_by_floors(self, account: BlockAccount) -> int:
        """Count the blocks that `account` can never get: others' floors, and the public blocks above them."""
        others = [g for g in self.accounts if g is not account and g.floor]
        public = self._public_nodes_above(lambda other: other is not account and other.floor > 0)
        return sum(len(node.blocks) for node in public) + sum(min(g.floor, g.used) for g in others)

    def _public_nodes_above(self, is_meant: Callable[[BlockAccount], bool]) -> list[Node]:
        """Return the public nodes above nodes of certain accounts. O(public nodes * namespaces below)."""
        roots = self.tree.roots
        nodes = [roots[public] for public in self.publics.values() if public in roots]
        for node in nodes:  # parents first
            nodes.extend(node.children or ())
        above: set[Node] = set()
        for node in reversed(nodes):
            if node in above or any(is_meant(owner.account) for owner in node.namespace_children or ()):
                above.add(node)
                if node.parent is not None:
                    above.add(node.parent)
        return [node for node in nodes if node in above]

    # ------------------------------------------------------------------ taking and giving back

    def allocate(self, count: int, account: BlockAccount) -> array[int]:
        """Return `count` free blocks, evicting as needed; the caller has made sure that there are enough."""
        if count > self.pool.num_free or account.ceiling is not None:
            self._make_room(count, account)
        account.count_used(count)
        return self.pool.allocate(count)

    def free_private(self, blocks: array[int], account: BlockAccount) -> None:
        """Drop one holder of each private block; those without another are free."""
        account.count_used(-self.pool.drop_private(blocks))

    def free_tree_blocks(self, blocks: array[int], account: BlockAccount) -> None:
        """Free blocks that have left the tree."""
        account.count_used(-self.pool.free(blocks))

    # ------------------------------------------------------------------ what leaves the tree without a ghost

    def unprotect(self, node: Node) -> None:
        """Drop a reference to `node`; a partial block that a sibling covers goes with its last one.

        It is *covered* when a sibling begins with all of its tokens: unheld, it is not worth keeping then.
        """
        self.tree.unprotect(node)
        if not node.refs:
            self._forget_if_covered(node)

    def release(self, node: Node) -> None:
        """Drop a lease that ended at `node`; otherwise as `unprotect`."""
        self.tree.release(node)
        if not node.refs and len(node.key) < self.tree.block_bytes:
            self._forget_if_covered(node)

    def _forget_if_covered(self, node: Node) -> None:
        if 0 < len(node.key) < self.tree.block_bytes and self.tree.siblings(node).is_covered(node):
            self._forget(node, 1)

    def drop_covered(self, node: Node) -> None:
        """Free an unheld partial block whose tokens `node` begins with, now that it holds them, too."""
        unheld = self.tree.siblings(node).unheld_beginning(node)
        if unheld is not None:
            self._forget(unheld, 1)

    def _forget(self, leaf: Node, num_blocks: int) -> None:
        account = leaf.owner.account
        self.free_tree_blocks(self.tree.trim(leaf, num_blocks), account)

    def discard_from(self, node: Node, cut: int, unused_since: int | None = None) -> None:
        """Forget the tokens from `cut` on along the path that ends at `node`, unless something needs them.

        Leases, pins, descendants. Of a block in which pins end, only the pinned part is needed.

        Args:
            unused_since: blocks used since this value of the cache's counter are needed, too.
        """
        size = self.tree.block_size
        while node.parent is not None and not node.refs and node.is_leaf and node.end > cut:
            if unused_since is not None and node.last_access > unused_since:
                return
            parent = node.parent
            keep = max(0, -(-(cut - node.start) // size))
            if keep < len(node.blocks):
                self._forget(node, len(node.blocks) - keep)
            if keep:
                if node.end > cut and not self.tree.truncate_tail(node, cut):
                    self._forget(node, 1)
                return
            node = parent
        if node.is_leaf and node.refs == node.pins_here > 0 and cut < node.end < cut + size:
            is_used = unused_since is not None and node.last_access > unused_since
            if not is_used and all(pin.num_tokens <= cut for pin in self.pins if pin.node is node):
                self.tree.truncate_tail(node, cut)

    # ------------------------------------------------------------------ making room

    def transfer(self, count: int, source: BlockAccount, target: BlockAccount) -> None:
        """Count blocks for another account from now on. O(1)."""
        source.count_used(-count)
        target.count_used(count)

    def forget_tree(self, held: Iterable[BlockAccount]) -> int:
        """At a reset, keep one account for each block of the tree; return the number of other holds."""
        forgotten = sum(account.forget() for account in self.accounts)
        for account in held:
            account.count_used(1)
            forgotten -= 1
        return forgotten

    def _make_room(self, count: int, account: BlockAccount) -> None:
        if account.ceiling is not None:
            over = account.used + count - account.ceiling
            while over > 0:
                over -= self._evict_from(account, over, "quota")
        while self.pool.num_free < count:
            victim_account = self.accounts.first_for(account)
            limit = count - self.pool.num_free
            if victim_account is not account:
                limit = min(limit, max(1, victim_account.reclaimable))
            self._evict_from(victim_account, limit, "capacity")
        self.tree.end_changes()

    def _evict_from(self, account: BlockAccount, limit: int, by: str) -> int:
        """Trim the policy's choice by at most `limit` blocks; returns how many."""
        index = account.index
        leaf: Any = index.done()  # a node
        is_done = leaf is not None
        if not is_done:
            leaf = index.first() if self._victim is None else self._victim(index)
        assert not leaf.refs, f"{leaf!r} is held and must not be evicted"
        count = min(limit, len(leaf.blocks))
        if self._trim_limit is not None and not is_done:
            count = max(1, min(count, self._trim_limit(leaf)))
        if self._on_evict is not None:
            self._on_evict(leaf, count)
        self.evicted_ages.add(self.tree.use_times.age_s(leaf.last_access), count)
        if self.ghosts.capacity:
            self._remember(leaf, count, by)
        account.count_used(-self.pool.free(self.tree.trim(leaf, count)))
        self.evicted_blocks += count
        return count

    def _remember(self, leaf: Node, count: int, by: str) -> None:
        """Remember the last blocks of a leaf, which are about to be evicted. O(blocks)."""
        keep, partial = len(leaf.blocks) - count, None
        tail = len(leaf.key) % self.tree.block_bytes
        if tail:
            partial = self.tree.identity_before(leaf, len(leaf.blocks) - 1), bytes(leaf.key[-tail:])
        reason = "expired" if leaf.lapsed else "evicted"
        self.ghosts.remember(leaf.ids[keep * IDENTITY_BYTES :], partial, reason, by)

    def evict(self, count: int, by: str) -> int:
        """Evict exactly min(count, evictable) blocks, floors notwithstanding; returns how many."""
        freed = 0
        while freed < count:
            account = self.accounts.first()
            if account is None:
                break
            freed += self._evict_from(account, count - freed, by)
        self.tree.end_changes()
        return freed

    def keep_ceilings(self) -> None:
        """Evict cached blocks above ceilings that were lowered. O(accounts), and as `evict`."""
        for account in self.accounts:
            while account.ceiling is not None and account.used > account.ceiling and len(account.index):
                self._evict_from(account, account.used - account.ceiling, "quota")
            account.bound(Quota(account.floor, account.ceiling))
        self.tree.end_changes()


def _alone(leaf: Any) -> int:
    """Count the blocks of a leaf and of the ancestors that would be leaves without it. O(ancestors)."""
    count, node = len(leaf.blocks), leaf
    while (parent := node.parent) is not None and not parent.refs and _has_one_child(parent):
        count, node = count + len(parent.blocks), parent
    return count


def _has_one_child(node: Node) -> bool:
    return node.namespace_children is None and node.children is not None and len(node.children) == 1
