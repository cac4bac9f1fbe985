# SPDX-License-Identifier: Apache-2.0
"""Leasing: the decision on blocks that a new lease holds, copies and allocates.

Decide, then act: nothing changes before it is certain that the blocks can be had, so nothing has changed when
`OutOfBlocks` is raised.

                    found
    |-- whole blocks --|- partial -|
    [b0] [b1] ... [bn-1] [bn . . . ]        bn: copied from, or taken over if it is not held
    |------ held ------|---- new blocks ... |
"""

from __future__ import annotations

from radixkv.cache.capacity import Capacity
from radixkv.cache.eviction.policy import overridden
from radixkv.cache.keys import TOKEN_BYTES, NamespaceName
from radixkv.cache.lease import Lease
from radixkv.cache.node import Namespace, Node
from radixkv.cache.radix_tree import Walk
from radixkv.cache.reporting.divergence import DivergenceObserver
from radixkv.cache.reporting.explain import DueReport, due_report, new_due
from radixkv.cache.states.checkpoints import Checkpoints
from radixkv.cache.states.lease_windows import begin


class Leasing:
    """Maker of the leases of one cache; counts the tokens that they found."""

    def __init__(
        self,
        capacity: Capacity,
        observer: DivergenceObserver | None,
        explain: bool,
        enabled: bool,
        partial_reuse: bool,
    ) -> None:
        self._capacity = capacity
        self._pins = capacity.pins
        self._ghosts = capacity.ghosts
        self._observer = observer
        self._explain = explain  # whether leases carry reports
        self._enabled = enabled  # False: what leases commit is not kept
        self._partial_reuse = partial_reuse  # whether parts of blocks are shared
        self._on_acquire = overridden(capacity.tree.policy, "on_acquire")
        self.made = 0  # leases so far
        self.queried_tokens = 0  # of their prompts
        self.hit_tokens = 0  # those of them found cached

    def make(
        self, data: bytes, namespace: NamespaceName, owner: Namespace, walk: Walk, skip: str | None
    ) -> Lease:
        """Plan what to hold, copy and allocate; make sure that there is room; only then change anything.

        `walk` is the result of the prompt's lookup, `skip` the reason for its lack. OutOfBlocks: nothing was
        changed.
        """
        capacity = self._capacity
        tree = capacity.tree
        size = tree.block_size
        node, depth, partial, source, _, _ = walk
        num_tokens = len(data) // TOKEN_BYTES
        found = depth + partial
        cached = found if found < num_tokens else num_tokens - 1
        takes_over = False  # the partial block itself is extended: nobody else holds it
        slots = 0  # tokens of the partial block to copy
        if source is not None:
            if not self._partial_reuse:
                source, cached = None, min(depth, num_tokens - 1)
            elif not source.holders and source.end == found:
                takes_over = True
            else:
                slots = cached - depth
                if slots <= 0:
                    source = None
        total = -(-num_tokens // size)
        held_tokens = found if takes_over else depth
        needed = total - -(-held_tokens // size)
        account = owner.account
        if needed > capacity.pool.num_free or account.ceiling is not None:
            if slots and needed > min(capacity.room(account, node, depth, source)):
                source, slots, cached = None, 0, depth
            capacity.require(needed, owner, total, node, depth, source)  # copied from or taken over
        due: DueReport | None = None
        if self._explain:  # before anything is evicted or split
            if skip is None and self._ghosts.count:
                due = due_report(self._ghosts, tree, data, owner, walk)
            else:
                due = new_due((walk, num_tokens, None, 0.0, skip))
        if self._observer is not None and found and skip is None and found < num_tokens - 1 and walk.onward:
            self._observer.observe(data, walk, owner)
        if takes_over:
            assert source is not None
            held = source
        else:
            ends = node.start + len(node.blocks) * size == depth
            held = node if ends else self._ending_at(node, depth)
        public = owner.declared.length_in(data) // TOKEN_BYTES if owner.declared.prefixes else 0
        lease = Lease(capacity, namespace, owner, data, held, held_tokens, cached, public, self._enabled)
        lease.due = due
        if tree.states is not None:
            self._resume(lease, tree.states, depth)
        self._grant(lease, needed, source if slots else None, slots)
        return lease

    @staticmethod
    def _resume(lease: Lease, keeper: Checkpoints, depth: int) -> None:
        """Give a lease the deepest state in its `depth` cached tokens, and list the states to keep of it.

        These are the last grid points of the prompt, of its public prefix, and of cached tokens that reach
        beyond the state: where prompts have parted for the second time. O(path).
        """
        checkpoint = keeper.deepest(lease.node, lease.num_cached_tokens)
        lease.states = states = begin(keeper, checkpoint)
        if checkpoint is not None:
            keeper.hit(checkpoint, bytes(lease.tokens))
        lease.resume_at = states.base.position
        states.want_ends((lease.num_tokens, lease.public_tokens))
        states.want((min(depth, lease.num_cached_tokens),))

    def _ending_at(self, node: Node, depth: int) -> Node:
        """Return the node that ends where whole blocks up to `depth` tokens do: `node`, or its upper part."""
        tree = self._capacity.tree
        inside = (depth - node.start) // tree.block_size
        return node if inside == len(node.blocks) else tree.split(node, inside)

    def _grant(self, lease: Lease, needed: int, source: Node | None, slots: int) -> None:
        """Protect the prefix and the source of a copy, give the lease its blocks, and count it."""
        tree, node = self._capacity.tree, lease.node
        tree.hold(node)
        if source is not None:
            if needed > self._capacity.pool.num_free and len(source.blocks) > 1:
                source = tree.split(source, 1)  # what follows the block to be copied may be evicted for this
            tree.protect(source)
        tree.use(node)
        lease.used_at = node.last_access
        if tree.policy.tracks_path:
            tree.hit_path(node)
        else:
            node.hits += 1
        if self._pins.by_key or self._pins.any_lapsed:
            self._pins.refresh(node)
        self._fill(lease, needed)
        if source is not None:  # the prefix was cut just before the block
            first_new = lease.num_blocks - needed
            lease.new_copy(source.blocks[0], lease.blocks(first_new, first_new + 1)[0], slots, source)
        self.made += 1
        self.queried_tokens += lease.num_tokens
        self.hit_tokens += lease.resume_at
        if self._on_acquire is not None:
            self._on_acquire(lease.num_tokens, lease.num_cached_tokens)

    def _fill(self, lease: Lease, needed: int) -> None:
        """Give a lease the blocks of its path, which it holds, and `needed` new ones."""
        table = lease.tree.path_blocks(lease.node)
        if needed:
            table += self._capacity.allocate(needed, lease.owner.account)
        lease.fill(table)
        if self._ghosts.leaving:
            self._ghosts.free_some()

    def hold_blocks(
        self, data: bytes, num_tokens: int, namespace: NamespaceName, owner: Namespace, walk: Walk
    ) -> Lease:
        """Lease the whole blocks of a text up to `num_tokens`, to move them; those after `walk` are new.

        Nothing is counted or reported: this is no use of the cache. OutOfBlocks: nothing was changed.
        """
        capacity, account = self._capacity, owner.account
        tree = capacity.tree
        node, depth = walk.node, walk.depth
        total = num_tokens // tree.block_size
        needed = total - depth // tree.block_size
        if needed > capacity.pool.num_free or account.ceiling is not None:
            capacity.require(needed, owner, total, node, depth)
        node = self._ending_at(node, depth)
        public = min(owner.declared.length_in(data) // TOKEN_BYTES, num_tokens)
        data = data[: num_tokens * TOKEN_BYTES]
        lease = Lease(capacity, namespace, owner, data, node, depth, depth, public, self._enabled)
        tree.hold(node)
        self._fill(lease, needed)
        return lease
