# SPDX-License-Identifier: Apache-2.0
"""Requests with the same tokens share blocks: in one step, later, as forks, and with drafts."""

from __future__ import annotations

import pytest
from measuring import count_work
from stored_prompts import store_checked as store

from radixkv import LeaseError, PrefixCache
from radixkv.observe.residency import Residency


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
    assert len(events.blocks) == 1, "followers are told of whole blocks only"
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


def test_a_fork_that_follows_into_the_tree_copies_nothing_into_a_block_that_it_no_longer_has() -> None:
    cache = PrefixCache(16, 4)
    store(cache, [0, 1, 9, 9])
    parent = cache.acquire([0, 1, 1, 1, 2, 2, 2, 2, 3])
    child = parent.fork()
    ((_, target, _),) = child.copies
    store(cache, [0, 1, 1, 1])  # somebody else computed the block that both copied to
    assert parent.take_copies()
    parent.commit(8)
    assert target not in child.block_table.tolist(), "it follows its parent"
    assert not child.copies, "the block may be anybody's by now"
    cache.check()
    child.commit(9)
    assert child.block_table.tolist()[:2] == parent.block_table.tolist()[:2]
    child.release()
    parent.release()
    cache.check()
