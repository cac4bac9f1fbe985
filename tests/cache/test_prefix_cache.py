"""What a user of PrefixCache may rely on: matching, sharing, forking, eviction, errors."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest
from measuring import Work, count_work

from radixkv import InvalidRequestError, LeaseError, OutOfBlocks, PrefixCache
from radixkv.cache.eviction.registry import POLICIES
from radixkv.cache.insight.events import Residency
from radixkv.cache.node import Node
from radixkv.errors import ConfigError


def store(cache: PrefixCache, tokens: list[int], namespace: object = "") -> list[int]:
    """Cache a prompt and release it; returns its block table."""
    lease = cache.acquire(tokens, namespace)  # type: ignore[arg-type]
    lease.commit(len(tokens))
    table = lease.block_table.tolist()
    lease.release()
    cache.check()
    return table


def test_importing_the_cache_imports_no_torch() -> None:
    code = "import sys; from radixkv import PrefixCache; PrefixCache(8); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---------------------------------------------------------------------- matching


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


def test_a_path_of_100_000_nodes() -> None:
    cache = PrefixCache(100_001, 1)
    store(cache, np.ones(100_001, np.int32))  # type: ignore[arg-type]
    node = next(cache._state.tree.nodes())
    while len(node.blocks) > 1:
        node = cache._state.tree.split(node, len(node.blocks) - 1)
    assert cache.stats.num_nodes == 100_001
    tokens = np.ones(100_001, np.int32)
    assert cache.match(tokens).num_tokens == 100_001
    lease = cache.acquire(tokens)
    assert lease.num_cached_tokens == 100_000
    lease.release()
    cache.check()
    assert cache.evict(100_001) == 100_001


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


@pytest.mark.parametrize("call", ["match", "acquire", "explain", "pin", "available_blocks"])
def test_an_empty_tuple_is_no_namespace(call: str) -> None:
    cache = PrefixCache(64, 4)
    cache.publish(list(range(8)))
    store(cache, list(range(8)), "alice")
    arguments = ((),) if call == "available_blocks" else ([1, 2, 3], ())
    with pytest.raises(InvalidRequestError, match="at least one string"):
        getattr(cache, call)(*arguments)


# ---------------------------------------------------------------------- sharing


def test_a_second_request_shares_what_the_first_commits_in_the_same_step() -> None:
    cache = PrefixCache(64, 4)
    first = cache.acquire(list(range(12)))
    first.commit(12)
    second = cache.acquire(list(range(12)))
    assert second.num_cached_tokens == 11
    assert second.block_table.tolist() == first.block_table.tolist()
    assert cache.stats.held_blocks == 3


def test_parallel_computations_are_deduped_to_one_copy() -> None:
    cache = PrefixCache(64, 4)
    tokens = list(range(10))
    leases = [cache.acquire(tokens) for _ in range(3)]
    assert cache.stats.held_blocks == 9
    assert [lease.commit(10) for lease in leases] == [0, 8, 8]
    cache.check()
    assert {tuple(lease.block_table[:2].tolist()) for lease in leases} == {tuple(leases[0].block_table[:2])}
    assert cache.stats.held_blocks == 2 + 3
    for lease in leases:
        lease.release()
    assert cache.stats.cached_blocks == 3, "the duplicates of the partial block are gone"


def test_the_work_of_identical_requests_grows_with_their_number_only() -> None:
    def work(count: int, discard: bool) -> int:
        def run() -> None:
            cache = PrefixCache(4 * count, 8)
            leases = [cache.acquire(list(range(12))) for _ in range(count)]
            for lease in leases:
                lease.commit(12)
            for token in (1, 2):
                for lease in leases:
                    lease.append([token])
                    lease.commit(lease.num_tokens)
            for lease in leases:
                lease.release(discard=discard)
            assert cache.stats.held_blocks == 0

        return count_work(run, warm_up=0).instructions

    for discard in (False, True):
        assert work(128, discard) <= 1.2 * 4 * work(32, discard)


def test_identical_requests_keep_their_partial_blocks_until_they_are_full() -> None:
    cache = PrefixCache(64, 4)
    events = Residency()
    cache.subscribe(events)
    leases = [cache.acquire(list(range(6))) for _ in range(3)]
    for lease in leases:
        lease.commit(6)
        cache.check()
    assert cache.stats.held_blocks == 4, "one whole block, and one partial one each"
    leases[0].release(discard=True)
    assert cache.match(list(range(6))).num_tokens == 6, "the others hold the same"
    assert len(events.blocks) == 2
    for lease in leases[1:]:
        lease.append([6, 7])
    assert [lease.commit(8) for lease in leases[1:]] == [0, 2]
    cache.check()
    assert cache.stats.held_blocks == 2
    assert leases[1].block_table.tolist() == leases[2].block_table.tolist()


@pytest.mark.parametrize("steps", [[6, 8], [3, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [8]])
def test_chunks_of_a_prompt_that_looked_nothing_up_are_deduped_as_they_fill_blocks(steps: list[int]) -> None:
    cache = PrefixCache(64, 4)
    table = store(cache, list(range(8)))
    bystanders = [cache.acquire(list(range(7))), cache.acquire([*range(6), 70])]
    for other in bystanders:
        other.take_copies()
        other.commit(7)
    lease = cache.acquire(list(range(8)), skip="asked for")
    assert lease.num_cached_tokens == 0
    before = 0
    for end in steps:
        redundant = lease.commit(end)
        cache.check()
        whole = end // 4 * 4
        assert redundant == max(0, whole - before), "all up to the last whole block is cached by others"
        assert lease.block_table[: whole // 4].tolist() == table[: whole // 4]
        before = end
    assert lease.block_table.tolist() == table


def test_a_growing_tail_is_shared_by_copy() -> None:
    cache = PrefixCache(64, 8)
    first = cache.acquire([1, 2, 3])
    first.commit(3)
    first.append([4])
    first.commit(4)
    second = cache.acquire([1, 2, 3, 4, 5])
    assert second.num_cached_tokens == 4
    assert second.copies == [(int(first.block_table[0]), int(second.block_table[0]), 4)]


def test_eight_samples_hold_their_own_tokens_and_one_prompt() -> None:
    cache = PrefixCache(1000, 16)
    prompt = cache.acquire(list(range(1000)))
    prompt.commit(1000)
    samples = [prompt] + [prompt.fork() for _ in range(7)]
    for step in range(100):
        for i, lease in enumerate(samples):
            lease.append([2000 + 8 * step + i])
            lease.commit(lease.num_tokens)
    cache.check()
    assert cache.stats.held_blocks * 16 <= 1000 + 8 * (100 + 16)
    tables = [lease.block_table[:62].tolist() for lease in samples]
    assert all(table == tables[0] for table in tables)


def test_a_fork_carries_uncommitted_tokens() -> None:
    cache = PrefixCache(64, 4)
    parent = cache.acquire(list(range(10)))
    child = parent.fork()
    child.commit(10)
    assert child.block_table.tolist() == parent.block_table.tolist()
    assert parent.commit(10) == 10, "the child has them in the shared blocks already"
    cache.check()
    parent.append([50])
    child.append([51])
    assert parent.block_table[2] != child.block_table[2]
    parent.commit(11)
    child.commit(11)
    cache.check()


def test_a_fork_made_before_the_copies_ran_makes_them_itself() -> None:
    cache = PrefixCache(4, 4)
    table = store(cache, [1, 2, 3, 4])
    parent = cache.acquire([1, 2, 9, 9, 5])
    child = parent.fork()
    copies = [(table[0], int(parent.block_table[0]), 2)]
    assert child.copies == parent.copies == copies
    parent.release()
    assert cache.evict(4) == 0, "the child's copy still reads the block"
    assert child.take_copies() == copies
    child.commit(5)
    assert cache.match([1, 2, 9, 9, 5]).num_tokens == 5
    cache.check()
    child.release()
    assert cache.evict(4) == 3


def test_drafts_are_given_back_with_their_blocks() -> None:
    cache = PrefixCache(16, 4)
    lease = cache.acquire(list(range(6)))
    lease.commit(6)
    table = lease.block_table.tolist()
    lease.append([10, 11, 12, 13, 14])
    assert cache.stats.held_blocks == 3
    lease.truncate(7)
    cache.check()
    assert (lease.num_tokens, lease.block_table.tolist()) == (7, table)
    assert lease.token_ids() == [*range(6), 10]
    assert cache.stats.held_blocks == 2
    lease.commit(7)
    assert cache.match([*range(6), 10, 11]).num_tokens == 7
    for wrong in (6, 8):
        with pytest.raises(LeaseError, match=f"truncate\\({wrong}\\)"):
            lease.truncate(wrong)
    lease.release()
    assert cache.stats.held_blocks == 0


def test_what_is_left_of_a_cached_block_is_copied_before_it_is_written() -> None:
    cache = PrefixCache(16, 4)
    table = store(cache, list(range(12)))
    lease = cache.acquire(list(range(12)))
    lease.truncate(11)
    cache.check()
    lease.append([50])
    assert lease.copies == [(table[2], int(lease.block_table[2]), 3)]
    assert int(lease.block_table[2]) != table[2]
    lease.commit(12)
    cache.check()
    assert cache.match(list(range(12))).num_tokens == 12
    assert cache.match([*range(11), 50]).num_tokens == 12


# ---------------------------------------------------------------------- ending


def test_discard_forgets_only_what_the_lease_contributed() -> None:
    cache = PrefixCache(64, 4)
    store(cache, list(range(8)))
    lease = cache.acquire(list(range(20)))
    lease.commit(20)
    lease.release(discard=True)
    assert cache.match(list(range(20))).num_tokens == 8
    cache.check()


def test_keep_forgets_the_rest() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(20)))
    lease.commit(20)
    lease.release(keep=10)
    assert cache.match(list(range(20))).num_tokens == 10
    assert cache.stats.cached_blocks == 3
    cache.check()


def test_discard_spares_what_others_hold() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(8)))
    lease.commit(8)
    other = cache.acquire(list(range(8)))
    lease.release(discard=True)
    assert cache.match(list(range(8))).num_tokens == 8
    other.release()
    assert cache.match(list(range(8))).num_tokens == 8


@pytest.mark.parametrize(("tokens", "keep"), [([0], 1), ([0, 5, 6, 7, 8], 1), ([0, 0, 1, 1], 4)])
def test_discard_of_tokens_that_are_not_cached_beyond_keep_forgets_nothing(
    tokens: list[int], keep: int
) -> None:
    cache = PrefixCache(64, 4)
    store(cache, [0, 0, 1, 1, 0, 1, 1, 0])
    cache.discard(tokens, keep=keep)
    assert cache.match([0, 0, 1, 1, 0, 1, 1, 0]).num_tokens == 8
    cache.discard([0, 0, 1, 1, 0], keep=2)
    assert cache.match([0, 0, 1, 1, 0, 1, 1, 0]).num_tokens == 2
    cache.check()


def test_withdraw_makes_tokens_unshareable_at_once() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(20)))
    lease.commit(10)
    lease.commit(20)
    sharer = cache.acquire(list(range(20)))
    lease.withdraw(10)
    assert lease.num_committed == 10
    assert cache.match(list(range(20))).num_tokens <= 10
    cache.check()
    sharer.append([7])
    sharer.commit(21)
    assert cache.match([*range(20), 7]).num_tokens <= 10, "what stands on withdrawn tokens is not shared"
    sharer.release()
    lease.commit(20)
    assert cache.match(list(range(20))).num_tokens == 20
    cache.check()


def test_reset_keeps_held_blocks_valid_and_private() -> None:
    cache = PrefixCache(64, 4)
    store(cache, [9] * 8)
    lease = cache.acquire(list(range(10)))
    lease.commit(10)
    table = lease.block_table.tolist()
    cache.reset()
    cache.check()
    assert cache.stats.cached_blocks == 0
    assert cache.match(list(range(10))).num_tokens == 0
    assert lease.block_table.tolist() == table
    lease.append([1, 2, 3])
    lease.commit(13)
    assert cache.match([*range(10), 1, 2, 3]).num_tokens == 0
    lease.release()
    assert cache.stats.free_blocks == 64


def test_a_lease_from_before_a_reset_shares_nothing_after_it() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(10)))
    cache.reset()
    lease.commit(10)
    assert cache.match(list(range(10))).num_tokens == 0
    lease.release()
    assert cache.stats.free_blocks == 64


@pytest.mark.parametrize("action", ["release", "fork", "truncate", "append", "commit", "withdraw"])
def test_use_after_release_names_the_lease(action: str) -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire([1, 2, 3])
    lease.release()
    calls = {
        "release": lease.release,
        "fork": lease.fork,
        "truncate": lambda: lease.truncate(2),
        "append": lambda: lease.append([1]),
        "commit": lambda: lease.commit(1),
        "withdraw": lambda: lease.withdraw(0),
    }
    with pytest.raises(LeaseError, match=f"Lease\\({lease.id}: "):
        calls[action]()


def test_commit_beyond_the_tokens_names_the_lease() -> None:
    lease = PrefixCache(64, 4).acquire([1, 2, 3])
    with pytest.raises(LeaseError, match=f"Lease\\({lease.id}: .*commit\\(4\\)"):
        lease.commit(4)


def test_a_block_whose_copy_never_ran_is_not_shared() -> None:
    cache = PrefixCache(64, 8)
    parent = cache.acquire([1, 2, 3, 4, 5])
    parent.commit(5)
    child = parent.fork()
    child.append([6])
    parent.withdraw(0)
    parent.release()
    assert len(child.copies) == 1
    child.release()
    assert cache.match([1, 2, 3, 4, 5, 6]).num_tokens == 0
    assert cache.stats.free_blocks == 64


# ---------------------------------------------------------------------- room


def test_out_of_blocks_changes_nothing() -> None:
    cache = PrefixCache(8, 4)
    store(cache, list(range(16)))
    held = cache.acquire([50] * 12)
    before = (cache.tree.show(), cache.stats.free_blocks, cache.stats.cached_blocks)
    with pytest.raises(OutOfBlocks) as error:
        cache.acquire([*range(6), *[60] * 20])
    assert (error.value.needed, error.value.available) == (6, 4)
    with pytest.raises(OutOfBlocks):
        held.append([1] * 40)
    assert (cache.tree.show(), cache.stats.free_blocks, cache.stats.cached_blocks) == before
    assert held.num_tokens == 12
    cache.check()


def test_an_acquirers_own_hits_are_never_its_victims() -> None:
    cache = PrefixCache(4, 4)
    table = store(cache, list(range(8)))
    store(cache, [70] * 8)
    lease = cache.acquire([*range(8), *[80] * 8])
    assert lease.num_cached_tokens == 8
    assert lease.block_table[:2].tolist() == table


def test_eviction_is_exact_and_takes_tails_first() -> None:
    cache = PrefixCache(64, 4)
    store(cache, list(range(40)))
    for count in (1, 3, 2):
        free = cache.stats.free_blocks
        assert cache.evict(count) == count
        assert cache.stats.free_blocks == free + count
    assert cache.match(list(range(40))).num_tokens == 16
    assert cache.evict(100) == 4
    assert cache.evict(1) == 0


class LeafLRU:
    """The reference: one entry per block, by prefix; oldest request goes first, deepest first on ties."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.time: dict[tuple[int, ...], int] = {}
        self.now = 0

    def request(self, blocks: list[int]) -> int:
        self.now += 1
        prefixes = [tuple(blocks[: i + 1]) for i in range(min(len(blocks), self.capacity))]
        hit = 0
        while hit < len(prefixes) and prefixes[hit] in self.time:
            hit += 1
        mine = set(prefixes)
        for prefix in prefixes[:hit]:
            self.time[prefix] = self.now
        for prefix in prefixes[hit:]:
            if len(self.time) >= self.capacity:
                parents = {p[:-1] for p in self.time}
                leaves = [p for p in self.time if p not in parents and p not in mine]
                del self.time[min(leaves, key=lambda p: (self.time[p], -len(p)))]
            self.time[prefix] = self.now
        return hit


