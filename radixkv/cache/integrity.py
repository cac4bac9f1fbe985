# SPDX-License-Identifier: Apache-2.0
"""Proof of conservation: the invariants that `PrefixCache.check` asserts.

Everything is recomputed from the leases, the pins and the nodes, and compared with the counts that are kept
incrementally. Nothing here is used while serving.
"""

from __future__ import annotations

from collections import Counter

from radixkv.cache.capacity import Capacity
from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.states.checkpoint import GRID


def check(capacity: Capacity) -> None:
    """Assert every invariant; see the functions below. O(blocks)."""
    nodes = list(capacity.tree.nodes())
    _check_roots(capacity, nodes)
    for node in nodes:
        _check_node(capacity.tree, node)
    for node in [*capacity.tree.roots.values(), *nodes]:
        _check_siblings(capacity.tree, node)
    _check_references(capacity, nodes)
    _check_leases(capacity)
    _check_blocks(capacity, nodes)
    _check_accounts(capacity, nodes)
    _check_states(capacity, nodes)
    pinned, pins = sum(len(node.blocks) for node in nodes if node.pins), capacity.pins
    assert pinned == pins.pinned_blocks, f"{pins.pinned_blocks} blocks are counted as pinned, {pinned} are"
    assert pinned <= pins.budget_blocks, f"{pinned} pinned blocks exceed the budget"


def _check_roots(capacity: Capacity, nodes: list[Node]) -> None:
    tree = capacity.tree
    assert len(nodes) == tree.num_nodes, f"{tree.num_nodes} nodes are counted, {len(nodes)} are reachable"
    assert len({id(node) for node in nodes}) == len(nodes), "a node is reachable twice"
    for owner, root in tree.roots.items():
        assert root.owner is owner, f"the root of {owner!r} is misplaced"
        assert root.parent is None, f"the root of {owner!r} has a parent"
        assert not root.key, f"the root of {owner!r} holds tokens"
        assert not len(root.blocks), f"the root of {owner!r} holds blocks"
        assert owner.is_public or owner.seed == tree.identities.seed(owner.key), f"{owner!r} has another seed"
        assert root.ids == owner.seed, f"the root of {owner!r} does not begin with its seed"
        assert not root.is_leaf or root.refs, f"the empty root of {owner!r} was left"
    for computes, owner in capacity.publics.items():
        assert owner.seed == tree.identities.public_seed(computes), f"public {computes} has another seed"


