"""Which cached leaf goes first: the eviction policies and the ordered index of candidates.

Candidates are the leaves that no lease, pin or pending copy protects. The index keeps them sorted by the
priority that the policy gives them when they become candidates, lowest first; it is updated leaf by leaf and
never rebuilt. The tree trims the chosen leaf from its tail, block by block, for as long as it stays first.

How to write a policy
---------------------
Subclass `EvictionPolicy`, implement `priority`, and add the class to `POLICIES`. The hooks, in the order in
which a request causes them:

1. `on_hit(node)`, *only if* `tracks_path` is true: for every node of the matched path, deepest first;
2. `on_evict`, `on_remove`: room is made for its new blocks (see below);
3. `on_acquire(num_tokens, num_hit_tokens)`: the request has its lease;
4. `on_ghost_hit(depth, record)`, *only if* `uses_ghosts` is true: the first block it missed had been removed;
   `record.policy_data` is what `ghost_data` returned then (`ghost_of(node, index)` asks for any block);
5. `on_insert(node, num_blocks)`: the request's new blocks joined the tree at the end of `node`;
6. `priority(node)`: the leaf became a candidate (at the latest release, or when its last child went).

And around evictions: `victim(index)` chooses (override it to give second chances; `index.reprioritize(node)`
moves a candidate, `index.first_from(priority)` looks further, iterating yields all in order);
`on_evict(node, num_blocks)` comes before a trim, `ghost_data(node)` is stored with the blocks' ghosts,
`on_remove(node)` when a node leaves the tree, `on_split(upper, lower)` after a node was cut (`lower` is the
old object), `on_reset()` when the whole tree was forgotten.

What a policy may read of a node: `start` (tokens before it: its depth), `num_blocks`, `num_children` (its
fan-out), `parent`, `last_access` (the cache's use counter; exact for leaves), `hits` (kept if `tracks_path`),
`space`. It may write `node.data` and nothing else. `self.tick` is the use counter now; `self.num_blocks` and
`self.block_size` describe the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedList

from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.cache.insight.ghost import GhostIndex, GhostRecord
    from radixkv.cache.node import Node


class EvictionIndex:
    """The candidates of one quota group in order of eviction. All operations O(log n).

    Args:
        priority: the policy's.

    Attributes:
        on_change: called after a candidate came, went or moved.
    """

    __slots__ = ("_entries", "_priority", "_serial", "on_change")

    def __init__(self, priority: Callable[[Node], Any]) -> None:
        self._priority = priority
        self._entries: Any = SortedList()
        self._serial = 0
        self.on_change: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: Node) -> None:
        """Make a leaf a candidate; on equal priority the one added earlier goes first."""
        self._serial = serial = self._serial + 1
        node.entry = entry = (self._priority(node), serial, node)
        self._entries.add(entry)
        if self.on_change is not None:
            self.on_change()

    def remove(self, node: Node) -> None:
        """The leaf is no longer a candidate."""
        self._entries.remove(node.entry)
        node.entry = None
        if self.on_change is not None:
            self.on_change()

    def clear(self) -> None:
        """Forget all candidates, without touching them. O(1) but for memory."""
        self._entries = SortedList()
        if self.on_change is not None:
            self.on_change()

    def reprioritize(self, node: Node) -> None:
        """Ask the policy for the candidate's priority again and move it there."""
        self.remove(node)
        self.add(node)

    def first(self) -> Node:
        """The candidate with the lowest priority."""
        return self._entries[0][2]

    def first_priority(self) -> Any:
        """The lowest priority."""
        return self._entries[0][0]

    def first_from(self, priority: Any) -> Node | None:
        """The first candidate with at least this priority, or None."""
        i = self._entries.bisect_left((priority,))
        return self._entries[i][2] if i < len(self._entries) else None

    def __iter__(self) -> Iterator[Node]:
        return (entry[2] for entry in self._entries)

    def nodes(self) -> list[Node]:
        """All candidates in order. O(n)."""
        return [entry[2] for entry in self._entries]


