# SPDX-License-Identifier: Apache-2.0
"""Proof of conservation for states and kept windows: each one is free, in the tree, or held by a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.cache.states.checkpoint import GRID

if TYPE_CHECKING:
    from radixkv.cache.capacity import Capacity
    from radixkv.cache.node import Node


def check_states(capacity: Capacity, nodes: list[Node]) -> None:
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
    held = [slot for states in leases for slot in states.held_slots()]
    keeper.pool.check([checkpoint.slot for checkpoint in found], held)
