# SPDX-License-Identifier: Apache-2.0
"""What is found of a prompt, what of it is copied, and which prompts and namespaces are refused."""

from __future__ import annotations

import numpy as np
import pytest
from stored_prompts import store_checked as store

from radixkv import InvalidRequestError, PrefixCache


def test_a_fully_cached_prompt_leaves_one_token_and_copies_nothing() -> None:
    cache = PrefixCache(16, 4)
    table = store(cache, list(range(8)))
    assert cache.match(list(range(8))).num_tokens == 8
    lease = cache.acquire(list(range(8)))
    assert lease.num_cached_tokens == 7
    assert lease.copies == []
    assert lease.block_table.tolist() == table
    assert lease.commit(8) == 1, "the token's K/V is in a block that others may read"
    assert lease.report.reason == "hit"


def test_a_match_ends_at_any_token_and_lists_the_slots_to_copy() -> None:
    cache = PrefixCache(16, 4)
    table = store(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    lease = cache.acquire([1, 2, 3, 4, 5, 6, 9, 9])
    assert lease.num_cached_tokens == 6
    assert lease.block_table[0] == table[0]
    assert lease.copies == [(table[1], int(lease.block_table[1]), 2)]
    assert lease.take_copies() == [(table[1], int(lease.block_table[1]), 2)]
    assert lease.copies == []


def test_the_source_of_a_copy_is_held_until_the_copy_has_run() -> None:
    cache = PrefixCache(3, 4)
    source = store(cache, [1, 2, 3, 4])[0]
    lease = cache.acquire([1, 2, 9, 9])
    assert lease.copies[0][0] == source
    assert cache.evict(10) == 0
    lease.copies_done()
    assert cache.evict(10) == 1


def test_what_follows_a_copied_block_ages_as_everything_else() -> None:
    """Prompts copy their first two tokens from an old one: the rest of that goes first."""
    cache = PrefixCache(24, 4)
    old = [1, 2, *range(100, 138)]
    store(cache, old)
    for first in range(10, 15):
        store(cache, [1, 2, first, *range(1000 * first, 1000 * first + 37)])
    assert cache.match(old).num_tokens <= 4
    assert cache.match([1, 2, 14, *range(14000, 14037)]).num_tokens == 40


def test_a_partial_block_is_extended_without_copying_when_nobody_holds_it() -> None:
    cache = PrefixCache(16, 4)
    table = store(cache, [1, 2, 3, 4, 5, 6])
    lease = cache.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert lease.num_cached_tokens == 6
    assert lease.copies == []
    assert lease.block_table[:2].tolist() == table
    other = cache.acquire([1, 2, 3, 4, 5, 6, 0])
    assert other.copies == [(table[1], int(other.block_table[1]), 2)], "held: it must be copied"


def test_the_nearest_of_many_siblings_is_found() -> None:
    cache = PrefixCache(4000, 8)
    system = [0] * 8
    rng = np.random.default_rng(0)
    questions = {tuple(q) for q in rng.integers(1, 6, (3000, 8)).tolist()}
    for question in questions:
        lease = cache.acquire([*system, *question])
        lease.commit(16)
        lease.release()
    for probe in rng.integers(1, 6, (300, 8)).tolist():
        best = max(sum(1 for _ in _common(probe, q)) for q in questions)
        assert cache.match([*system, *probe]).num_tokens == 8 + best


def _common(a: list[int], b: tuple[int, ...]) -> list[int]:
    out = []
    for x, y in zip(a, b, strict=True):
        if x != y:
            break
        out.append(x)
    return out


def test_hashes_only_propose() -> None:
    cache = PrefixCache(64, 2, hash_function=lambda data: 42)
    for first in range(10):
        store(cache, [first, first, first + 1, 7])
    for first in range(10):
        assert cache.match([first, first, first + 1, 7]).num_tokens == 4
        assert cache.match([first, first, first + 2, 7]).num_tokens == 2
    cache.check()


def test_match_changes_nothing() -> None:
    cache = PrefixCache(64, 4)
    store(cache, list(range(20)))
    before = (cache.tree.show(), cache.stats)
    cache.match(list(range(6)))
    cache.match([0, 1, 99])
    assert (cache.tree.show(), cache.stats) == before


def test_a_stale_match_is_told_apart_from_a_current_one() -> None:
    cache = PrefixCache(64, 4)
    store(cache, list(range(8)))
    match = cache.match([*range(8), *[5] * 8])
    assert cache.is_current(match)
    store(cache, [*range(8), 77])
    assert cache.is_current(match), "a sibling that shares nothing more does not matter"
    cache.acquire(list(range(6))).release()
    assert cache.is_current(match), "a split does not matter"
    lease = cache.acquire([*range(8), *[5] * 8], match=match)
    assert lease.num_cached_tokens == 8
    lease.commit(12)
    assert not cache.is_current(match), "four tokens more are cached now"
    lease.release()
    match = cache.match(list(range(8)))
    cache.reset()
    assert not cache.is_current(match)


def test_token_ids_come_as_lists_tuples_and_arrays() -> None:
    cache = PrefixCache(64, 4)
    store(cache, list(range(10)))
    for tokens in (tuple(range(10)), np.arange(10), np.arange(10, dtype=np.int32), np.arange(20)[::2] // 2):
        assert cache.match(tokens).num_tokens == 10


@pytest.mark.parametrize(
    "tokens", [[-1], [2**31], [1.5], ["a"], [None], np.array([-1] * 20), np.ones((2, 2), int)]
)
def test_malformed_token_ids_are_refused(tokens: object) -> None:
    cache = PrefixCache(64, 4)
    with pytest.raises(InvalidRequestError):
        cache.acquire(tokens)  # type: ignore[arg-type]
    assert cache.stats.free_blocks == 64


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        PrefixCache(4).acquire([])


def test_namespaces_are_framed_not_joined() -> None:
    cache = PrefixCache(64, 4)
    store(cache, list(range(8)), ("ab", "c"))
    for other in (("a", "bc"), "abc", ("abc",), ("ab", "c", ""), ""):
        assert cache.match(list(range(8)), other).num_tokens == 0
    assert cache.match(list(range(8)), ("ab", "c")).num_tokens == 8


@pytest.mark.parametrize("call", ["match", "acquire", "explain", "pin", "available_blocks"])
def test_an_empty_tuple_is_no_namespace(call: str) -> None:
    cache = PrefixCache(64, 4)
    cache.publish(list(range(8)))
    store(cache, list(range(8)), "alice")
    arguments = ((),) if call == "available_blocks" else ([1, 2, 3], ())
    with pytest.raises(InvalidRequestError, match="at least one string"):
        getattr(cache, call)(*arguments)


def test_a_path_of_20_000_nodes() -> None:
    cache = PrefixCache(20_001, 1)
    store(cache, np.ones(20_001, np.int32))  # type: ignore[arg-type]
    node = next(cache.tree.index.nodes())
    while len(node.blocks) > 1:
        node = cache.tree.index.split(node, len(node.blocks) - 1)
    assert cache.stats.num_nodes == 20_001
    tokens = np.ones(20_001, np.int32)
    assert cache.match(tokens).num_tokens == 20_001
    lease = cache.acquire(tokens)
    assert lease.num_cached_tokens == 20_000
    lease.release()
    cache.check()
    assert cache.evict(20_001) == 20_001


def test_a_public_prefix_is_shared_and_what_follows_is_not() -> None:
    cache = PrefixCache(64, 4)
    system = list(range(10))
    assert cache.publish(system) == 8
    first = cache.acquire([*system, 50, 51, 52, 53], "alice")
    first.commit(14)
    cache.check()
    assert cache.match([*system, 50, 51, 52, 53], "bob").num_tokens == 8
    assert cache.match([*system, 50, 51, 52, 53], "alice").num_tokens == 14
    second = cache.acquire([*system, 50, 51, 52, 53], "bob")
    assert second.num_cached_tokens == 8
    assert second.block_table[:2].tolist() == first.block_table[:2].tolist()
    second.commit(14)
    assert set(second.block_table[2:].tolist()).isdisjoint(first.block_table[2:].tolist())
    cache.check()
    first.release()
    second.release()
    assert cache.evict(64) == 6
    assert cache.unpublish(system)
    assert not cache.unpublish(system)


def test_a_prompt_that_looks_nothing_up_shares_a_public_prefix_all_the_same() -> None:
    cache = PrefixCache(64, 4)
    system = list(range(8))
    cache.publish(system)
    for namespace in ("alice", "bob"):
        lease = cache.acquire([*system, 9], namespace, skip="asked for")
        assert lease.num_cached_tokens == 0
        assert lease.commit(9) == (0 if namespace == "alice" else 8)
        cache.check()
        lease.release()
        cache.check()
    assert cache.match([*system, 9], "carol").num_tokens == 8