class EvictionPolicy:
    """Base of the policies; see the module's text for the order of the hooks."""

    name = ""
    tracks_path = False  # whether on_hit is called for every node of a matched path, and `hits` counted
    uses_ghosts = False  # whether on_ghost_hit is called

    def __init__(self) -> None:
        self.tick = 0
        self.num_blocks = 0
        self.block_size = 0
        self.ghosts: GhostIndex | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def attach(self, num_blocks: int, block_size: int, ghosts: GhostIndex) -> None:
        """Called once by the cache with the size of the pool and its memory of removed blocks."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ghosts = ghosts

    def priority(self, node: Node) -> Any:
        """What the leaf is worth now; lowest goes first. Comparable with this policy's other priorities."""
        raise NotImplementedError

    def new_index(self) -> EvictionIndex:
        """An index for one group's candidates; override it to count something as they come and go."""
        return EvictionIndex(self.priority)

    def victim(self, index: EvictionIndex) -> Node:
        """The candidate to trim next; the index is not empty."""
        return index.first()

    def trim_limit(self, node: Node) -> int:
        """How many of the victim's last blocks may go before `victim` is asked again."""
        return len(node.blocks)

    def on_acquire(self, num_tokens: int, num_hit_tokens: int) -> None:
        """A request of `num_tokens` came and found `num_hit_tokens` cached."""

    def on_hit(self, node: Node) -> None:
        """A request's matched path contains the whole of `node`."""

    def on_ghost_hit(self, depth: int, record: GhostRecord) -> None:
        """The first block a request missed, at token `depth`, had been evicted."""

    def on_insert(self, node: Node, num_blocks: int) -> None:
        """`num_blocks` new blocks joined `node`, at its end."""

    def on_split(self, upper: Node, lower: Node) -> None:
        """A node was cut; `lower` is the old object, `upper` a new one above it."""
        upper.data = lower.data

    def on_evict(self, node: Node, num_blocks: int) -> None:
        """The last `num_blocks` blocks of `node` are about to go."""

    def on_remove(self, node: Node) -> None:
        """`node` is about to leave the tree."""

    def on_reset(self) -> None:
        """The whole tree was forgotten; `on_remove` is not called for its nodes."""

    def ghost_of(self, node: Node, index: int) -> GhostRecord | None:
        """What removed the block at `index` of the node when it was cached before, or None. O(segment)."""
        return self.ghosts.find_block(node, index) if self.ghosts is not None else None

    def ghost_data(self, node: Node) -> Any:
        """Something small to remember with the evicted blocks of `node`."""
        return None


def hook(policy: EvictionPolicy, name: str) -> Any:
    """The policy's own method of this name; None where it leaves the base's, which does nothing."""
    return None if getattr(type(policy), name) is getattr(EvictionPolicy, name) else getattr(policy, name)


class LRU(EvictionPolicy):
    """Least recently used leaf first."""

    name = "lru"

    def priority(self, node: Node) -> Any:
        return node.last_access


class FIFO(EvictionPolicy):
    """The leaf whose blocks were cached first, whatever was used since."""

    name = "fifo"

    def on_insert(self, node: Node, num_blocks: int) -> None:
        if node.data is None:
            node.data = self.tick

    def priority(self, node: Node) -> Any:
        return node.data


class LFU(EvictionPolicy):
    """Fewest hits while cached first; among equals the least recently used."""

    name = "lfu"
    tracks_path = True

    def priority(self, node: Node) -> Any:
        return node.hits, node.last_access


class SLRU(EvictionPolicy):
    """Segmented LRU (Karedla et al., 1994): blocks that were hit go after those that never were.

    At most `protected_share` of the pool is protected; what is pushed out of it starts anew as recently used.
    """

    name = "slru"
    tracks_path = True
    protected_share = 0.3

    def __init__(self) -> None:
        super().__init__()
        self._protected: OrderedDict[Node, int] = OrderedDict()  # node -> its blocks, least recent first
        self._protected_blocks = 0

    def priority(self, node: Node) -> Any:
        if node in self._protected:
            return 1, node.last_access
        return 0, max(node.last_access, node.data or 0)

    def on_hit(self, node: Node) -> None:
        count = len(node.blocks)
        self._protected_blocks += count - self._protected.pop(node, 0)
        self._protected[node] = count
        while self._protected_blocks > self.protected_share * self.num_blocks:
            demoted, blocks = self._protected.popitem(last=False)
            self._protected_blocks -= blocks
            demoted.data = self.tick
            if demoted.entry is not None:
                demoted.space.group.index.reprioritize(demoted)

    def on_split(self, upper: Node, lower: Node) -> None:
        upper.data = lower.data
        if lower in self._protected:
            self._protected[lower] = len(lower.blocks)
            self._protected[upper] = len(upper.blocks)

    def on_evict(self, node: Node, num_blocks: int) -> None:
        if node in self._protected:
            keep = min(self._protected[node], len(node.blocks) - num_blocks)
            self._protected_blocks -= self._protected[node] - keep
            self._protected[node] = keep

    def on_remove(self, node: Node) -> None:
        self._protected_blocks -= self._protected.pop(node, 0)

    def on_reset(self) -> None:
        self._protected = OrderedDict()
        self._protected_blocks = 0


