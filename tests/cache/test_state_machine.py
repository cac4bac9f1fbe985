# SPDX-License-Identifier: Apache-2.0
"""The cache against the model, driven by hypothesis: operations, pools and hashes of its choosing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from cache_model import ModelledCache, Run
from fuzz import DAMAGES, Fuzzer, fuzz
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from nightly import by_day

from benchmarks.classic_policies import NAMES
from radixkv import PrefixCache
from radixkv.cache.eviction.registry import POLICIES

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
NAMESPACES = st.sampled_from(["", "tenant", ("tenant", "salt")])


class CacheMachine(RuleBasedStateMachine):
    """Every public operation, in any order; exhaustion comes by itself, the pools are tiny."""

    runs = Bundle("runs")

    @initialize(
        blocks=st.sampled_from([5, 9, 16]),
        size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from([*sorted(POLICIES), *NAMES]),
        constant_hash=st.booleans(),
        quota=st.sampled_from([None, (2, 4), (0, 3)]),
        events=st.booleans(),
        public=st.none() | TOKENS,
    )
    def start(
        self,
        blocks: int,
        size: int,
        policy: str,
        constant_hash: bool,
        quota: tuple[int, int] | None,
        events: bool,
        public: list[int] | None,
    ) -> None:
        options: dict[str, object] = {"policy": policy}
        if constant_hash:
            options["hash_function"] = lambda data: 0
        if quota is not None:
            options["quotas"] = {"tenant": quota}
        self.model = ModelledCache(blocks, size, **options)
        if public is not None:
            self.model.publish(public)
        if events and not constant_hash:  # followers have nothing but the hashes
            self.model.follow_events()

    @rule(
        target=runs,
        tokens=TOKENS,
        namespace=NAMESPACES,
        use_match=st.booleans(),
        step=st.booleans(),
        skip=st.booleans(),
    )
    def acquire(self, tokens: list[int], namespace: str, use_match: bool, step: bool, skip: bool) -> object:
        run = self.model.acquire(tokens, namespace, use_match, skip)
        if run is None:
            return multiple()
        if step:
            self.model.commit(run, len(tokens))
        return run

    @rule(run=runs, share=st.floats(0, 1))
    def commit(self, run: Run, share: float) -> None:
        if run in self.model.runs:
            missing = len(run.tokens) - run.committed
            self.model.commit(run, run.committed + round(missing * share))

    @rule(run=runs, tokens=TOKENS)
    def append(self, run: Run, tokens: list[int]) -> None:
        if run in self.model.runs:
            self.model.append(run, tokens)

    @rule(run=runs, share=st.floats(0, 1))
    def truncate(self, run: Run, share: float) -> None:
        if run in self.model.runs:
            missing = len(run.tokens) - run.committed
            self.model.truncate(run, run.committed + round(missing * share))

    @rule(run=runs, token=st.integers(0, 2))
    def decode(self, run: Run, token: int) -> None:
        if run in self.model.runs and self.model.append(run, [token]):
            self.model.commit(run, len(run.tokens))

    @rule(target=runs, run=runs)
    def fork(self, run: Run) -> object:
        return self.model.fork(run) if run in self.model.runs else multiple()

    @rule(run=consumes(runs), discard=st.booleans(), keep=st.none() | st.integers(0, 20))
    def release(self, run: Run, discard: bool, keep: int | None) -> None:
        if run in self.model.runs:
            self.model.release(run, discard, keep)

    @rule(run=runs, share=st.floats(0, 1))
    def rollback(self, run: Run, share: float) -> None:
        if run in self.model.runs:
            self.model.rollback(run, int(run.committed * share))

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        self.model.evict(count)

    @rule(tokens=TOKENS, namespace=NAMESPACES, ttl=st.none() | st.sampled_from([1.0, 20.0]))
    def pin(self, tokens: list[int], namespace: str, ttl: float | None) -> None:
        self.model.pin(tokens, namespace, ttl)

    @rule(seconds=st.sampled_from([0.5, 5.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.model.clock.now += seconds

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def match(self, tokens: list[int], namespace: str) -> None:
        self.model.match(tokens, namespace)
        self.model.cache.explain(tokens, namespace, admin=True)

    @rule()
    def reset(self) -> None:
        self.model.reset()

    @rule(tokens=TOKENS, namespace=NAMESPACES, keep=st.integers(0, 14))
    def discard(self, tokens: list[int], namespace: str, keep: int) -> None:
        self.model.discard(tokens, namespace, min(keep, len(tokens)))

    @rule(damage=st.none() | st.sampled_from(DAMAGES))
    def rebuild(self, damage: Callable[[PrefixCache], None] | None) -> None:
        self.model.rebuilt(damage if self.model.residency is None and self.model.runs else None)

    @invariant()
    def verify(self) -> None:
        if hasattr(self, "model"):
            self.model.verify()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.drain()


CacheMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("policy", by_day([*sorted(POLICIES), *NAMES], *sorted(POLICIES)))
def test_random_walks(policy: str) -> None:
    outcomes = fuzz(1500, seed=len(policy), walk=500, policy=policy)
    assert outcomes.total() == 1500


def test_walks_come_by_every_outcome() -> None:
    outcomes = fuzz(6000, seed=1, walk=600)
    for name in (
        *("acquire: hit", "acquire: miss", "acquire: out of blocks", "append: out of blocks", "fork", "pin"),
        *("release: discard", "release: keep some", "rollback", "evict: all there was", "reset", "rebuilt"),
        *("rebuilt: was damaged", "discard: something", "match: hit", "unpin", "time passes"),
    ):
        assert outcomes[name], f"no {name}"


def test_the_same_seed_walks_the_same_way() -> None:
    def trail() -> str:
        fuzzer = Fuzzer(11)
        for _ in range(300):
            fuzzer.step()
        return repr(fuzzer.model.cache) + fuzzer.model.cache.tree.show()

    random.seed(1)
    assert trail() == trail()
