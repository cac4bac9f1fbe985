# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in the tree: where they hang, which go, and that slots are never lost or mixed up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixkv import PrefixCache
from radixkv.cache.keys import decode_tokens, encode_tokens
from radixkv.cache.states.checkpoint import GRID
from radixkv.cache.states.window_pool import WindowSpec
from radixkv.errors import ConfigError, OutOfBlocks

TEXT = [[seed * 7 + i * (seed + 3) % 5 for i in range(512)] for seed in range(2)]


class Model:
    """A cache, and what a runner would have in each slot: the tokens that it sums up."""

    def __init__(self, num_slots: int, *, num_blocks: int = 64, block_size: int = 16, **options: Any) -> None:
        self.cache = PrefixCache(num_blocks, block_size, num_state_slots=num_slots, **options)
        self.contents: dict[int, list[int]] = {}

    def begin(self, tokens: list[int], namespace: str = "") -> Any:
        lease: Any = self.cache.acquire(tokens, namespace)
        assert lease.states.base.position == lease.resume_at <= lease.num_cached_tokens
        if lease.resume_at:
            assert self.contents[lease.states.base.slot] == tokens[: lease.resume_at]
        return lease

    def compute(self, lease: Any, end: int | None = None) -> None:
        """One step up to token `end`."""
        end = lease.num_tokens if end is None else end
        lease.commit(end)
        step = lease.states.plan(end)
        assert step is not None, "two slots a request are not enough"
        tokens = lease.token_ids()
        for position, slot in [*step.saves, *([step.target] if step.target is not step.base else [])]:
            self.contents[slot] = tokens[:position]
        lease.states.step_done(lease, end)

    def fail(self, lease: Any) -> None:
        """A step with all of the lease's tokens that fails."""
        assert lease.states.plan(lease.num_tokens) is not None
        lease.states.step_failed()

    def run(self, tokens: list[int], namespace: str = "") -> int:
        """A request from its begin to its end; the tokens that it need not compute."""
        lease = self.begin(tokens, namespace)
        self.compute(lease)
        found: int = lease.resume_at
        lease.release()
        self.check()
        return found

    def at(self) -> set[int]:
        """The lengths of all checkpoints."""
        return {checkpoint.end for checkpoint in self.cache.states or ()}

    def check(self) -> None:
        self.cache.check()
        tree = self.cache.tree.index
        for checkpoint in self.cache.states or ():
            assert checkpoint.node is not None
            path = b"".join(node.key for node in tree.path(checkpoint.node))
            tokens = encode_tokens(self.contents[checkpoint.slot])
            assert path[: 4 * checkpoint.end] == tokens, f"{checkpoint!r} sums up other tokens"


def test_a_prompt_leaves_a_state_at_its_last_grid_point() -> None:
    model = Model(8)
    assert model.run(TEXT[0][:200]) == 0
    assert model.at() == {192}
    assert model.run(TEXT[0][:200]) == 192
    assert model.run(TEXT[0][:300]) == 192
    assert model.at() == {192, 256}


def test_a_prompt_that_ends_on_the_grid_leaves_its_end_and_the_point_before() -> None:
    model = Model(8)
    model.run(TEXT[0][:128])
    assert model.at() == {64, 128}
    for _ in range(2):
        assert model.run(TEXT[0][:128]) == 64  # the last token is always computed
    assert not any(c.is_superseded for c in model.cache.states or ())  # the next one resumes there, too
    assert model.run(TEXT[0][:129]) == 128


def test_where_prompts_part_is_kept_at_second_sight() -> None:
    model = Model(8)
    model.run(TEXT[0][:300])
    other = TEXT[0][:200] + TEXT[1][:100]
    assert model.run(other) == 0
    assert model.at() == {256, 192}  # 192 for both: the other prompt's end is at 256, too
    end = next(c for c in model.cache.states or () if c.end == 256 and c.base)
    assert end.base == 192  # without this prompt's end, only what follows the other point is computed again
    assert model.run(TEXT[0][:200] + [99] * 50) == 192