class TwoQueues(EvictionIndex):
    """An index whose priorities begin with 0 in a small queue, with the count of the blocks there.

    Attributes:
        small_blocks: blocks of the small queue's candidates.
    """

    __slots__ = ("_lengths", "small_blocks")

    def __init__(self, priority: Callable[[Node], Any]) -> None:
        super().__init__(priority)
        self.small_blocks = 0
        self._lengths: dict[Node, int] = {}  # as counted

    def add(self, node: Node) -> None:
        super().add(node)
        if not node.entry[0][0]:
            self._lengths[node] = len(node.blocks)
            self.small_blocks += len(node.blocks)

    def clear(self) -> None:
        super().clear()
        self._lengths = {}
        self.small_blocks = 0

    def remove(self, node: Node) -> None:
        super().remove(node)
        self.small_blocks -= self._lengths.pop(node, 0)

    def shrink(self, node: Node, num_blocks: int) -> None:
        """A candidate is about to lose blocks."""
        if node in self._lengths:
            self._lengths[node] -= num_blocks
            self.small_blocks -= num_blocks


class S3FIFO(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue filters what is seen once from the main queue.

    New blocks enter the small queue (a tenth of the pool) or, if the ghost index still knows them, the main
    queue. What was hit in the small queue moves on to the main one; what was hit there goes round again.
    """

    name = "s3fifo"
    tracks_path = True
    small_share = 0.1
    max_frequency = 3

    def __init__(self) -> None:
        super().__init__()
        self._stamp = 0

    def _place(self, node: Node, queue: int, frequency: int) -> None:
        self._stamp += 1
        node.data = (queue, self._stamp, frequency)

    def priority(self, node: Node) -> Any:
        return node.data[:2]

    def on_insert(self, node: Node, num_blocks: int) -> None:
        if node.data is None:
            first = len(node.blocks) - num_blocks
            self._place(node, 1 if self.ghost_of(node, first) is not None else 0, 0)

    def on_hit(self, node: Node) -> None:
        queue, stamp, frequency = node.data
        node.data = (queue, stamp, min(frequency + 1, self.max_frequency))

    def new_index(self) -> EvictionIndex:
        return TwoQueues(self.priority)

    def on_evict(self, node: Node, num_blocks: int) -> None:
        index = node.space.group.index
        assert isinstance(index, TwoQueues)
        index.shrink(node, num_blocks)

    def victim(self, index: EvictionIndex) -> Node:
        assert isinstance(index, TwoQueues)
        limit = max(1, int(self.small_share * self.num_blocks))
        while True:
            node = index.first()
            if node.data[0] == 0 and index.small_blocks < limit:
                node = index.first_from((1,)) or node
            frequency = node.data[2]
            if not frequency:
                return node
            self._place(node, 1, 0 if node.data[0] == 0 else frequency - 1)
            index.reprioritize(node)


class GDSF(EvictionPolicy):
    """GreedyDual-Size-Frequency (Cherkasova, 1998): cheap to recompute and seldom used goes first.

    A block's cost is what it would take to compute it again: the dense layers alike for each token, and
    attention that grows with the position. `level` rises to the priority of what was evicted, so that what is
    not used ages.
    """

    name = "gdsf"
    tracks_path = True
    attention_scale = 4096  # tokens of context at which attention costs as much as the dense layers

    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0

    def on_insert(self, node: Node, num_blocks: int) -> None:
        if node.data is None:
            node.data = self.level

    def on_hit(self, node: Node) -> None:
        node.data = self.level

    def priority(self, node: Node) -> Any:
        cost = 1.0 + (node.start + len(node.blocks) * self.block_size) / self.attention_scale
        return node.data + (node.hits + 1) * cost, node.last_access

    def on_evict(self, node: Node, num_blocks: int) -> None:
        self.level = max(self.level, node.entry[0][0])


POLICIES: dict[str, type[EvictionPolicy]] = {p.name: p for p in (LRU, LFU, SLRU, S3FIFO, GDSF, FIFO)}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by name, or as given.

    Raises:
        ConfigError: no policy has that name.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if policy not in POLICIES:
        raise ConfigError(f"unknown eviction policy {policy!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[policy]()