@pytest.mark.parametrize("seed", range(6))
def test_lru_equals_a_block_by_block_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(4, 40))
    cache, reference = PrefixCache(capacity, 1), LeafLRU(capacity)
    for _ in range(600):
        tokens = rng.integers(0, 3, int(rng.integers(1, 12))).tolist()[:capacity]
        expected = reference.request(tokens)
        assert cache.match(tokens).num_tokens == expected
        lease = cache.acquire(tokens)
        lease.commit(len(tokens))
        lease.release()
    cache.check()


def test_a_disabled_cache_matches_and_keeps_nothing() -> None:
    cache = PrefixCache(16, 4, enabled=False)
    store(cache, list(range(8)))
    assert cache.stats.free_blocks == 16
    lease = cache.acquire(list(range(8)))
    assert lease.num_cached_tokens == 0
    assert lease.report.reason == "skipped"


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


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 0},
        {"num_blocks": 4, "block_size": 0},
        {"num_blocks": 4, "policy": "best"},
        {"num_blocks": 4, "pin_budget": 2.0},
        {"num_blocks": 4, "ghost_blocks": -1},
        {"num_blocks": 4, "quotas": {"a": (3, None), "b": (3, None)}},
        {"num_blocks": 4, "quotas": {"a": (3, 2)}},
    ],
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        PrefixCache(**options)  # type: ignore[arg-type]


