# SPDX-License-Identifier: Apache-2.0
"""Which blocks are written: those of a second use, and long texts at once."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash
from paged_language_model import run_all
from scripted_tier import ScriptedTier
from tier_engines import GREEDY, assert_right, engine_with, filled

from radixkv.cache.block_run import BlockRun
from radixkv.cache.keys import encode_tokens
from radixkv.tiers.selection import Selection


def run_of(*blocks: int, start: int = 0) -> BlockRun:
    """A run of blocks of 8 tokens, each named by a number."""
    ids = tuple(xxhash.xxh3_128_digest(bytes([block])) for block in blocks)
    return BlockRun(("", "", "", ""), False, encode_tokens(range(start + 8 * len(blocks))), start, ids)


def test_a_block_is_chosen_at_its_second_use():
    selection = Selection()
    assert selection.used(run_of(1, 2, 3)) == range(0)
    assert selection.used(run_of(1, 2, 4)) == range(2)
    assert selection.used(run_of(1, 2, 4, 5)) == range(3)
    assert selection.used(run_of()) == range(0)


def test_long_texts_are_chosen_at_once_wherever_their_private_part_begins():
    selection = Selection(long_tokens=40)
    assert selection.used(run_of(*range(10, 14))) == range(0)
    assert selection.used(run_of(*range(20, 25))) == range(5)
    assert selection.used(run_of(30, start=32)) == range(1)
    assert Selection(long_tokens=0).used(run_of(7)) == range(1)


def test_what_is_remembered_has_a_fixed_size(monkeypatch):
    monkeypatch.setattr("radixkv.tiers.selection.REMEMBERED_BLOCKS", 4)
    selection = Selection()
    for block in range(1, 9):
        selection.used(run_of(block))
    assert selection.used(run_of(8)) == range(1)
    assert selection.used(run_of(1)) == range(0)  # 5 took its place


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_an_engine_saves_what_came_twice_even_if_it_was_evicted_between(uses):
    tier: Any = ScriptedTier(at_once=True)
    tier.selection = Selection()
    engine, _, _ = engine_with(tier, num_blocks=16)
    shared = list(range(1, 33))
    for turn in range(uses):
        engine.add_request([*shared, *range(40 + 10 * turn, 53 + 10 * turn)], GREEDY)
        (output,) = run_all(engine).values()
        assert_right(output)
        engine.cache.evict(16)
    assert len(tier.kept) == (0 if uses == 1 else 4)


def test_a_tier_that_chooses_itself_is_offered_everything():
    assert len(filled(list(range(1, 30))).kept) == 4