def test_a_hit_that_goes_on_supersedes_and_a_second_way_makes_a_junction() -> None:
    model = Model(8)
    model.run(TEXT[0][:130])
    first = next(iter(model.cache.states or ()))
    assert not first.is_superseded
    model.run(TEXT[0][:300])
    assert first.is_superseded
    deeper = next(c for c in model.cache.states or () if c.end == 256)
    assert deeper.base == 0  # not 128: that one is superseded
    model.run(TEXT[0][:130] + TEXT[1][:100])
    assert not first.is_superseded
    third = next(c for c in model.cache.states or () if c.end == 192)
    assert third.base == 128


def test_the_cheapest_goes_first_and_never_one_that_a_request_holds() -> None:
    model = Model(4, num_blocks=200)
    running = model.begin(TEXT[0][:70])
    model.compute(running)  # holds the state at 64
    model.run([1] * 450)
    model.run([2] * 450)
    model.run([3] * 80)
    model.run([4] * 450)  # evicts the one at 64 of the third prompt
    assert sorted(c.end for c in model.cache.states or ()) == [64, 448, 448, 448]
    assert model.contents[running.states.base.slot] == TEXT[0][:64]
    running.release()
    model.run([5] * 450)
    assert sorted(c.end for c in model.cache.states or ()) == [448] * 4
    assert model.cache.states is not None
    assert model.cache.states.num_evicted == 2


def test_slots_for_the_next_step_are_freed_while_the_last_one_counts() -> None:
    model = Model(32, num_blocks=2000)
    for i in range(40):
        model.run([i] * 450)
    assert len(model.cache.states or ()) == 30
    assert model.run([39] * 450) == 448
    lease = model.begin([39] * 449 + [7] * 200)
    model.compute(lease)
    lease.release()
    model.check()
    assert len(model.cache.states or ()) == 30


def test_pinned_checkpoints_go_last() -> None:
    model = Model(3, num_blocks=200)
    model.run([1] * 80)
    assert model.cache.pin([1] * 80) is not None
    for token in (2, 3, 4):
        model.run([token] * 450)
    assert 64 in model.at()


def test_a_quota_is_one_of_states_too() -> None:
    model = Model(10, num_blocks=100)
    model.cache.set_quotas({"a": (0, 40)})
    for token in range(1, 10):
        model.run([token] * 80, "a")
    mine = [c for c in model.cache.states or () if c.node and c.node.owner.key[0] == "a"]
    assert len(mine) == 4


def test_forks_share_their_base_and_what_follows_is_their_own() -> None:
    model = Model(8)
    lease = model.begin(TEXT[0][:100])
    model.compute(lease)
    fork = lease.fork()
    assert fork.states.base == lease.states.base
    assert fork.resume_at == 64
    for each, token in ((lease, 1), (fork, 2)):
        each.append([token] * 60)
        each.take_copies()
        model.compute(each)
    assert model.contents[lease.states.base.slot] == lease.token_ids()[:128]
    assert model.contents[fork.states.base.slot] == fork.token_ids()[:128]
    model.check()
    lease.release()
    fork.release()
    model.check()
    assert model.at() == {64, 128}


def test_a_failed_step_frees_its_target_and_keeps_the_base() -> None:
    model = Model(2)
    lease = model.begin(TEXT[0][:300])
    model.compute(lease, 100)
    base = lease.states.base
    for _ in range(5):
        lease.commit(200)
        assert lease.states.plan(200) is not None
        lease.states.step_failed()
        lease.rollback(100)
        model.check()
    assert lease.states.base == base
    lease.release()
    assert model.at() == {64}


