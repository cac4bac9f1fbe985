"""Which cached leaf goes first: the eviction policies and the ordered index of candidates.

Candidates are the leaves that no lease, pin or pending copy protects. The index keeps them sorted by the
priority that the policy gives them when they become candidates, lowest first; it is updated leaf by leaf and
never rebuilt. The tree trims the chosen leaf from its tail, block by block, for as long as it stays first.

How to write a policy
---------------------
Subclass `EvictionPolicy`, implement `priority`, and add a line to `POLICIES`. The hooks, in the order in which
a request causes them:

1. `on_acquire(num_tokens, num_hit_tokens)`: a request arrived;
2. `on_ghost_hit(depth, record)`: the first block it missed had been evicted; `record.policy_data` is what
   `ghost_data` returned then;
3. `on_hit(node)`: for every node of the matched path, deepest first, *only if* `tracks_path` is true;
4. `on_insert(node, num_blocks)`: the request's new blocks joined the tree as (part of) `node`;
5. `priority(node)`: the leaf became a candidate (at the latest release, or when its last child went).

And around evictions: `victim(index)` chooses (override it to give second chances; use
`index.reprioritize(node)` to move a candidate), `ghost_data(node)` is stored with the evicted blocks' ghosts,
`on_evict(node, num_blocks)` before a trim, `on_split(upper, lower)` after a node was cut (`lower` is the old
object), `on_remove(node)` when a node leaves, `on_reset()` when all of them did.

What a policy may read of a node: `start` (tokens before it: its depth), `num_blocks`, `num_children` (its
fan-out), `parent`, `last_access` (the cache's use counter; exact for leaves), `hits` (kept if `tracks_path`),
`space`. It may write `node.data` and nothing else. `self.tick` is the use counter now; `self.num_blocks` and
`self.block_size` describe the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedList

from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.cache.ghost import GhostRecord
    from radixkv.cache.node import Node


class EvictionIndex:
    """The candidates of one quota group in order of eviction. All operations O(log n)."""

    __slots__ = ("_entries", "_policy", "_serial")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._entries: Any = SortedList()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: Node) -> None:
        """Make a leaf a candidate; on equal priority the one added earlier goes first."""
        self._serial += 1
        node.entry = (self._policy.priority(node), self._serial, node)
        self._entries.add(node.entry)

    def remove(self, node: Node) -> None:
        """The leaf is no longer a candidate."""
        self._entries.remove(node.entry)
        node.entry = None

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

    def nodes(self) -> list[Node]:
        """All candidates in order. O(n)."""
        return [entry[2] for entry in self._entries]


class EvictionPolicy:
    """Base of the policies; see the module's text for the order of the hooks."""

    name = ""
    tracks_path = False  # whether on_hit is called for every node of a matched path, and `hits` counted

    def __init__(self) -> None:
        self.tick = 0
        self.num_blocks = 0
        self.block_size = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def attach(self, num_blocks: int, block_size: int) -> None:
        """Called once by the cache with the size of the pool."""
        self.num_blocks = num_blocks
        self.block_size = block_size

    def priority(self, node: Node) -> Any:
        """What the leaf is worth now; lowest goes first. Comparable with this policy's other priorities."""
        raise NotImplementedError

    def victim(self, index: EvictionIndex) -> Node:
        """The candidate to trim next; the index is not empty."""
        return index.first()

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
        """The whole tree was forgotten."""

    def ghost_data(self, node: Node) -> Any:
        """Something small to remember with the evicted blocks of `node`."""
        return None


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


POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (LRU, FIFO)}


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
