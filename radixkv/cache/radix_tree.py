# SPDX-License-Identifier: Apache-2.0
"""RadixTree: the index from token prefixes to runs of blocks.

A pure index: it knows nothing of leases, pins or models, and moves no memory. Its operations return what
changed. It keeps four things true at any moment (`radixkv.cache.integrity` proves them):

- siblings differ in their first block, but for partial ones that different requests hold; only the last
  block of a leaf may be partial;
- a node's `refs` counts what ends there plus the children with refs; so a node is protected as soon as
  anything below it is, and locking a prefix touches only the nodes that were unprotected before;
- the blocks of nodes without refs are exactly the evictable ones;
- the eviction index holds exactly the leaves without refs.

Everything is a loop: a path may be 100,000 nodes long.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

from radixkv.cache.block_identity import IDENTITY_BYTES, BlockIdentities
from radixkv.cache.eviction.policy import EvictionPolicy, overridden
from radixkv.cache.keys import CONTEXT_TOKENS, TOKEN_BYTES, shared_bytes
from radixkv.cache.node import Children, Namespace, Node
from radixkv.cache.reporting.ages import UseTimes
from radixkv.cache.reporting.events import ChangeLog
from radixkv.cache.states.checkpoints import Checkpoints


class Walk(NamedTuple):
    """The end of a lookup."""

    node: Node  # the deepest node of which at least one whole block matched, or the root
    depth: int  # tokens matched in whole blocks; node.start < depth <= node.end, or the root's 0
    partial: int  # further tokens that match inside one more block
    source: Node | None  # the node holding that block; None when partial is 0
    neighbour: Node | None  # the cached continuation nearest to the tokens that did not match
    onward: bytes | bytearray  # a few tokens at least with which that goes on where the match ended


_CONTEXT = CONTEXT_TOKENS * TOKEN_BYTES
_new_walk = cast(Callable[[tuple[Any, ...]], Walk], partial(tuple.__new__, Walk))  # quicker than Walk(...)


class RadixTree:
    """The nodes of every namespace, their counts and their order of eviction.

    It alone writes the fields of nodes, and the counts of blocks in the tree of their accounts.
    It reports changes of nodes to the policy, and every use to `use_times`.

    Attributes:
        roots: by namespace.
        num_nodes: nodes that hang below the roots.
    """

    def __init__(
        self, block_size: int, identities: BlockIdentities, policy: EvictionPolicy, use_times: UseTimes
    ) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.identities = identities
        self.roots: dict[Namespace, Node] = {}
        self.num_nodes = 0
        self.policy = policy
        self._on_insert = overridden(policy, "on_insert")
        self._on_remove = overridden(policy, "on_remove")
        self.use_times = use_times
        self._tick = 0
        self.changes: ChangeLog | None = None  # None: nobody wants to know
        self.states: Checkpoints | None = None  # None: the model has no layers with states

    def __repr__(self) -> str:
        return f"RadixTree({self.num_nodes} nodes, {len(self.roots)} namespaces)"

    # ------------------------------------------------------------------ roots

    def root(self, owner: Namespace) -> Node:
        """Return the namespace's root, created when missing. O(1)."""
        root = self.roots.get(owner)
        if root is None:
            root = Node(None, owner, 0, bytearray(), array("i"), bytearray(owner.seed))
            self.roots[owner] = root
        return root

    def drop_empty_root(self, root: Node | None) -> None:
        """Remove the root of an empty namespace without holds. O(1)."""
        if root is not None and root.is_leaf and not root.refs and self.roots.get(root.owner) is root:
            del self.roots[root.owner]
            root.version = -1

    def end_changes(self) -> None:
        """End a call of the cache: send its changes to listeners. O(1) but for them."""
        if self.changes is not None and not self.changes.flush():
            self.changes = None

    # ------------------------------------------------------------------ lookups, paths, identities

    def children_of(self, node: Node, owner: Namespace) -> Children | None:
        """Return the children of `node` that belong to `owner`. O(1)."""
        if node.owner is owner:
            return node.children
        return node.namespace_children.get(owner) if node.namespace_children is not None else None

    def identity_after(self, node: Node, owner: Namespace) -> bytes:
        """Return the identity that a block of `owner` after all of `node` would follow. O(1)."""
        before = bytes(node.ids[-IDENTITY_BYTES:])
        return before if node.owner is owner else self.identities.beyond_public(before, owner.seed)

    def identity_before(self, node: Node, num_blocks: int) -> bytes:
        """Return the identity that a node's block follows, with `num_blocks` of its blocks in front. O(1)."""
        if num_blocks:
            return node.identity(num_blocks)
        assert node.parent is not None
        return self.identity_after(node.parent, node.owner)

    def identity_of_match(self, walk: Walk, owner: Namespace) -> bytes:
        """Return the identity that the next block of `owner` would follow where a lookup ended. O(1)."""
        node = walk[0]
        end = (walk[1] - node.start) // self.block_size * IDENTITY_BYTES or IDENTITY_BYTES
        before = bytes(node.ids[end - IDENTITY_BYTES : end])
        return before if node.owner is owner else self.identities.beyond_public(before, owner.seed)

    def walk(self, node: Node, owner: Namespace, data: bytes, pos: int, stop: int) -> Walk:
        """Follow data[pos:stop] (bytes) down from the end of `node`, edge by edge. O(tokens + path)."""
        size = self.block_bytes
        while True:
            children = node.children if node.owner is owner else self.children_of(node, owner)
            if children is None or pos >= stop:
                return _new_walk((node, pos // TOKEN_BYTES, 0, None, None, b""))
            limit = pos + size
            block = data[pos : limit if limit < stop else stop]
            child: Any = children.whole.get(block) if limit <= stop else None
            if child is not None:
                key = child.key
                if data.startswith(key, pos, stop):
                    pos += len(key)
                    tail = len(key) % size
                    if not tail:
                        node = child
                        continue
                    above = child if len(key) > tail else node
                    return _new_walk(
                        (above, (pos - tail) // TOKEN_BYTES, tail // TOKEN_BYTES, child, child, b"")
                    )
                same = shared_bytes(key, data[pos : min(pos + len(key), stop)])
                if same >= size:
                    tail = same % size
                    depth = (pos + same - tail) // TOKEN_BYTES
                    source = child if tail >= TOKEN_BYTES else None
                    same -= same % TOKEN_BYTES
                    onward = key[same : same + _CONTEXT]
                    return _new_walk((child, depth, tail // TOKEN_BYTES, source, child, onward))
            neighbour, same, onward = children.nearest(block)
            if same or size < _CONTEXT:
                onward = neighbour.key[same : same + _CONTEXT]
            source = neighbour if same else None
            return _new_walk((node, pos // TOKEN_BYTES, same // TOKEN_BYTES, source, neighbour, onward))

    def following(self, walk: Walk, owner: Namespace, tail: bytes, most: int) -> bytes:
        """Return at most `most` bytes after `tail` in a namespace, where a walk over whole blocks ended.

        Of several continuations the latest used. O(log siblings) for each node passed.
        """
        node = walk.node
        inside = walk.depth * TOKEN_BYTES - node.start * TOKEN_BYTES
        if node.parent is not None and inside < len(node.key):
            found = bytes(node.key[inside : inside + len(tail) + most])
            if not found.startswith(tail):
                return b""
        else:
            found = b""
        while len(found) < len(tail) + most:
            children = self.children_of(node, owner)
            child = None if children is None else children.latest_beginning_with(tail[len(found) :])
            if child is None:
                break
            node = child
            found += child.key
        return found[len(tail) : len(tail) + most]

    def path(self, node: Node) -> list[Node]:
        """Return the nodes from below the root down to `node`. O(depth)."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def nodes(self) -> Iterator[Node]:
        """Yield every node but the roots, parents first."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.each_child())

    def path_blocks(self, node: Node) -> array[int]:
        """Return the blocks from the root down to the end of `node`, a new array. O(path + blocks)."""
        if not node.start:
            return node.blocks[:]
        parts = []
        current: Node | None = node
        while current is not None:
            parts.append(current.blocks)
            current = current.parent
        parts.reverse()
        return array("i", b"".join(parts))

    def siblings(self, node: Node) -> Children:
        """Return the children of a node's parent in its namespace, itself included. O(1)."""
        assert node.parent is not None
        siblings = self.children_of(node.parent, node.owner)
        assert siblings is not None
        return siblings

    # ------------------------------------------------------------------ protection

    def protect(self, node: Node) -> None:
        """Add a reference: node and all above it can't be evicted. O(nodes that were unprotected)."""
        current: Node | None = node
        account, count = node.owner.account, 0
        while current is not None:
            current.refs += 1
            if current.refs > 1:
                break
            if current.owner.account is not account:  # public from here on
                account.count_tree(0, count)
                account, count = current.owner.account, 0
            count += len(current.blocks)
            if current.entry is not None:
                account.index.remove(current)
            current = current.parent
        if count:
            account.count_tree(0, count)

    def hold(self, node: Node) -> None:
        """Add a lease that ends at `node`. O(nodes that were unprotected)."""
        node.holders += 1
        if node.refs:
            node.refs += 1
        else:
            self.protect(node)

    def release(self, node: Node) -> None:
        """Drop a lease that ended at `node`. O(nodes that lose their last reference)."""
        node.holders -= 1
        self.unprotect(node)

    def drop_holder(self, node: Node) -> None:
        """Make a lease that ended at `node` a mere reference, to be dropped or kept. O(1)."""
        node.holders -= 1

    def use(self, node: Node) -> None:
        """Note the latest use: a request begins or ends here. O(1)."""
        self._tick = tick = self._tick + 1
        self.policy.tick = node.last_access = tick
        self.use_times.note(tick)

    def hit_path(self, node: Node) -> None:
        """Count a hit of every node of the path and tell the policy, deepest first. O(path)."""
        on_hit = self.policy.on_hit
        while node.parent is not None:
            node.hits += 1
            on_hit(node)
            node = node.parent

    def unprotect(self, node: Node) -> None:
        """Drop a reference; leaves that lose their last one become candidates. O(nodes that lose it)."""
        current: Node | None = node
        account, count = node.owner.account, 0
        while current is not None:
            current.refs -= 1
            if current.refs:
                assert current.refs > 0, f"{current!r} was released more often than held"
                break
            if current.owner.account is not account:  # public from here on
                account.count_tree(0, -count)
                account, count = current.owner.account, 0
            count += len(current.blocks)
            if current.children is None and current.namespace_children is None:
                if current.parent is None:
                    self.drop_empty_root(current)
                else:
                    account.index.add(current)
            current = current.parent
        if count:
            account.count_tree(0, -count)

    def invalidate_all(self) -> dict[Namespace, Node]:
        """Forget all nodes, but for the accounts' counts; return the roots, which have them. O(namespaces).

        With listeners O(blocks).
        """
        if self.states is not None:
            self.states.forget_all()
        if self.changes is not None:
            for node in reversed(list(self.nodes())):
                self.changes.removed(node, 0)
            self.changes.flush(cleared=True)
        roots, self.roots, self.num_nodes = self.roots, {}, 0
        return roots

    def pin(self, node: Node) -> int:
        """Add a pin (a reference as well); returns how many more blocks are pinned now. O(path)."""
        self.protect(node)
        node.pins_here += 1
        added = 0
        current: Node | None = node
        while current is not None:
            current.pins += 1
            if current.pins > 1:
                break
            added += len(current.blocks)
            current = current.parent
        return added

    def unpin(self, node: Node) -> int:
        """Drop a pin; returns how many blocks are no longer pinned. O(path)."""
        node.pins_here -= 1
        removed = 0
        current: Node | None = node
        while current is not None:
            current.pins -= 1
            if current.pins:
                break
            removed += len(current.blocks)
            current = current.parent
        self.unprotect(node)
        return removed

    # ------------------------------------------------------------------ growth

    def add_held_child(
        self, parent: Node, owner: Namespace, siblings: Children | None, key: bytearray, blocks: array[int]
    ) -> Node:
        """Hang a new run, which keeps `key` and `blocks`, below a node and move a lease's hold down to it.

        `siblings` are the owner's children there so far.
        """
        before = parent.ids[-IDENTITY_BYTES:] if parent.owner is owner else self.identity_after(parent, owner)
        ids = self.identities.chain(before, key)
        node = Node(parent, owner, parent.start + len(parent.key) // TOKEN_BYTES, key, blocks, ids)
        node.refs = node.holders = 1  # `parent` keeps its count of references
        parent.holders -= 1
        if siblings is None:
            siblings = Children(self.block_bytes)
            if parent.owner is owner:
                parent.children = siblings
            elif parent.namespace_children is None:
                parent.namespace_children = {owner: siblings}
            else:
                parent.namespace_children[owner] = siblings
        siblings.add(node)
        parent.version += 1
        self.num_nodes += 1
        owner.account.count_tree(len(blocks), len(blocks))
        if self._on_insert is not None:
            self._on_insert(node, len(blocks))
        if self.changes is not None:
            self.changes.stored(node, 0)
        return node

    def grow_run(self, leaf: Node, key: bytes | bytearray) -> None:
        """Append tokens to the partial last block of several, which has room for them. O(1)."""
        leaf.key += key
        leaf.version += 1
        if not len(leaf.key) % self.block_bytes:
            leaf.ids += self.identities.next(leaf.ids[-IDENTITY_BYTES:], leaf.key[-self.block_bytes :])
            if self.changes is not None:
                self.changes.stored(leaf, len(leaf.blocks) - 1)

    def extend(self, leaf: Node, key: bytearray, blocks: array[int]) -> None:
        """Append whole or partial blocks to a leaf whose last block is whole. O(tokens)."""
        assert leaf.is_leaf
        assert leaf.refs
        assert not len(leaf.key) % self.block_bytes
        leaf.ids += self.identities.chain(leaf.ids[-IDENTITY_BYTES:], key)
        leaf.key += key
        leaf.blocks.extend(blocks)
        leaf.version += 1
        leaf.owner.account.count_tree(len(blocks), len(blocks))
        if self._on_insert is not None:
            self._on_insert(leaf, len(blocks))
        if self.changes is not None:
            self.changes.stored(leaf, len(leaf.blocks) - len(blocks))

    def extend_tail(self, leaf: Node, key: bytes | bytearray) -> None:
        """Append tokens to a leaf's partial block, which has room for them; no other may be equal then."""
        size = self.block_bytes
        assert leaf.is_leaf
        assert len(leaf.key) % size
        assert len(leaf.key) % size + len(key) <= size
        if len(leaf.key) < size:
            self._replace_key(leaf, leaf.key + key)
            leaf.version += 1
        else:
            self.grow_run(leaf, key)

    def _replace_key(self, child: Node, key: bytearray) -> None:
        """Give a leaf of one block other tokens. O(log siblings)."""
        siblings = self.siblings(child)
        siblings.remove(child)
        if self.changes is not None:
            self.changes.removed(child, 0)
        child.key = key
        siblings.add(child)
        assert child.parent is not None
        child.ids = self.identities.chain(self.identity_after(child.parent, child.owner), key)
        child.parent.version += 1
        if self.changes is not None:
            self.changes.stored(child, 0)

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut a node after its first `num_blocks` blocks; returns the new upper part.

            parent ── [b0 b1 b2 b3] ── ...      before
            parent ── [b0 b1] ── [b2 b3] ── ... after: the lower part keeps its identity, holders and pins

        O(tokens of the node).
        """
        assert 0 < num_blocks < len(node.blocks)
        parent = node.parent
        assert parent is not None
        cut = num_blocks * self.block_bytes
        cut_id = num_blocks * IDENTITY_BYTES
        upper = Node(
            parent, node.owner, node.start, node.key[:cut], node.blocks[:num_blocks], node.ids[:cut_id]
        )
        upper.refs = 1 if node.refs else 0
        upper.pins = 1 if node.pins else 0
        upper.last_access = node.last_access
        upper.hits = node.hits if self.policy.tracks_path else 0
        upper.lapsed = node.lapsed
        if self.states is not None:
            self.states.split(node, upper, num_blocks)
        self.siblings(node).replace(upper)
        node.key = node.key[cut:]
        node.blocks = node.blocks[num_blocks:]
        node.ids = node.ids[cut_id:]
        node.start += num_blocks * self.block_size
        node.parent = upper
        node.version += 1
        upper.children = Children(self.block_bytes)
        upper.children.add(node)
        self.num_nodes += 1
        self.policy.on_split(upper, node)
        return upper

    def split_after(self, node: Node, end: int) -> Node:
        """Return the node of the path to `node` that ends at token `end`, a block's end; split if need be."""
        while node.parent is not None and node.start >= end:
            node = node.parent
        keep = (end - node.start) // self.block_size
        return node if keep == len(node.blocks) else self.split(node, keep)

    def split_before(self, node: Node, start: int) -> Node:
        """Return the node of the path to `node` that begins with the block of `start`; split if need be."""
        start -= start % self.block_size
        while node.start > start:
            assert node.parent is not None
            node = node.parent
        if node.start < start:
            self.split(node, (start - node.start) // self.block_size)
        return node

    # ------------------------------------------------------------------ shrinking

    def trim(self, leaf: Node, num_blocks: int) -> array[int]:
        """Take the last `num_blocks` blocks off a leaf, or the leaf away; returns their ids. O(blocks)."""
        assert leaf.children is None
        assert 0 < num_blocks <= len(leaf.blocks)
        keep = len(leaf.blocks) - num_blocks
        if self.changes is not None:
            self.changes.removed(leaf, keep)
        if self.states is not None:
            self.states.cut(leaf, keep)
        taken = leaf.blocks[keep:]
        leaf.owner.account.count_tree(-num_blocks, -num_blocks if leaf.refs else 0)
        if keep:
            del leaf.blocks[keep:]
            del leaf.key[keep * self.block_bytes :]
            del leaf.ids[keep * IDENTITY_BYTES :]
            leaf.version += 1
        else:
            self._remove(leaf)
        return taken

    def truncate_tail(self, leaf: Node, num_tokens: int) -> bool:
        """Cut a leaf at token `num_tokens` of its last block; False: not done, a sibling holds it all."""
        keep = (num_tokens - leaf.start) * TOKEN_BYTES
        assert leaf.is_leaf
        assert keep > (len(leaf.blocks) - 1) * self.block_bytes
        if len(leaf.blocks) == 1:
            siblings = self.siblings(leaf)
            siblings.remove(leaf)
            is_covered = siblings.begins_with(bytes(leaf.key[:keep]))
            siblings.add(leaf)
            if is_covered:
                return False
            self._replace_key(leaf, leaf.key[:keep])
        else:
            if self.changes is not None:
                self.changes.removed(leaf, len(leaf.blocks) - 1)
            del leaf.key[keep:]
            del leaf.ids[(len(leaf.blocks) - 1) * IDENTITY_BYTES :]
        if self.states is not None:
            self.states.cut(leaf, len(leaf.key) // self.block_bytes)
        leaf.version += 1
        return True

    def _remove(self, leaf: Node) -> None:
        parent, owner = leaf.parent, leaf.owner
        assert parent is not None
        if leaf.entry is not None:
            owner.account.index.remove(leaf)
        siblings = self.siblings(leaf)
        siblings.remove(leaf)
        is_leaf = False
        if not len(siblings):
            if parent.owner is owner:
                parent.children = None
            else:
                assert parent.namespace_children is not None
                del parent.namespace_children[owner]
                if not parent.namespace_children:
                    parent.namespace_children = None
            is_leaf = parent.is_leaf
        if self._on_remove is not None:
            self._on_remove(leaf)
        leaf.version = -1
        leaf.parent = None
        leaf.blocks = array("i")
        parent.version += 1
        # A child's use is a use of its ancestors; handing it up when the child goes costs O(1).
        if leaf.last_access > parent.last_access:
            parent.last_access = leaf.last_access
        if not self.policy.tracks_path:
            parent.hits += leaf.hits
        self.num_nodes -= 1
        if leaf.refs:
            leaf.refs = 0
            self.unprotect(parent)
        elif is_leaf and not parent.refs:
            if parent.parent is None:
                self.drop_empty_root(parent)
            else:
                parent.owner.account.index.add(parent)
