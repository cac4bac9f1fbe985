"""Tiers that stand on one another: whose blocks are loaded, and who keeps what is saved."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scripted_tier import ScriptedTier

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import encode_tokens
from radixkv.tiers.host import HostTier
from radixkv.tiers.stack import TierStack
from radixkv.tiers.tier import TierState

HIT, PENDING, RETRY, MISS = TierState.HIT, TierState.PENDING, TierState.RETRY, TierState.MISS


class Scripted(ScriptedTier):
    def close(self) -> None:
        self.is_open = False


def run_of(text: int, count: int) -> BlockRun:
    tokens = [text * 1000 + i for i in range(8 * count)]
    return BlockRun(
        ("", "", "", ""), False, encode_tokens(tokens), 0, tuple(b"%d/%d" % (text, i) for i in range(count))
    )


def data_of(run: BlockRun, size: int = 16) -> np.ndarray:
    return np.stack([np.full(size, hash(i) % 251, np.uint8) for i in run.identities])


def rows(pieces) -> list[bytes]:
    return [bytes(row) for _, data in pieces for row in data]


def test_the_longest_run_wins_and_the_rest_comes_from_others():
    run, data = run_of(1, 8), data_of(run_of(1, 8))
    quick, slow = Scripted(at_once=True), Scripted(at_once=True)
    stack = TierStack([quick, slow])
    assert stack.lookup(run) == (MISS, 0)
    quick.save(run.part(0, 3), data[:3])
    slow.save(run.part(3, 7), data[3:7])
    assert stack.lookup(run) == (HIT, 7)
    pieces = stack.load(run.part(0, 7)).result(0)
    assert rows(pieces) == [bytes(row) for row in data[:7]]
    assert [piece.run.start for piece in pieces] == [8 * i for i in range(7)]


def test_one_that_does_not_know_is_asked_again_only_if_nobody_has_the_first_block():
    run, data = run_of(1, 4), data_of(run_of(1, 4))
    quick, slow = Scripted(), Scripted()
    slow.answer = lambda run, count: RETRY
    stack = TierStack([quick, slow])
    assert stack.lookup(run) == (RETRY, 0)
    quick.save(run.part(0, 2), data[:2])
    assert stack.lookup(run) == (HIT, 2)
    quick.answer = lambda run, count: PENDING if count else MISS
    assert stack.lookup(run) == (PENDING, 2)


def test_a_load_that_fails_ends_what_is_given():
    run, data = run_of(1, 6), data_of(run_of(1, 6))
    quick, slow = Scripted(), Scripted()
    quick.save(run.part(0, 2), data[:2])
    slow.save(run.part(2, 6), data[2:])
    stack = TierStack([quick, slow])
    future = stack.load(run)
    slow.fail()
    assert not future.done()
    quick.finish()
    assert rows(future.result(0)) == [bytes(row) for row in data[:2]]
    future = stack.load(run)
    assert future.cancel()
    assert [load.cancelled() for _, load in quick.loads + slow.loads] == [True, True]


def test_what_one_lacks_is_wanted_and_saved_by_all():
    run, data = run_of(1, 6), data_of(run_of(1, 6))
    quick, slow = Scripted(), Scripted()
    quick.save(run.part(0, 4), data[:4])
    stack = TierStack([quick, slow])
    assert stack.wants(run) == range(6)
    stack.save(run, data)
    assert len(slow.kept) == 6
    assert stack.wants(run) == range(0)
    stack.close()
    assert not slow.is_open


class TestHost:
    numbers = itertools.count(50)

    def filled(self, *runs: BlockRun, blocks: int) -> HostTier:
        tier = HostTier(blocks * 16)
        for run in runs:
            tier.save(run, data_of(run))
        return tier

    def settled(self, tier: HostTier, run: BlockRun, count: int) -> None:
        """Copies are made by a thread, in order: what is saved last is there last."""
        last = run_of(next(self.numbers), 1)
        tier.save(last, data_of(last))
        while tier.lookup(last)[0] is MISS:
            pass
        assert tier.lookup(run) == ((HIT, count) if count else (MISS, 0))

    def test_blocks_come_back_with_the_runs_they_were_saved_with(self):
        run = run_of(1, 6)
        tier = self.filled(run.part(0, 4), run.part(4, 6), blocks=10)
        self.settled(tier, run, 6)
        pieces = tier.load(run).result(0)
        assert [(piece.run.start, piece.run.end) for piece in pieces] == [(0, 32), (32, 48)]
        assert all(run.is_same_text(piece.run, piece.run.end) for piece in pieces)
        assert rows(pieces) == [bytes(row) for row in data_of(run)]
        tier.close()
        assert tier.lookup(run) == (MISS, 0)

    def test_the_least_recently_used_goes_tails_first(self):
        old, new = run_of(1, 3), run_of(2, 3)
        tier = self.filled(old, new, blocks=7)
        self.settled(tier, old, 3)
        tier.load(old)
        tier.save(run_of(3, 2), data_of(run_of(3, 2)))
        self.settled(tier, new, 0)  # three went for what came since
        assert tier.lookup(old) == (HIT, 3)
        tier.close()

    def test_what_is_read_stays_while_it_goes(self):
        run = run_of(1, 4)
        tier = self.filled(run, blocks=4)
        while tier.lookup(run)[1] < 4:
            pass
        pieces = tier.load(run).result(0)
        other = run_of(2, 4)
        tier.save(other, data_of(other))
        while tier.lookup(other)[1] < 4:
            pass
        assert tier.lookup(run) == (MISS, 0)
        assert rows(pieces) == [bytes(row) for row in data_of(run)]
        tier.close()


@pytest.mark.parametrize("first", [RETRY, MISS])
def test_an_empty_run_is_a_miss(first):
    quick = Scripted()
    quick.answer = lambda run, count: first
    assert TierStack([quick]).lookup(run_of(1, 1).part(0, 0)) == (MISS, 0)