def test_explain_says_no_state() -> None:
    model = Model(2, num_blocks=200)
    model.run(TEXT[0][:300])
    model.run([7] * 450)
    model.run([8] * 450)  # both slots are these prompts' now
    report = model.cache.explain(TEXT[0][:300])
    assert (report.reason, report.num_hit_tokens, report.num_kv_tokens) == ("no_state", 0, 288)
    assert "K/V of 288 tokens is here, the nearest checkpoint is at 0" in report.detail
    lease = model.begin(TEXT[0][:300])
    assert lease.report.reason == "no_state"
    assert lease.num_cached_tokens == 288
    assert lease.resume_at == 0
    model.compute(lease)
    lease.release()
    assert model.cache.explain(TEXT[0][:300]).reason == "hit"
    assert model.cache.explain(TEXT[0][:280] + [9] * 20).num_hit_tokens == 256


def test_a_reset_forgets_states_but_those_of_running_requests() -> None:
    model = Model(6)
    model.run(TEXT[1][:200])
    lease = model.begin(TEXT[0][:200])
    model.compute(lease, 150)
    model.cache.reset()
    model.check()
    assert not model.at()
    model.compute(lease)
    lease.release()
    model.check()
    assert not model.at()


@pytest.mark.parametrize(("block_size", "slots", "said"), [(24, 4, "divides 64"), (16, 1, "two states")])
def test_what_can_not_work_is_refused(block_size: int, slots: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PrefixCache(8, block_size, num_state_slots=slots)


class CheckpointsMachine(RuleBasedStateMachine):
    """Leases that begin, grow, fail, fork and end over a pool of two slots each, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(8, num_blocks=80, hash_function=lambda data: 5)
        self.leases: list[Any] = []

    @precondition(lambda self: len(self.leases) < 4)
    @rule(which=st.integers(0, 1), keep=st.integers(1, 500), own=st.integers(0, 3), more=st.integers(0, 130))
    def begin(self, which: int, keep: int, own: int, more: int) -> None:
        try:
            lease = self.model.begin(TEXT[which][:keep] + [own] * more)
        except OutOfBlocks:
            return
        lease.take_copies()
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), share=st.floats(0, 1))
    def compute(self, data: st.DataObject, share: float) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        done = max(lease.num_committed, lease.states.base.position)
        end = done + int((lease.num_tokens - done) * share)
        if end > lease.states.base.position:
            self.model.compute(lease, max(end, 1))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(1, 70), fails=st.booleans())
    def decode(self, data: st.DataObject, count: int, fails: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.model.compute(lease)
        before = lease.num_tokens
        try:
            lease.append([count] * count)
        except OutOfBlocks:
            return
        lease.take_copies()
        if fails:
            lease.commit(lease.num_tokens)
            self.model.fail(lease)
            lease.rollback(before)
        else:
            self.model.compute(lease)

    @precondition(lambda self: 0 < len(self.leases) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.append(lease.fork())

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), keep=st.none() | st.integers(0, 400), discard=st.booleans())
    def release(self, data: st.DataObject, keep: int | None, discard: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        lease.release(discard=discard, keep=keep)

    @rule(count=st.integers(1, 30))
    def evict(self, count: int) -> None:
        self.model.cache.evict(count)

    @rule()
    def reset(self) -> None:
        self.model.cache.reset()

    @invariant()
    def nothing_is_lost_or_mixed_up(self) -> None:
        self.model.check()
        for lease in self.leases:
            base = lease.states.base
            if base.position:
                assert self.model.contents[base.slot] == lease.token_ids()[: base.position]


TestCheckpointsMachine = CheckpointsMachine.TestCase


class WindowModel(Model):
    """A cache that frees its windows, and what a runner has in each slot: a hash of the tokens so far."""

    def __init__(self, num_requests: int, window: int, step: int = 700, **options: Any) -> None:
        sizes = {"num_blocks": 64, "block_size": 16, **options}
        spec, size = WindowSpec(window, 0, step), int(sizes["block_size"])
        count = num_requests * spec.blocks_per_request(size) + -(-step // size)
        self.cache = PrefixCache(**sizes, windows=WindowSpec(window, count, step))
        self.window, self.size = window, size
        self.seen: dict[int, int] = {}
        self.done: dict[int, int] = {}  # by lease

    def begin(self, tokens: list[int], namespace: str = "") -> Any:
        lease: Any = self.cache.acquire(tokens, namespace)
        assert lease.states.base.position == lease.resume_at <= lease.num_cached_tokens
        self.look(lease)
        return lease

    def computed(self, lease: Any) -> int:
        return self.done.get(lease.id, lease.states.base.position)

    def compute(self, lease: Any, end: int | None = None) -> None:
        end, start = lease.num_tokens if end is None else end, self.computed(lease)
        lease.commit(end)
        assert lease.states.windows.reach(end), "the blocks of running requests are not enough"
        for at, value in enumerate(hashes(lease.token_ids())[start:end], start):
            self.seen[self.slot(lease.states.windows.ids, at)] = value
        self.done[lease.id] = max(start, end)
        self.look(lease)
        lease.states.step_done(lease, end)

    def fail(self, lease: Any) -> None:
        assert lease.states.windows.reach(lease.num_tokens)
        lease.states.step_failed()

    def slot(self, table: Any, at: int) -> int:
        return int(table[at // self.size]) * self.size + at % self.size

    def look(self, lease: Any) -> None:
        """What the lease's next row sees through its window is there."""
        end, values = self.computed(lease), hashes(lease.token_ids())
        for at in range(max(0, end - self.window + 1), end):
            assert self.seen[self.slot(lease.states.windows.ids, at)] == values[at], (
                f"position {at} of {lease!r}"
            )

    def check(self) -> None:
        self.cache.check()
        keeper: Any = self.cache.states
        for one in keeper:
            path = b"".join(node.key for node in self.cache.tree.index.path(one.node))
            values, blocks = hashes(decode_tokens(path[: 4 * one.end])), keeper.pool.kept(one.slot)
            assert len(blocks) * self.size >= min(self.window - 1, one.end)
            table = [0] * (one.end // self.size - len(blocks)) + list(blocks)
            for at in range(max(0, one.end - self.window + 1), one.end):
                assert self.seen[self.slot(table, at)] == values[at], f"{one!r} has another window"


class StateWindowModel(WindowModel):
    """A cache with states that frees its windows, too; as many slots as `num_requests` need."""

    def __init__(self, num_requests: int, window: int, *, num_slots: int = 0, **options: Any) -> None:
        super().__init__(num_requests, window, num_state_slots=num_slots or 2 * num_requests, **options)
        self.contents: dict[int, int] = {}

    def begin(self, tokens: list[int], namespace: str = "") -> Any:
        lease = super().begin(tokens, namespace)
        if lease.resume_at:
            assert self.contents[lease.states.base.slot] == hashes(tokens)[lease.resume_at - 1]
        return lease

    def compute(self, lease: Any, end: int | None = None) -> None:
        end = lease.num_tokens if end is None else end
        step = lease.states.plan(end)
        assert step is not None, "two slots a request are not enough"
        values = hashes(lease.token_ids())
        for position, slot in [*step.saves, *([step.target] if step.target is not step.base else [])]:
            self.contents[slot] = values[position - 1]
        super().compute(lease, end)

    def fail(self, lease: Any) -> None:
        assert lease.states.plan(lease.num_tokens) is not None
        super().fail(lease)

    def check(self) -> None:
        super().check()
        for one in self.cache.states or ():
            path = b"".join(node.key for node in self.cache.tree.index.path(one.node))
            value = self.contents[self.cache.states.state_slot(one)]
            assert value == hashes(decode_tokens(path[: 4 * one.end]))[-1], f"{one!r} sums up other tokens"


def hashes(tokens: list[int]) -> list[int]:
    """A hash of the tokens up to each one."""
    found = [0]
    for token in tokens:
        found.append(hash((found[-1], token)))
    return found[1:]


class WindowsMachine(CheckpointsMachine):
    """The same over a pool of window blocks that is just enough for the leases."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = WindowModel(4, 100, num_blocks=80, hash_function=lambda data: 5)

    @invariant()
    def nothing_is_lost_or_mixed_up(self) -> None:
        self.model.check()
        for lease in self.leases:
            self.model.look(lease)


class StateWindowsMachine(WindowsMachine):
    """The same with states beside them, two slots a lease."""

    def __init__(self) -> None:
        super().__init__()
        self.model = StateWindowModel(4, 100, num_blocks=80, hash_function=lambda data: 5)


TestWindowsMachine = WindowsMachine.TestCase
TestStateWindowsMachine = StateWindowsMachine.TestCase
TestWindowsMachine.settings = TestStateWindowsMachine.settings = settings(
    max_examples=20, stateful_step_count=25
)


@pytest.mark.parametrize("kind", ["states", "windows", "both"])
def test_every_length_asked_again_resumes_before_its_last_token(kind: str) -> None:
    model = {
        "states": lambda: Model(8),
        "windows": lambda: WindowModel(2, 40),
        "both": lambda: StateWindowModel(2, 40, num_slots=8),
    }[kind]()
    for length in range(1, 401):
        prompt, name, last = TEXT[0][:length], str(length), (length - 1) // GRID * GRID
        lease = model.begin(prompt, name)
        assert lease.resume_at == 0
        for end in (length // 3, length):
            model.compute(lease, max(1, end))
        lease.release()
        assert model.run(prompt, name) == last
        assert model.cache.explain(prompt, name).reason == "hit"
        assert model.cache.match(prompt, name).resume == last
        assert model.run([*prompt, 9], name) == length // GRID * GRID


def test_windows_past_the_last_grid_point_are_freed() -> None:
    model = WindowModel(1, 40, step=100)
    lease = model.begin(TEXT[0][:500])
    for end in range(100, 501, 100):
        model.compute(lease, end)
        assert len(lease.states.held_slots()) * 16 <= 40 + 64 + 2 * 16
    lease.release()
    model.check()
    assert model.at() == {448}  # the end of the prompt, once
    assert model.cache.stats.window_blocks - model.cache.stats.free_window_blocks == 3
    assert model.run(TEXT[0][:500] + [9] * 30) == 448
    model.cache.reset()
    assert model.cache.stats.free_window_blocks == model.cache.stats.window_blocks


@pytest.mark.parametrize(("requests", "slots", "for_windows"), [(1, 40, True), (6, 4, False)])
def test_the_want_of_either_takes_both(requests: int, slots: int, for_windows: bool) -> None:
    model = StateWindowModel(requests, 100, step=100, num_slots=slots, num_blocks=200)
    for seed in range(10):
        model.run([seed] * 300)
    stats = model.cache.stats
    assert stats.evicted_checkpoints > 0
    assert (stats.evicted_for_windows > 0) == for_windows
    assert stats.state_slots - stats.free_state_slots == stats.checkpoints == len(model.cache.states or ())
    model.cache.reset()
    assert model.cache.stats.free_window_blocks == stats.window_blocks
    assert model.cache.stats.free_state_slots == slots


def test_too_few_window_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is memory for 5; raise --window-memory"):
        PrefixCache(8, 16, windows=WindowSpec(40, 5, 100))


def test_swapped_slots_are_noticed() -> None:
    """The canary of the checks above: two states change places."""
    model = Model(8)
    model.run(TEXT[0][:200])
    model.run(TEXT[1][:200])
    one, other = [*(model.cache.states or ())][:2]
    one.slot, other.slot = other.slot, one.slot
    with pytest.raises(AssertionError, match="sums up other tokens"):
        model.check()
