# SPDX-License-Identifier: Apache-2.0
"""The tree as data: slices, whose nodes, what changes between two slices."""

from __future__ import annotations

import time

import pytest
from stored_prompts import store as fill

from radixkv import PrefixCache
from radixkv.cache.keys import decode_tokens
from radixkv.cache.reporting.tree_walk import TreeWalk
from radixkv.observe.advisor import Advisor


def finished(walk: TreeWalk, nodes: int = 1000) -> TreeWalk:
    while walk.advance(nodes):
        pass
    return walk


def families(num_families: int, num_leaves: int) -> PrefixCache:
    cache = PrefixCache(num_families * (num_leaves + 2), 4)
    for family in range(num_families):
        for leaf in range(num_leaves):
            fill(cache, [*[family] * 8, 1000 + leaf, 1, 2, 3])
    return cache


@pytest.mark.parametrize("slice_nodes", [1, 3, 1000])
def test_slices_add_up_to_the_tree(slice_nodes: int) -> None:
    cache = families(5, 4)
    walk = finished(TreeWalk(cache.tree, shown_tokens=-1), slice_nodes)
    assert walk.is_complete
    assert walk.num_seen == cache.stats.num_nodes == 25
    assert sum(node.num_blocks for node in walk.nodes()) == cache.stats.cached_blocks
    known = {None}
    for node in walk.nodes():
        assert node.parent in known
        known.add(node.id)
    assert len(known) == 26
    tops = [node for node in walk.nodes() if node.parent is None]
    assert sorted(decode_tokens(node.key)[0] for node in tops) == list(range(5))
    assert all((node.eviction_rank is None) == (node.parent is None) for node in walk.nodes())


def test_only_a_namespaces_own_nodes_and_public_ones() -> None:
    cache = PrefixCache(100, 4)
    cache.publish([1, 2, 3, 4])
    fill(cache, [1, 2, 3, 4, 5, 6, 7, 8], "a")
    fill(cache, [1, 2, 3, 4, 9, 9, 9, 9], "b")
    fill(cache, [7] * 8, "b")
    seen = finished(TreeWalk(cache.tree, "a", shown_tokens=2)).nodes()
    assert [(node.namespace, decode_tokens(node.key)) for node in seen] == [((), [1, 2]), (("a",), [5, 6])]
    assert finished(TreeWalk(cache.tree, "nobody")).nodes() == []
    assert {node.namespace for node in finished(TreeWalk(cache.tree)).nodes()} == {(), ("a",), ("b",)}


def test_held_and_pinned_nodes_are_no_candidates() -> None:
    cache = PrefixCache(100, 4)
    fill(cache, [1] * 8)
    fill(cache, [2] * 8)
    fill(cache, [3] * 8)
    cache.pin([1] * 8)
    lease = cache.acquire([2] * 8)
    nodes = finished(TreeWalk(cache.tree, shown_tokens=1)).nodes()
    by_token = {decode_tokens(node.key)[0]: node for node in nodes[:3]}
    assert (by_token[1].is_pinned, by_token[1].is_held, by_token[1].eviction_rank) == (True, True, None)
    assert (by_token[2].is_pinned, by_token[2].is_held, by_token[2].eviction_rank) == (False, True, None)
    assert (by_token[3].is_held, by_token[3].eviction_rank is None) == (False, False)
    lease.release()


def test_limits_end_a_walk_and_say_so() -> None:
    cache = families(5, 4)
    few = finished(TreeWalk(cache.tree, max_nodes=7))
    assert (few.num_seen, few.is_complete) == (7, False)
    assert [node.level for node in few.nodes()] == [0] * 5 + [1] * 2
    short = finished(TreeWalk(cache.tree, shown_tokens=-1, max_bytes=100))
    assert not short.is_complete
    assert 100 <= sum(len(node.key) for node in short.nodes()) < 200


