# SPDX-License-Identifier: Apache-2.0
"""Blocks that are filled and copied out, driven by hypothesis against a memory that remembers contents."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from nightly import tried

from radixkv import OutOfBlocks, PrefixCache

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
NAMESPACES = st.sampled_from(["", "tenant", ("tenant", "salt")])
Text = tuple[int, ...]


class BlockMoves(RuleBasedStateMachine):
    """Requests, loads, saves and all that may come between; the memory says what each block holds."""

    requests = Bundle("requests")
    loads = Bundle("loads")
    saves = Bundle("saves")

    @initialize(
        blocks=st.sampled_from([4, 7, 12]),
        size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(["lru", "benchmarks.s3fifo:S3FIFO", "adaptive"]),
        constant_hash=st.booleans(),
        quota=st.sampled_from([None, (2, 4), (0, 3)]),
        public=st.none() | TOKENS,
    )
    def start(
        self,
        blocks: int,
        size: int,
        policy: str,
        constant_hash: bool,
        quota: tuple[int, int] | None,
        public: list[int] | None,
    ) -> None:
        options: dict[str, Any] = {"policy": policy}
        if constant_hash:
            options["hash_function"] = lambda data: 0
        if quota is not None:
            options["quotas"] = {"tenant": quota}
        self.size = size
        self.cache = PrefixCache(blocks, size, **options)
        if public is not None:
            self.cache.publish(public)
        self.memory: dict[int, Text] = {}  # block -> the text up to its end

    def write(self, lease: Any, tokens: Text, first: int, stop: int) -> None:
        """Blocks [first, stop) of a lease get their contents."""
        for i in range(first, stop):
            self.memory[int(lease.block_table[i])] = tokens[: (i + 1) * self.size]

    def is_in_memory(self, lease: Any, tokens: Text, first: int, stop: int) -> None:
        for i in range(first, stop):
            expected = tokens[: (i + 1) * self.size]
            assert self.memory[int(lease.block_table[i])][: len(expected)] == expected

    # ------------------------------------------------------------------ requests

    @rule(target=requests, tokens=TOKENS, namespace=NAMESPACES, commits=st.booleans())
    def request(self, tokens: list[int], namespace: Any, commits: bool) -> Any:
        text = tuple(tokens)
        try:
            lease = self.cache.acquire(tokens, namespace)
        except OutOfBlocks:
            return multiple()
        whole = lease.num_cached_tokens // self.size
        self.is_in_memory(lease, text, 0, whole)
        lease.take_copies(until_done=True)
        self.write(lease, text, whole, -(-len(text) // self.size))
        lease.copies_done()
        if commits:
            lease.commit(len(text))
        return lease, text

    @rule(request=consumes(requests), discard=st.booleans())
    def end_request(self, request: Any, discard: bool) -> None:
        lease, text = request
        self.is_in_memory(lease, text, 0, len(text) // self.size)
        lease.release(discard=discard)

    @rule(request=requests, tokens=st.integers(0, 14))
    def roll_back(self, request: Any, tokens: int) -> None:
        request[0].rollback(tokens)

    # ------------------------------------------------------------------ loads

    @rule(target=loads, tokens=TOKENS, namespace=NAMESPACES, most=st.integers(1, 14))
    def begin_load(self, tokens: list[int], namespace: Any, most: int) -> Any:
        match = self.cache.match(tokens, namespace)
        run = self.cache.block_leases.missing(match)
        assert match.num_tokens - self.size < run.start <= match.num_tokens
        if not len(run):
            return multiple()
        run = run.part(0, min(most, len(run)))
        free = self.cache.available_blocks(namespace)
        try:
            lease = self.cache.block_leases.reserve(run, match)
        except OutOfBlocks:
            assert free < len(run) + run.start // self.size
            return multiple()
        assert len(lease.block_table) == run.end // self.size
        assert run.start <= self.cache.match(tokens, namespace).num_tokens <= match.num_tokens
        return lease, run, tuple(tokens)[: run.end]

    @rule(load=consumes(loads), share=st.floats(0, 1))
    def end_load(self, load: Any, share: float) -> None:
        """All of the blocks have arrived, or some, or none."""
        lease, run, text = load
        first, count = run.start // self.size, round(share * len(run))
        if count and lease.shares:
            self.write(lease, text, first, first + count)
            lease.commit(run.start + count * self.size)
            lease.release()
        else:
            lease.release()

    # ------------------------------------------------------------------ saves

    @rule(target=saves, tokens=TOKENS, namespace=NAMESPACES, which=st.integers(0, 9), some=st.integers(1, 14))
    def begin_save(self, tokens: list[int], namespace: Any, which: int, some: int) -> Any:
        runs = self.cache.block_leases.cached_runs(tokens, namespace)
        assert sum(len(run) for run in runs) * self.size <= self.cache.match(tokens, namespace).num_tokens
        position = 0
        for run in runs:
            assert run.start == position
            assert len(run)
            position = run.end
        if not runs:
            return multiple()
        run = runs[which % len(runs)]
        run = run.part(max(0, len(run) - some), len(run))
        lease = self.cache.block_leases.hold(run, tokens, namespace)
        assert lease is not None
        assert len(lease.block_table) == run.end // self.size
        return lease, run, tuple(tokens)[: run.end]

    @rule(save=consumes(saves))
    def end_save(self, save: Any) -> None:
        lease, run, text = save
        self.is_in_memory(lease, text, run.start // self.size, run.end // self.size)
        lease.release(used=False)

    # ------------------------------------------------------------------ others

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    @rule()
    def reset(self) -> None:
        self.cache.reset()

    @rule(tokens=TOKENS)
    def publish(self, tokens: list[int]) -> None:
        self.cache.publish(tokens)

    @rule(tokens=TOKENS)
    def unpublish(self, tokens: list[int]) -> None:
        self.cache.unpublish(tokens)

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def pin(self, tokens: list[int], namespace: Any) -> None:
        self.cache.pin(tokens, namespace)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()


class TestBlockMoves(BlockMoves.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=tried(60), stateful_step_count=40)


def test_what_is_missing_of_public_text_is_public() -> None:
    cache = PrefixCache(20, 4)
    cache.publish(list(range(8)))
    run = cache.block_leases.missing(cache.match(list(range(12)), "tenant"))
    assert (run.is_public, run.start, run.end) == (True, 0, 8)


def test_of_a_run_that_was_evicted_in_part_the_rest_is_held() -> None:
    cache = PrefixCache(20, 4)
    run = cache.block_leases.missing(cache.match(list(range(12))))
    lease = cache.acquire(list(range(8)))
    lease.commit(8)
    lease.release()
    held = cache.block_leases.hold(run, list(range(12)), "")
    assert held is not None
    assert held.num_tokens == 8
    held.release(used=False)
    cache.check()
