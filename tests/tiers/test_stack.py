# SPDX-License-Identifier: Apache-2.0
"""Tiers that stand on one another: whose blocks are loaded, and who keeps what is saved."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from paged_language_model import run_all
from scripted_tier import ScriptedTier
from tier_engines import GREEDY, PROMPT, assert_right, engine_with, filled, steps

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import encode_tokens
from radixkv.engine.engine import Engine
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.selection import Selection
from radixkv.tiers.tier import TierStack, TierState

HIT, MISS = TierState.HIT, TierState.MISS


class Scripted(ScriptedTier):
    """A tier of a stack, which is offered all that ends."""

    def __init__(self, name: str, *, at_once: bool = False) -> None:
        super().__init__(at_once=at_once)
        self.name = name
        self.selection = Selection(long_tokens=0)

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
    return [bytes(row) for piece in pieces for row in piece.data]


def on(*tiers: Scripted, **options: Any) -> tuple[Engine, Any]:
    engine, model, _ = engine_with(TierStack(tiers), **options)
    return engine, model


def answer_on(*tiers: Scripted, prompt: list[int] = PROMPT) -> Any:
    """What an engine with these tiers answers, which give what they have at once."""
    for tier in tiers:
        tier.at_once = True
    engine, model = on(*tiers)
    engine.add_request(prompt, GREEDY)
    (output,) = run_all(engine).values()
    assert_right(output)
    assert not model.violations
    return output


def having(*places: int, name: str) -> Scripted:
    """A tier that has these blocks of `PROMPT`, and takes no more."""
    everything = filled(PROMPT).kept
    tier = Scripted(name)
    tier.kept = {key: kept for key, kept in everything.items() if kept[0].start // 8 + kept[1] in places}
    assert len(tier.kept) == len(places)
    tier.is_open = False
    return tier


def test_each_block_comes_from_the_first_tier_that_has_it():
    output = answer_on(having(0, 1, name="quick"), having(1, 2, 3, 4, name="slow"))
    assert output.num_cached_tokens == 40
    assert {hit.tier: hit.num_tokens for hit in output.tier_hits} == {"quick": 16, "slow": 24}


def test_one_that_does_not_know_is_asked_again_only_if_nobody_has_the_first_block():
    quick, slow = having(0, 1, name="quick"), having(name="slow")
    slow.answer = lambda run, count: TierState.RETRY
    engine, _ = on(quick, slow)
    engine.add_request(PROMPT, GREEDY)
    steps(engine, 1)
    assert (len(quick.loads), engine.idle_s) == (1, pytest.approx(0.2))
    quick.finish()
    steps(engine, 1)
    assert engine.idle_s == pytest.approx(0.005)
    slow.answer = lambda run, count: TierState.MISS
    assert engine.stats().num_waiting == 1
    quick.answer = slow.answer


def test_a_tier_that_fails_is_passed_over():
    broken, good = having(0, 1, 2, 3, 4, name="broken"), having(0, 1, 2, name="good")

    def fail(run: Any) -> Any:
        raise OSError("the disk is gone")

    broken.lookup = fail  # type: ignore[method-assign]
    output = answer_on(broken, good)
    assert {hit.tier: hit.num_tokens for hit in output.tier_hits} == {"good": 24}


def test_each_tier_is_given_what_it_lacks():
    quick, slow = Scripted("quick"), Scripted("slow")
    quick.kept = dict(having(0, 1, 2, name="x").kept)
    answer_on(quick, slow)
    assert (len(quick.kept), len(slow.kept)) == (6, 6)
    assert [count.saved_blocks for count in on(quick, slow)[0].stats().tiers] == [0, 0]


@pytest.mark.injects_faults
def test_tiers_end_with_the_engine_and_not_when_its_cache_is_made_anew():
    quick, slow = Scripted("quick"), Scripted("slow")
    engine, _ = on(quick, slow)
    complete = engine.scheduler.complete
    engine.scheduler.complete = lambda batch: (complete(batch), 1 / 0)  # type: ignore[method-assign]
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    assert engine.stats().num_rebuilds == 1
    assert quick.is_open
    engine.close()
    assert not quick.is_open
    assert not slow.is_open


class TestHost:
    numbers = itertools.count(50)

    def filled(self, *runs: BlockRun, blocks: int) -> HostTier:
        tier = HostTier(blocks * 16)
        for run in runs:
            tier.save(run, data_of(run))
        return tier

    def assert_found(self, tier: HostTier, run: BlockRun, count: int) -> None:
        """Copies are made by a thread, in order: what is saved last is there last."""
        last = run_of(next(self.numbers), 1)
        tier.save(last, data_of(last))
        while tier.lookup(last)[0] is MISS:
            pass
        assert tier.lookup(run) == ((HIT, count) if count else (MISS, 0))

    def test_blocks_come_back_with_the_runs_they_were_saved_with(self):
        run = run_of(1, 6)
        tier = self.filled(run.part(0, 4), run.part(4, 6), blocks=10)
        self.assert_found(tier, run, 6)
        pieces = tier.load(run).result(0)
        assert [(piece.run.start, piece.run.end) for piece in pieces] == [(0, 32), (32, 48)]
        assert all(run.is_same_text(piece.run, piece.run.end) for piece in pieces)
        assert rows(pieces) == [bytes(row) for row in data_of(run)]
        tier.close()
        assert tier.lookup(run) == (MISS, 0)

    def test_the_least_recently_used_goes_tails_first(self):
        old, new = run_of(1, 3), run_of(2, 3)
        tier = self.filled(old, new, blocks=7)
        self.assert_found(tier, old, 3)
        tier.load(old)
        tier.save(run_of(3, 2), data_of(run_of(3, 2)))
        self.assert_found(tier, new, 0)  # three went for what came since
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