def test_the_tree_may_change_between_slices() -> None:
    cache = families(3, 3)
    walk = TreeWalk(cache.tree)
    assert walk.advance(3)
    fill(cache, [*[1] * 6, 7, 7, 7, 7])  # splits a node whose children wait to be visited
    cache.evict(2)
    finished(walk)
    cache.check()
    ids = {node.id for node in walk.nodes()}
    assert len(ids) == walk.num_seen
    assert all(node.parent is None or node.parent in ids for node in walk.nodes())


def test_a_reset_ends_a_walk() -> None:
    cache = families(3, 3)
    walk = TreeWalk(cache.tree)
    assert walk.advance(3)
    cache.reset()
    fill(cache, [9] * 8)
    finished(walk)
    assert not walk.is_complete
    assert walk.num_seen == 3


def test_uses_have_times() -> None:
    now = [0.0]
    cache = PrefixCache(1000, 4, clock=lambda: now[0])
    for prompt in range(40):
        now[0] = 10.0 * prompt
        fill(cache, [prompt] * 4)
    now[0] += 5.0
    nodes = finished(TreeWalk(cache.tree, shown_tokens=1)).nodes()
    idle = {decode_tokens(node.key)[0]: node.idle_s for node in nodes}
    assert idle == {prompt: 395.0 - 10.0 * prompt for prompt in range(40)}


def test_a_slice_is_short() -> None:
    """2,000 nodes in about 2 ms; ten times that here, for busy machines."""
    cache = families(40, 50)
    spent = []
    for _ in range(5):
        walk = TreeWalk(cache.tree, shown_tokens=32)
        started = time.thread_time()
        walk.advance(2000)
        spent.append(time.thread_time() - started)
        assert walk.num_seen == 2000
    assert min(spent) < 0.02, spent


def test_continuations_are_the_namespaces_own() -> None:
    cache = PrefixCache(100, 4)
    fill(cache, [*range(8), *range(20, 32)], "a")
    assert cache.tree.continuation([*range(8), 99], "a", limit=5) == [20, 21, 22, 23, 24]
    assert cache.tree.continuation([*range(6), 99], "a") == [6, 7, *range(20, 32)]
    assert cache.tree.continuation([*range(8), 99], "b") == []
    assert cache.tree.continuation([50], "a") == [*range(8), *range(20, 32)]
    cache.publish(list(range(100, 108)))
    fill(cache, [*range(100, 108), 1], "b")
    assert cache.tree.continuation([*range(100, 108), 1], "a") == []


def test_a_path_has_the_ids_of_a_walk() -> None:
    cache = PrefixCache(100, 4)
    fill(cache, [*range(8), *range(20, 32)], "a")
    fill(cache, [*range(8), *range(40, 46)], "a")
    walk = TreeWalk(cache.tree, "a")
    assert not walk.advance()
    top, *_ = walk.nodes()
    for tokens, depth in (
        ([*range(8), *range(20, 32)], 2),
        ([*range(8)], 1),
        ([*range(6), 99], 1),
        ([77], 0),
    ):
        path = cache.tree.path(tokens, "a")
        assert len(path) == depth
        assert path[:1] == [top.id][:depth]
        assert set(path) <= {node.id for node in walk.nodes()}
    assert cache.tree.path([*range(8)], "b") == []


def test_advice_keeps_namespaces_apart() -> None:
    advisor = Advisor(4)
    cache = PrefixCache(1000, 4, observer=advisor)
    for namespace in ("a", "b"):
        for time_token in range(20):
            fill(cache, [1, 2, 3, 4, 50 + time_token, *range(10, 30)], namespace)
    (point,) = advisor.advice(owner=("a",))
    assert point.namespace == ("a",)
    assert point.count == point.group_count == 19
    assert point.example_before == (1, 2, 3, 4)
    assert len(advisor.advice()) == 2
    assert advisor.advice(owner=("c",)) == []
