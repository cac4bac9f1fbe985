# SPDX-License-Identifier: Apache-2.0
"""How many requests found each node of the tree, whichever way the eviction policy has it counted."""

from __future__ import annotations

import pytest
from scripted_engine import ScriptedEngine

from radixkv import PrefixCache
from radixkv.cache.eviction.registry import POLICIES

SYSTEM = list(range(100, 108))


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_hits_are_counted_with_every_policy(policy: str) -> None:
    engine = ScriptedEngine()
    engine.prefix_cache = cache = PrefixCache(100, 4, policy)

    def ask(*tokens: int) -> None:
        lease = cache.acquire([*SYSTEM, *tokens], engine.cache.namespace())
        lease.commit(lease.num_tokens)
        lease.release()

    async def hits() -> dict[tuple[int, int], int]:
        nodes = (await engine.cache.nodes(shown_tokens=-1)).nodes
        found = {(node.start, node.token_ids[0]): node.num_hits for node in nodes}
        return {place: found[place] for place in found if place[0] <= len(SYSTEM)}

    ask(1, 1, 1, 1)
    assert set((await hits()).values()) == {0}
    for _ in range(3):
        ask(2, 2, 2, 2, 9)
    # The first of them split the node, the others found all of their own.
    assert await hits() == {(0, 100): 3, (8, 1): 0, (8, 2): 2}
    ask(1, 1, 1, 1, 9)
    assert await hits() == {(0, 100): 4, (8, 1): 1, (8, 2): 2}
    cache.evict(2)
    assert (await hits())[0, 100] == 4, "what was found is remembered above"
    cache.check()