def _check_node(tree: RadixTree, node: Node) -> None:
    parent, size = node.parent, tree.block_bytes
    assert parent is not None, f"{node!r} has no parent"
    assert node.version >= 0, f"{node!r} is in the tree but marked as gone"
    assert node.start == parent.end, f"{node!r} does not begin where its parent ends, at {parent.end}"
    assert node.key, f"{node!r} holds no tokens"
    assert len(node.blocks) == -(-len(node.key) // size), f"{node!r} has blocks that its tokens don't fill"
    assert node.is_leaf or not len(node.key) % size, f"{node!r} has children after a partial block"
    is_below_public = parent.owner is node.owner.public
    assert node.owner is parent.owner or is_below_public, f"{node!r} hangs below private {parent.owner!r}"
    before = tree.identity_after(parent, node.owner)
    ids = tree.identities.chain(before, node.key[: len(node.key) // size * size])
    assert node.ids == ids, f"{node!r} has other identities than its tokens"


def _check_siblings(tree: RadixTree, node: Node) -> None:
    by_namespace = {} if node.namespace_children is None else dict(node.namespace_children)
    if node.children is not None:
        by_namespace[node.owner] = node.children
    size = tree.block_bytes
    for owner, children in by_namespace.items():
        members = list(children)
        firsts = sorted(bytes(child.key[:size]) for child in members)
        assert members, f"{node!r} keeps an empty set of children"
        assert len(members) == len(set(members)), f"a child below {node!r} is there twice"
        whole = [first for first in firsts if len(first) == size]
        assert len(set(whole)) == len(whole), f"siblings below {node!r} share their first block"
        firsts = sorted(set(firsts))
        assert firsts == children.first_blocks(), f"the order of the children below {node!r} is stale"
        for child in members:
            assert child.parent is node, f"{child!r} does not point back to {node!r}"
            assert child.owner is owner, f"{child!r} is filed under {owner!r}"
            found = children.find(bytes(child.key[:size]))
            is_found = found is child if len(child.key) >= size else found is not None
            assert is_found, f"{child!r} is not found"


def _check_references(capacity: Capacity, nodes: list[Node]) -> None:
    holders: Counter[Node] = Counter()
    refs: Counter[Node] = Counter()
    pins_here: Counter[Node] = Counter(pin.node for pin in capacity.pins)
    for lease in capacity.leases.values():
        holders[lease.node] += 1
        if lease.pending is not None:
            refs.update(node for node, _ in lease.pending.nodes)
    pins: Counter[Node] = Counter(pins_here)
    refs.update(holders)
    refs.update(pins_here)
    everything = [*nodes, *capacity.tree.roots.values()]
    known = set(everything)
    for node in refs:
        assert node in known, f"{node!r} is held but not in the tree"
    for node in sorted(everything, key=lambda n: n.start, reverse=True):
        counted = (node.holders, node.refs, node.pins_here, node.pins)
        actual = (holders[node], refs[node], pins_here[node], pins[node])
        assert counted == actual, (
            f"{node!r} counts {counted} leases, references, pins here, pins; has {actual}"
        )
        if node.parent is not None:
            refs[node.parent] += bool(refs[node])
            pins[node.parent] += bool(pins[node])


def _check_leases(capacity: Capacity) -> None:
    size = capacity.tree.block_size
    for lease in capacity.leases.values():
        table = lease.block_table.tolist()
        reserved = len(table) - -(-lease.num_tokens // size)
        assert 0 <= reserved <= 1, f"{lease!r} has the wrong number of blocks"
        assert len(set(table)) == len(table), f"{lease!r} has a block twice"
        assert len(lease.tokens) == 4 * lease.num_tokens, f"{lease!r} has miscounted its tokens"
        assert lease.num_committed <= lease.num_tokens, f"{lease!r} has committed more than it has"
        assert lease.tree_tokens <= len(table) * size, f"{lease!r} has more in the tree than it has"
        end = lease.node.end
        assert lease.tree_tokens == end, f"{lease!r} ends at {lease.tree_tokens}, its node at {end}"
        path = capacity.tree.path(lease.node)
        blocks = [block for node in path for block in node.blocks]
        assert blocks == table[: len(blocks)], f"{lease!r} does not hold its path's blocks"
        key = b"".join(node.key for node in path)[: len(lease.tokens)]
        assert lease.tokens.startswith(key), f"{lease!r} holds blocks of other tokens"
        root = path[0].parent if path else lease.node
        assert root is not None, f"{lease!r} holds a node without a root"
        is_own = root.owner is lease.owner or root.owner.is_public
        assert is_own, f"{lease!r} holds blocks of another namespace"


def _check_blocks(capacity: Capacity, nodes: list[Node]) -> None:
    pool = capacity.pool
    private: Counter[int] = Counter()
    for lease in capacity.leases.values():
        private.update(lease.private_blocks().tolist())
        if lease.pending is not None:
            private.update(lease.pending.blocks)
    places = Counter(pool.free_ids())
    places.update(block for node in nodes for block in node.blocks)
    places.update(private.keys())
    twice = [block for block, count in places.items() if count > 1]
    assert not twice, f"blocks {twice[:5]} are in two places at once"
    lost = pool.num_blocks - len(places)
    assert not lost, f"{lost} blocks are lost"
    assert all(0 <= block < pool.num_blocks for block in places), "a block id is out of range"
    shared = {block: count - 1 for block, count in private.items() if count > 1}
    assert shared == pool.extra_holders, "the holders of private blocks are miscounted"


def _check_accounts(capacity: Capacity, nodes: list[Node]) -> None:
    pool, publics = capacity.pool, capacity.publics.values()
    for account in capacity.accounts:
        mine = [node for node in nodes if node.owner.account is account]
        blocks = sum(len(node.blocks) for node in mine)
        protected = sum(len(node.blocks) for node in mine if node.refs)
        assert account.blocks == blocks, f"{account.blocks} tree blocks are counted, there are {blocks}"
        assert account.protected == protected, (
            f"{account.protected} are counted as protected, {protected} are"
        )
        # A reset moves held public blocks to the account of whoever holds them, which may pass the ceiling.
        is_bounded = account.most is not None and not any(owner.declared.version for owner in publics)
        assert not is_bounded or account.used <= (account.most or 0), "a quota's ceiling is exceeded"
        candidates = list(account.index)
        leaves = {id(node) for node in mine if node.is_leaf and not node.refs}
        assert {id(node) for node in candidates} == leaves, "the eviction index is not the unlocked leaves"
        assert len(candidates) == len(leaves), "a leaf is in the eviction index twice"
        done = account.index.done()
        assert done is None or id(done) in leaves, "the candidate to be evicted first is no unlocked leaf"
        assert all(node.entry and node.entry[2] is node for node in candidates), "a stale index entry"
    total = sum(account.used for account in capacity.accounts)
    assert total == pool.num_blocks - pool.num_free, "the accounts' blocks don't add up to those in use"


def _check_states(capacity: Capacity, nodes: list[Node]) -> None:
    """Assert that checkpoints lie at whole blocks and grid points, and that all holders are counted."""
    tree, keeper = capacity.tree, capacity.tree.states
    found = [checkpoint for node in nodes for checkpoint in (node.states or {}).values()]
    if keeper is None:
        assert not found, "a model without states has checkpoints"
        return
    assert len(found) == len(keeper), f"{len(keeper)} checkpoints are counted, the tree has {len(found)}"
    for node in nodes:
        for offset, checkpoint in (node.states or {}).items():
            assert checkpoint.node is node, f"{checkpoint!r} does not point back to {node!r}"
            assert 0 < offset <= len(node.key) // tree.block_bytes, f"{checkpoint!r} ends no whole block"
            at = node.start + offset * tree.block_size
            assert checkpoint.end == at, f"{checkpoint!r} lies after {at} tokens"
            assert not at % GRID, f"{checkpoint!r} lies at no grid point"
            assert checkpoint.identity == node.identity(offset), f"{checkpoint!r} sums up another prefix"
            assert 0 <= checkpoint.base < at, f"{checkpoint!r} has its base at {checkpoint.base}"
    leases = [lease.states for lease in capacity.leases.values() if lease.states is not None]
    assert not any(states.base.position % GRID for states in leases), "a request goes on from no grid point"
    keeper.check(leases)
