"""Proof of conservation: what `PrefixCache.check` asserts.

Everything is recomputed from the leases, the pins and the nodes, and compared with the counts that are kept
incrementally. Nothing here is used while serving.
"""

from __future__ import annotations

from collections import Counter

from radixkv.cache.cache_parts import CacheParts
from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree


def check(parts: CacheParts) -> None:
    """Assert every invariant; see the functions below. O(blocks)."""
    nodes = list(parts.tree.nodes())
    _check_structure(parts, nodes)
    _check_references(parts, nodes)
    _check_leases(parts)
    _check_blocks(parts, nodes)
    _check_index(parts, nodes)
    _check_pins(parts, nodes)


def _check_structure(parts: CacheParts, nodes: list[Node]) -> None:
    tree = parts.tree
    size = tree.block_bytes
    assert len(nodes) == tree.num_nodes, f"{tree.num_nodes} nodes are counted, {len(nodes)} are reachable"
    assert len({id(node) for node in nodes}) == len(nodes), "a node is reachable twice"
    for owner, root in tree.roots.items():
        assert root.owner is owner, f"the root of {owner!r} is misplaced"
        assert root.parent is None, f"the root of {owner!r} has a parent"
        assert not root.key, f"the root of {owner!r} holds tokens"
        assert owner.is_public or owner.seed == tree.identities.seed(owner.key), f"{owner!r} has another seed"
        assert root.ids == owner.seed, f"the root of {owner!r} does not begin with its seed"
        assert not len(root.blocks), f"the root of {owner!r} holds blocks"
        assert not root.is_leaf or root.refs, f"the empty root of {owner!r} was left"
    for computes, owner in parts.namespaces.publics.items():
        assert owner.seed == tree.identities.public_seed(computes), (
            f"public text of {computes} has another seed"
        )
    for node in nodes:
        parent = node.parent
        assert parent is not None, f"{node!r} has no parent"
        assert node.version >= 0, f"{node!r} is in the tree but marked as gone"
        assert node.start == parent.end, f"{node!r} does not begin where its parent ends, at {parent.end}"
        assert node.key, f"{node!r} holds no tokens"
        assert len(node.blocks) == -(-len(node.key) // size), (
            f"{node!r} has blocks that its tokens don't fill"
        )
        assert node.is_leaf or not len(node.key) % size, f"{node!r} has children after a partial block"
        assert node.owner is parent.owner or parent.owner is node.owner.public, (
            f"{node!r} of {node.owner!r} hangs below a private node of {parent.owner!r}"
        )
        before = tree.identity_after(parent, node.owner)
        ids = tree.identities.chain(before, node.key[: len(node.key) // size * size])
        assert node.ids == ids, f"{node!r} has other identities than its tokens"
    for node in [*tree.roots.values(), *nodes]:
        _check_siblings(tree, node)


def _check_siblings(tree: RadixTree, node: Node) -> None:
    by_namespace = {} if node.namespace_children is None else dict(node.namespace_children)
    if node.children is not None:
        by_namespace[node.owner] = node.children
    for owner, children in by_namespace.items():
        members = list(children)
        firsts = sorted(bytes(child.key[: tree.block_bytes]) for child in members)
        assert members, f"{node!r} keeps an empty set of children"
        assert len(members) == len(set(members)), f"a child below {node!r} is there twice"
        whole = [first for first in firsts if len(first) == tree.block_bytes]
        assert len(set(whole)) == len(whole), f"siblings below {node!r} share their first block"
        firsts = sorted(set(firsts))
        assert firsts == children.first_blocks(), f"the order of the children below {node!r} is stale"
        ordered = [bytes(child.key[: tree.block_bytes]) for child in children.in_order()]
        assert ordered == firsts, f"the children below {node!r} are out of order"
        for child in members:
            assert child.parent is node, f"{child!r} does not point back to {node!r}"
            assert child.owner is owner, f"{child!r} is filed under {owner!r}"
            found = children.find(bytes(child.key[: tree.block_bytes]))
            if len(child.key) >= tree.block_bytes:
                assert found is child, f"{child!r} is not found"
            else:
                assert found is not None, f"{child!r} is not found"


def _check_references(parts: CacheParts, nodes: list[Node]) -> None:
    tree = parts.tree
    holders: Counter[Node] = Counter()
    refs: Counter[Node] = Counter()
    pins_here: Counter[Node] = Counter(pin.node for pin in parts.pins)
    for lease in parts.capacity.leases.values():
        holders[lease.node] += 1
        if lease.pending is not None:
            refs.update(node for node, _ in lease.pending.nodes)
    pins: Counter[Node] = Counter(pins_here)
    refs.update(holders)
    refs.update(pins_here)
    everything = [*nodes, *tree.roots.values()]
    known = set(everything)
    for node in refs:
        assert node in known, f"{node!r} is held but not in the tree"
    for node in sorted(everything, key=lambda n: n.start, reverse=True):
        assert node.holders == holders[node], f"{node!r} counts {node.holders} leases, has {holders[node]}"
        assert node.refs == refs[node], f"{node!r} counts {node.refs} references, has {refs[node]}"
        assert node.pins_here == pins_here[node], (
            f"{node!r} counts {node.pins_here} pins, has {pins_here[node]}"
        )
        assert node.pins == pins[node], f"{node!r} counts {node.pins} pinned, has {pins[node]}"
        if node.parent is not None:
            refs[node.parent] += bool(refs[node])
            pins[node.parent] += bool(pins[node])


def _check_leases(parts: CacheParts) -> None:
    size = parts.tree.block_size
    for lease in parts.capacity.leases.values():
        assert lease.num_blocks == -(-lease.num_tokens // size), f"{lease!r} has the wrong number of blocks"
        assert len(lease.tokens) == 4 * lease.num_tokens, f"{lease!r} has miscounted its tokens"
        assert lease.num_committed <= lease.num_tokens, f"{lease!r} has committed more than it has"
        assert lease.tree_tokens <= lease.num_blocks * size, f"{lease!r} has more in the tree than it has"
        assert lease.tree_tokens == lease.node.end, (
            f"{lease!r} ends at {lease.tree_tokens}, its node at {lease.node.end}"
        )
        path = parts.tree.path(lease.node)
        blocks = [block for node in path for block in node.blocks]
        assert blocks == lease.block_table[: len(blocks)].tolist(), (
            f"{lease!r} does not hold its path's blocks"
        )
        key = b"".join(node.key for node in path)[: len(lease.tokens)]
        assert lease.tokens.startswith(key), f"{lease!r} holds blocks of other tokens"
        assert len(set(lease.block_table.tolist())) == lease.num_blocks, f"{lease!r} has a block twice"
        root = path[0].parent if path else lease.node
        assert root is not None, f"{lease!r} holds a node without a root"
        assert root.owner is lease.owner or root.owner.is_public, (
            f"{lease!r} holds blocks of another namespace"
        )


def _check_blocks(parts: CacheParts, nodes: list[Node]) -> None:
    pool = parts.capacity.pool
    free = pool.free_ids()
    in_tree = [block for node in nodes for block in node.blocks]
    private: Counter[int] = Counter()
    for lease in parts.capacity.leases.values():
        private.update(lease.private_blocks().tolist())
        if lease.pending is not None:
            private.update(lease.pending.blocks)
    places = Counter(free)
    places.update(in_tree)
    places.update(private.keys())
    twice = [block for block, count in places.items() if count > 1]
    assert not twice, f"blocks {twice[:5]} are in two places at once"
    lost = pool.num_blocks - len(places)
    assert not lost, f"{lost} blocks are lost"
    assert all(0 <= block < pool.num_blocks for block in places), "a block id is out of range"
    shared = {block: count - 1 for block, count in private.items() if count > 1}
    assert shared == pool.extra_holders, "the holders of private blocks are miscounted"
    used: Counter[int] = Counter()
    for node in nodes:
        used[id(node.owner.group)] += len(node.blocks)
    for group in parts.capacity.groups:
        mine = [node for node in nodes if node.owner.group is group]
        blocks = sum(len(node.blocks) for node in mine)
        protected = sum(len(node.blocks) for node in mine if node.refs)
        assert group.blocks == blocks, f"{group.blocks} tree blocks are counted, there are {blocks}"
        assert group.protected == protected, f"{group.protected} are counted as protected, {protected} are"
    total = sum(group.used for group in parts.capacity.groups)
    assert total == pool.num_blocks - pool.num_free, "the groups' blocks don't add up to those in use"
    # A reset moves held public blocks to the account of whoever holds them, which may pass the ceiling.
    if not any(owner.declared.version for owner in parts.namespaces.publics.values()):
        for group in parts.capacity.groups:
            assert group.most is None or group.used <= group.most, "a quota's ceiling is exceeded"


def _check_index(parts: CacheParts, nodes: list[Node]) -> None:
    for group in parts.capacity.groups:
        expected = {
            id(node) for node in nodes if node.owner.group is group and node.is_leaf and not node.refs
        }
        actual = list(group.index)
        assert {id(node) for node in actual} == expected, (
            "the eviction index is not the set of unlocked leaves"
        )
        assert len(actual) == len(expected), "a leaf is in the eviction index twice"
        assert all(node.entry is not None and node.entry[2] is node for node in actual), "a stale index entry"


def _check_pins(parts: CacheParts, nodes: list[Node]) -> None:
    pinned = sum(len(node.blocks) for node in nodes if node.pins)
    assert pinned == parts.pins.pinned_blocks, (
        f"{parts.pins.pinned_blocks} blocks are counted as pinned, {pinned} are"
    )
    assert pinned <= parts.pins.budget_blocks, f"{pinned} pinned blocks exceed the budget"
