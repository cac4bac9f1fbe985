# SPDX-License-Identifier: Apache-2.0
"""Every miss has a reason, and it is the right one; and what follows events knows what is cached."""

from __future__ import annotations

import numpy as np
import pytest
from stored_prompts import store
from waiting import Clock

from radixkv import PrefixCache
from radixkv.cache.reporting.reasons import REASONS
from radixkv.observe.advisor import Advisor
from radixkv.observe.residency import Residency


def reason(cache: PrefixCache, tokens: list[int], namespace: str = "") -> str:
    """The reason as a dry run gives it and as a lease carries it: they must agree."""
    dry = cache.explain(tokens, namespace)
    lease = cache.acquire(tokens, namespace)
    report = lease.report
    lease.release(discard=True)
    assert (dry.reason, dry.num_hit_tokens, dry.diverged_at) == (
        report.reason,
        report.num_hit_tokens,
        report.diverged_at,
    )
    assert dry.age_s == pytest.approx(report.age_s, abs=5)
    assert report.reason in REASONS
    assert report.detail.endswith(".")
    assert report.to_dict()["reason"] == report.reason
    return report.reason


PROMPT = list(range(100, 130))


def test_first_seen() -> None:
    cache = PrefixCache(64, 4)
    assert reason(cache, PROMPT) == "first_seen"
    store(cache, PROMPT)
    assert reason(cache, [*PROMPT, 1, 2, 3]) == "first_seen", "nothing goes on after the cached prompt"
    assert reason(cache, [7] * 10) == "first_seen", "nothing begins like this"


def test_hit() -> None:
    cache = PrefixCache(64, 4)
    store(cache, PROMPT)
    assert reason(cache, PROMPT) == "hit"
    assert reason(cache, PROMPT[:9]) == "hit"
    assert reason(cache, [*PROMPT[:8], 1]) == "hit", "only the token that is always computed is new"


@pytest.mark.parametrize("at", [1, 3, 4, 5, 8, 17, 27])
def test_diverged_says_where_and_against_what(at: int) -> None:
    cache = PrefixCache(64, 4)
    store(cache, PROMPT)
    new = [*PROMPT[:at], 9, 9, *PROMPT[at + 2 :]]
    assert reason(cache, new) == "diverged"
    report = cache.explain(new)
    assert report.diverged_at == report.num_hit_tokens == at
    assert report.cached_tokens_after == PROMPT[at : at + len(report.cached_tokens_after)]
    assert report.cached_tokens_after
    assert report.new_tokens_after == new[at : at + 48]
    assert str(at) in report.detail


def test_diverged_after_a_shared_prefix_with_many_branches() -> None:
    cache = PrefixCache(640, 4)
    for i in range(50):
        store(cache, [*PROMPT[:8], i, *range(500, 510)])
    report = cache.explain([*PROMPT[:8], 77, 1, 2])
    assert (report.reason, report.diverged_at) == ("diverged", 8)


