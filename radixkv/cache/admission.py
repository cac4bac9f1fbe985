"""Admission: what a new lease holds, copies and allocates; whether there is room; and granting it.

Decide, then act: nothing changes before it is certain that the blocks can be had.

                    found
    |-- whole blocks --|- partial -|
    [b0] [b1] ... [bn-1] [bn . . . ]        bn: copied from, or taken over if nobody holds it
    |------ held ------|---- new blocks ... |
"""

from __future__ import annotations

from radixkv.cache.eviction.policy import overridden
from radixkv.cache.insight.explain import DueReport
from radixkv.cache.keys import TOKEN_BYTES, NamespaceName
from radixkv.cache.lease import Lease
from radixkv.cache.node import Namespace, Node
from radixkv.cache.state import CacheState
from radixkv.cache.tree_nodes import Walk


class Admission:
    """Makes the leases of one cache.

    Attributes:
        admitted: leases made.
        queried_tokens: tokens of their prompts.
        hit_tokens: those of them found cached.
    """

    __slots__ = ("_on_acquire", "_state", "admitted", "hit_tokens", "queried_tokens")

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._on_acquire = overridden(state.tree.policy, "on_acquire")
        self.admitted = self.queried_tokens = self.hit_tokens = 0

    def admit(
        self, data: bytes, namespace: NamespaceName, space: Namespace, walk: Walk, skip: str | None
    ) -> Lease:
        """Plan what to hold, copy and allocate; make sure that there is room; only then change anything.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        state = self._state
        tree = state.tree
        size = tree.block_size
        node, depth, partial, source, _, _ = walk
        num_tokens = len(data) // TOKEN_BYTES
        found = depth + partial
        cached = found if found < num_tokens else num_tokens - 1
        takes_over = False  # the partial block itself is extended: nobody else holds it
        slots = 0  # tokens of the partial block to copy
        if source is not None:
            if not state.partial_reuse:
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
        group = space.group
        if needed > state.capacity.pool.num_free or group.ceiling is not None:
            room = state.room
            if slots and needed > min(room.beside(group, walk, source)):
                source, slots, cached = None, 0, depth
            whole = source  # held to its end, because it is copied from or taken over
            room.check(needed, space, total, (node, depth), lambda: room.beside(group, walk, whole))
        due: DueReport | None = None
        if state.explains:  # before anything is evicted or split
            if skip is not None:
                due = DueReport(walk, num_tokens, None, 0.0, skip)
            else:
                due = state.explainer.due(data, space, walk)
                if found and found < num_tokens - 1 and walk.onward:
                    state.advisor.observe(data, walk, space)
        if takes_over:
            assert source is not None
            node = source
        elif depth != node.start + len(node.blocks) * size:  # no node ends where the whole blocks do
            node = tree.split(node, (depth - node.start) // size)
        public = space.declared.length_in(data) // TOKEN_BYTES if space.declared.prefixes else 0
        lease = Lease(
            state,
            namespace,
            space,
            data,
            node,
            held_tokens,
            num_tokens,
            cached,
            cached,
            public,
            state.enabled,
        )
        lease.due = due
        self._grant(lease, needed, source if slots else None, slots)
        if state.ghosts.leaving:
            state.ghosts.free_some()
        return lease

    def _grant(self, lease: Lease, needed: int, source: Node | None, slots: int) -> None:
        """Protect the prefix and the source of a copy, give the lease its blocks, and count it."""
        state, node = self._state, lease.node
        tree = state.tree
        tree.hold(node)
        if source is not None:
            tree.protect(source)
        tree.use(node)
        if tree.policy.tracks_path:
            tree.hit_path(node)
        else:
            node.hits += 1
        if state.pins.by_key or state.pins.any_lapsed:
            state.pins.refresh(node)
        lease.begin(needed, source, slots)
        num_tokens, cached = lease.num_tokens, lease.num_cached_tokens
        self.admitted += 1
        self.queried_tokens += num_tokens
        self.hit_tokens += cached
        if self._on_acquire is not None:
            self._on_acquire(num_tokens, cached)
