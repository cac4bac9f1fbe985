# SPDX-License-Identifier: Apache-2.0
"""What breaks a prompt is named, with its kind and place, on a labelled corpus; what is not known is not."""

from __future__ import annotations

import os

import pytest
from broken_prompts import BANKS, KINDS_MADE, Pair, make_pairs
from nightly import by_day

from radixkv.observe.causes import CAUSES
from radixkv.observe.prompt_difference import Breaker, find_breaker
from radixkv.observe.prompt_parts import PromptParts

PAIRS = 300
#: More of them where somebody has the time.
SEEDS = range(int(os.environ.get("RADIXKV_BROKEN_SEEDS", "2")))


def is_right(pair: Pair, found: Breaker | None) -> bool:
    if found is None or found.kind == "unknown":
        return pair.kind is None
    return (found.kind, found.tool if found.message is None else found.message) == (pair.kind, pair.place)


@pytest.mark.parametrize("seed", by_day(SEEDS, 0))
@pytest.mark.parametrize("bank", ["develop", "measure"])
def test_breaks_are_named_and_nothing_else_is(bank: str, seed: int) -> None:
    pairs = make_pairs(bank, seed, PAIRS)
    found = [find_breaker(PromptParts.of_chat(**pair.old), PromptParts.of_chat(**pair.new)) for pair in pairs]
    judged = list(zip(pairs, found, strict=True))
    wrong = [(pair, said) for pair, said in judged if not is_right(pair, said)]
    report = "\n".join(f"{pair.kind} at {pair.place}, {pair.how[:100]}: {said}" for pair, said in wrong)
    assert not [pair for pair, _ in wrong if pair.kind is None], report
    assert len(wrong) <= 0.05 * PAIRS, report


def test_the_corpus_has_all_kinds_and_is_the_same_each_time() -> None:
    pairs = make_pairs("measure", 5, PAIRS)
    assert pairs == make_pairs("measure", 5, PAIRS)
    assert pairs != make_pairs("measure", 6, PAIRS)
    kinds = {pair.kind for pair in pairs}
    assert None in kinds
    assert len(kinds) == len(KINDS_MADE) - 1, "two of them break nothing that has a name"
    assert kinds - {None} <= set(CAUSES)


def test_the_banks_have_nothing_in_common() -> None:
    one, other = ({name: set(map(str, values)) for name, values in bank.items()} for bank in BANKS.values())
    assert all(values and not values & other[name] for name, values in one.items())
