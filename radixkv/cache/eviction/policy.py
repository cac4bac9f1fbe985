# SPDX-License-Identifier: Apache-2.0
"""Base class of eviction policies, and the events that they receive.

Candidates are the leaves that no lease, pin or pending copy protects. The index keeps them sorted by the
priority that the policy gives them when they become candidates, lowest first. The tree trims the chosen leaf
from its tail, block by block, for as long as it stays first.

To write one, subclass `EvictionPolicy` in a file of its own, implement `priority`, and add the class to
`registry.py`; docs/guide/add_an_eviction_policy.md has an example. `CachedRun` lists the fields that it
may read of a node; it may write `data` and nothing else. The hooks, in the order in which a request causes
them:

0. `on_session`;
1. `on_hit`, only if `tracks_path`: for every node of the matched path, deepest first;
2. `victim`, `on_evict`, `on_remove`: room is made for its new blocks;
3. `on_acquire`: the request has its lease;
4. `on_insert`: its new blocks joined the tree;
5. `priority`: the leaf became a candidate (at the latest release, or when its last child went).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from radixkv.cache.block_identity import IDENTITY_BYTES
from radixkv.cache.eviction.index import CachedRun, EvictionIndex


class RemovalMemory(Protocol):
    """Memory of removed blocks; see `radixkv.cache.reporting.ghost`."""

    def find_block(self, identity: bytes) -> Any:
        """Return the record of the removal of a whole block; None: it is not known."""


class EvictionPolicy:
    """Base of the policies; see the module's text for the order of the hooks."""

    name = ""
    tracks_path = False  # whether on_hit is called for every node of a matched path, and `hits` counted

    def __init__(self) -> None:
        self.tick = 0  # the use counter now
        self.num_blocks = 0
        self.block_size = 0
        self.ghosts: RemovalMemory | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def attach(self, num_blocks: int, block_size: int, ghosts: RemovalMemory) -> None:
        """Take the size of the pool and the cache's memory of removed blocks; called once."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ghosts = ghosts

    def priority(self, node: CachedRun) -> Any:
        """Return the worth of the leaf now: the lowest is evicted first."""
        raise NotImplementedError

    def new_index(self) -> EvictionIndex:
        """Return an index for one account's candidates; override it to count these as they come and go."""
        return EvictionIndex(self.priority)

    def victim(self, index: EvictionIndex) -> CachedRun:
        """Return the candidate to trim next, of at least one; `index.reprioritize` gives second chances."""
        return index.first()

    def trim_limit(self, node: CachedRun) -> int:
        """Return how many of the victim's last blocks may go before `victim` is asked again."""
        return len(node.blocks)

    def on_acquire(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Note a request of `num_tokens`, of which `num_hit_tokens` were found cached."""

    def on_session(self, session: Hashable | None) -> None:
        """A request comes next, or again for want of blocks; requests of its session come back together.

        None: nothing is known of its session.
        """

    def on_hit(self, node: CachedRun) -> None:
        """Note that a request's matched path contains the whole of `node`."""

    def on_insert(self, node: CachedRun, num_blocks: int) -> None:
        """Note that `num_blocks` new blocks joined `node`, at its end."""

    def on_split(self, upper: CachedRun, lower: CachedRun) -> None:
        """Note that a node was cut; `lower` is the old object, `upper` a new one above it."""
        upper.data = lower.data

    def on_evict(self, node: CachedRun, num_blocks: int) -> None:
        """Note that the last `num_blocks` blocks of `node` are about to be evicted."""

    def on_remove(self, node: CachedRun) -> None:
        """Note that `node` is about to leave the tree."""

    def on_reset(self) -> None:
        """Note that the whole tree was forgotten; `on_remove` is not called for its nodes."""

    def was_removed(self, node: CachedRun, index: int) -> bool:
        """Return True if the whole block at `index` of the node was cached before, as far as known. O(1)."""
        identity = bytes(node.ids[index * IDENTITY_BYTES : (index + 1) * IDENTITY_BYTES])
        return self.ghosts is not None and self.ghosts.find_block(identity) is not None


def overridden(policy: EvictionPolicy, name: str) -> Any:
    """Return the policy's own method of this name; None where it leaves the base's, which does nothing."""
    return None if getattr(type(policy), name) is getattr(EvictionPolicy, name) else getattr(policy, name)