def test_reprs_are_one_line() -> None:
    cache = PrefixCache(64, 4)
    lease = cache.acquire(list(range(6)))
    lease.commit(6)
    assert repr(lease) == "Lease(1: 6 tokens, 0 cached, 6 committed, 2 blocks)"
    assert "62 free, 0 cached, 2 held" in repr(cache)
    assert repr(cache.match([0, 1])) == "Match(2 of 2 tokens)"
    assert cache.tree.show().splitlines()[1].strip() == "0..6 [0 1 2 3 ..] 2 blocks, 1 refs"
    assert len(cache.tree.show(max_lines=1).splitlines()) == 2


# ---------------------------------------------------------------------- reset


def filled(num_prompts: int) -> PrefixCache:
    """A cache with prompts of three blocks, of which ten share the first one each."""
    cache = PrefixCache(3 * num_prompts, 2)
    for i in range(num_prompts):
        lease = cache.acquire([i // 10, 0, 10_000 + i, 1, 2, 3])
        lease.commit(6)
        lease.release()
    return cache


def test_a_reset_takes_as_long_for_many_nodes_as_for_few() -> None:
    def work(num_prompts: int) -> Work:
        cache = filled(num_prompts)
        held = [cache.acquire([i, 0, 10_000 + 10 * i, 1, 9]) for i in range(4)]
        work = count_work(cache.reset, warm_up=0)
        cache.check()
        for lease in held:
            lease.release()
        return work

    few, many = work(40), work(1000)
    assert many.instructions <= 1.2 * few.instructions
    assert many.c_calls <= 1.2 * few.c_calls


def test_what_a_reset_leaves_is_free_and_explained_while_it_is_used_again() -> None:
    cache = filled(40)
    held = cache.acquire([3, 0, 10_030, 1, 2, 3])
    table = held.block_table.tolist()
    pinned = [2, 0, 10_020, 1, 2, 3]
    assert cache.pin(pinned) == 6
    cache.reset()
    cache.check()
    assert cache.stats.free_blocks == cache.num_blocks - 3
    assert cache.stats.num_nodes == cache.stats.num_pins == cache.stats.cached_blocks == 0
    leases = []
    for i in range(38):  # three blocks each: in the end nearly all of them are in use
        assert cache.explain([i // 10, 0, 10_000 + i, 1, 2, 3]).reason == "reset"
        lease = cache.acquire([20_000 + i] * 6)
        assert cache.stats.free_blocks == cache.num_blocks - 3 * (i + 2)
        assert set(lease.block_table.tolist()).isdisjoint(table)
        lease.commit(6)
        leases.append(lease)
        cache.check()
    assert cache.acquire([1, 5]).report.reason == "first_seen"
    with pytest.raises(OutOfBlocks):
        cache.acquire([1] * 7)
    for lease in [*leases, held]:
        lease.release()
    cache.check()


def test_a_reset_is_told_apart_from_evictions_before_and_after_it() -> None:
    cache = PrefixCache(16, 4)
    store(cache, list(range(8)))
    cache.evict(1)
    cache.reset()
    assert cache.explain([0, 1, 2, 3, 9]).reason == "reset"
    assert cache.explain(list(range(8))).reason == "reset"
    store(cache, list(range(8)))
    cache.evict(2)
    assert cache.explain(list(range(8))).reason == "evicted"
    cache.reset()
    assert cache.explain(list(range(8))).reason == "evicted"


def test_the_tokens_of_a_reset_are_forgotten_like_those_of_evictions() -> None:
    cache = PrefixCache(16, 1, ghost_blocks=24)
    store(cache, list(range(8)))
    cache.reset()
    gc.collect()
    before = sum(type(thing) is Node for thing in gc.get_objects())
    for i in range(12):
        assert cache.explain(list(range(8))).reason == "reset"
        store(cache, [100 + 2 * i, 101 + 2 * i])
        cache.evict(2)
    assert cache.explain(list(range(8))).reason == "first_seen"
    store(cache, [1])
    cache.evict(1)
    after = sum(type(thing) is Node for thing in gc.get_objects())
    assert after < before


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_goes_on_after_a_reset(policy: str) -> None:
    cache = PrefixCache(12, 2, policy)
    for round_number in range(3):
        for i in range(20):
            lease = cache.acquire([i % 3, 0, i, i, 5])
            lease.commit(5)
            lease.release()
            cache.check()
        cache.reset()
        cache.check()
        assert cache.stats.resets == round_number + 1