@pytest.mark.parametrize("tokens", [30, 28, 29, 4, 3])
@pytest.mark.parametrize("left", [0, 1, 3])
def test_evicted_with_age_and_cause(tokens: int, left: int) -> None:
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    prompt = PROMPT[:tokens]
    blocks = -(-tokens // 4)
    store(cache, prompt)
    cache.evict(max(1, blocks - left))
    clock.now += 12.5
    assert reason(cache, prompt) == "evicted"
    report = cache.explain(prompt)
    assert report.age_s == 12.5
    assert report.evicted_by == "evict()"
    assert report.num_hit_tokens == 4 * (blocks - max(1, blocks - left))


def test_evicted_partial_block_of_a_conversation_that_goes_on() -> None:
    cache = PrefixCache(64, 4)
    store(cache, PROMPT)
    cache.evict(1)
    assert reason(cache, [*PROMPT, *range(8)]) == "evicted"
    assert reason(cache, [*PROMPT[:28], 1, 2, 3, 4, 5]) == "first_seen", "another continuation"


def test_evicted_by_capacity() -> None:
    cache = PrefixCache(10, 4)
    store(cache, PROMPT)
    for i in range(10):
        store(cache, [i] * 12)
    assert reason(cache, PROMPT) == "evicted"
    assert cache.explain(PROMPT).evicted_by == "capacity"


def test_the_same_block_after_another_prefix_was_not_evicted() -> None:
    cache = PrefixCache(3000, 4)
    tail = list(range(40))
    long_a, long_b = [1] * 8000, [2] * 8000
    store(cache, [*long_a, *tail])
    cache.evict(10)
    store(cache, long_b[:100])
    cache.evict(0)
    assert reason(cache, [*long_a, *tail]) == "evicted"
    assert reason(cache, [*long_b[:100], *tail]) == "first_seen"


def test_expired_only_if_nothing_renewed_it() -> None:
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    for renewed in (False, True):
        store(cache, PROMPT)
        cache.pin(PROMPT, ttl=5.0)
        clock.now += 6
        if renewed:
            cache.acquire(PROMPT).release()
        cache.evict(64)
        assert reason(cache, PROMPT) == ("evicted" if renewed else "expired")
        cache.reset()


def test_reset() -> None:
    cache = PrefixCache(64, 4)
    store(cache, PROMPT)
    cache.reset()
    assert reason(cache, PROMPT) == "reset"
    assert cache.explain(PROMPT).evicted_by == "reset()"
    assert reason(cache, [5] * 8) == "first_seen"


def test_another_namespace_is_told_to_administrators_only() -> None:
    cache = PrefixCache(64, 4)
    store(cache, PROMPT, "alice")
    store(cache, PROMPT[:8], "bob")
    assert reason(cache, PROMPT, "bob") == "first_seen"
    assert cache.explain(PROMPT, "bob", admin=True).reason == "namespace"
    assert cache.explain(PROMPT, "nobody", admin=True).reason == "namespace"
    assert cache.explain([3] * 8, "bob", admin=True).reason == "first_seen"
    assert cache.explain(PROMPT, "alice", admin=True).reason == "hit"
    cache.evict(64)
    assert cache.explain(PROMPT, "carol", admin=True).reason == "first_seen", "ghosts are not shared either"
    assert cache.explain(PROMPT, "alice").reason == "evicted"


def test_partial_block() -> None:
    cache = PrefixCache(64, 4, partial_reuse=False)
    store(cache, PROMPT)
    assert reason(cache, [*PROMPT[:10], 1, 2, 3]) == "partial_block"
    tight = PrefixCache(2, 4)
    store(tight, [1, 2, 3, 4])
    lease = tight.acquire([1, 2, 9, 9, 9, 9, 9, 9])
    assert lease.report.reason == "partial_block", "the block to copy from had to make room"
    assert lease.num_cached_tokens == 0


def test_skipped() -> None:
    cache = PrefixCache(64, 4)
    store(cache, PROMPT)
    lease = cache.acquire(PROMPT, skip="prompt_logprobs")
    assert lease.num_cached_tokens == 0
    assert lease.report.reason == "skipped"
    assert "prompt_logprobs" in lease.report.detail
    assert PrefixCache(8, enabled=False).explain(PROMPT).reason == "skipped"


def test_an_eviction_outranks_a_sibling() -> None:
    cache = PrefixCache(64, 4)
    store(cache, [*PROMPT[:8], *[1] * 4])
    cache.evict(1)
    store(cache, [*PROMPT[:8], *[2] * 4])
    assert reason(cache, [*PROMPT[:8], *[1] * 4]) == "evicted"
    assert reason(cache, [*PROMPT[:8], *[3] * 4]) == "diverged"


def test_a_report_read_late_tells_of_the_acquire() -> None:
    clock = Clock()
    cache = PrefixCache(64, 4, clock=clock)
    lease = cache.acquire(PROMPT)
    lease.commit(30)
    lease.release()
    clock.now += 1
    cache.evict(64)
    assert lease.report.reason == "first_seen"


def test_the_ghost_index_is_bounded_and_can_be_off() -> None:
    for ghosts in (0, 5):
        cache = PrefixCache(64, 4, ghost_blocks=ghosts)
        for i in range(20):
            store(cache, [i] * 12)
            cache.evict(64)
        assert cache.stats.ghost_blocks == ghosts
        assert reason(cache, [0] * 12) == "first_seen"
        assert reason(cache, [19] * 12) == ("evicted" if ghosts else "first_seen")


def test_a_follower_rebuilds_residency_from_events() -> None:
    cache = PrefixCache(30, 4)
    store(cache, PROMPT, "early")
    follower, events = Residency(), []
    cache.subscribe(follower)
    stop = cache.subscribe(events.append, replay=False)
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, 2, int(rng.integers(1, 20))).tolist()
        lease = cache.acquire(tokens, "late")
        lease.commit(len(tokens))
        lease.append([1])
        lease.commit(lease.num_tokens)
        lease.release(discard=bool(rng.integers(0, 5) == 0))
        for namespace, prefix in follower.prefixes():
            assert cache.match(list(prefix), namespace).num_tokens == len(prefix)
        assert all(len(block.token_ids) == 4 for block in follower.blocks.values())
        assert cache.stats.num_nodes == 0 or follower.blocks
    assert [e.sequence for e in events] == list(range(events[0].sequence, events[0].sequence + len(events)))
    assert any(e.stored for e in events)
    assert any(e.removed for e in events)
    assert not any(e.cleared for e in events)
    cache.reset()
    assert follower.blocks == {}
    assert events[-1].cleared
    stop()
    seen = len(events)
    store(cache, PROMPT)
    assert len(events) == seen


def test_the_advisor_finds_the_timestamp_in_the_system_prompt() -> None:
    advisor = Advisor(16)
    cache = PrefixCache(2000, 16, observer=advisor)
    rng = np.random.default_rng(0)
    system = rng.integers(100, 30000, 400).tolist()
    for i in range(40):
        store(cache, [*system[:41], 50 + i, 51 + i, *system[43:], *rng.integers(0, 99, 20).tolist()])
        other = rng.integers(100, 30000, 60).tolist()
        store(cache, [7, 7, 7, 7, *other])
    best = advisor.advice()[0]
    assert best.position == 41
    assert best.count == 39
    assert best.group_tokens == tuple(system[:4])
    assert 39 * 350 <= best.recoverable_tokens <= 39 * 400
    assert "41" in best.advice
