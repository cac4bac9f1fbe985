# SPDX-License-Identifier: Apache-2.0
"""The memory simulation: known answers, conservation, and the figures of the field."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_tools import build, traces_folder

from benchmarks.pool_usage import measure_pool
from radixkv.cli.replay.allocators import BuddyAllocator, ReplayedSequence
from radixkv.cli.replay.simulate import SCHEMES, simulate
from radixkv.cli.replay.workload import Workload, from_distribution, from_file
from radixkv.errors import ConfigError


def equal(count: int, inputs: int, outputs: int) -> Workload:
    return Workload("equal", np.full(count, inputs, np.int64), np.full(count, outputs, np.int64))


def test_slabs_by_hand() -> None:
    # ten slabs of 100 in 1,050 slots; each sequence grows from 11 to 20 tokens and will never need 80 slots
    result = simulate(equal(100, 10, 10), "slab", 1050, max_length=100)
    assert result.mean_sequences == result.peak_sequences == 10
    assert result.used_share == pytest.approx(10 * 15.5 / 1050)
    assert result.reserved_share == pytest.approx(10 * 4.5 / 1050)
    assert result.internal_share == pytest.approx(10 * 80 / 1050)
    assert result.external_share == pytest.approx(50 / 1050)
    assert result.waste == pytest.approx(1 - 155 / 1050)


def test_pages_by_hand() -> None:
    # prompts of 16 in pages of 8: tokens 17..24 fill a third page
    result = simulate(equal(100, 16, 8), "paged", 2400, block_size=8)
    assert result.mean_sequences == 100
    assert result.used_share == pytest.approx(100 * 20.5 / 2400)
    assert result.internal_share == pytest.approx(100 * 3.5 / 2400)


def test_a_shared_prefix_is_held_once() -> None:
    load = from_distribution("uniform", num_sequences=300, max_length=1024, shared_prefix=512)
    alone = simulate(load, "paged", 20_000)
    shared = simulate(load, "paged+sharing", 20_000)
    assert shared.mean_sequences > 2 * alone.mean_sequences
    assert shared.pages_saved == pytest.approx((shared.mean_sequences - 1) * 32, rel=0.02)


def test_sharing_follows_the_trace() -> None:
    trace = build([[0, 1, 2]] * 6 + [[0, 3, 4]] * 6, block_size=64)
    load = Workload("trace", trace.input_lengths, trace.output_lengths, trace)
    # 12 prompts of 192 tokens, of which five blocks of 64 differ, and 8 tokens of answer each
    held = simulate(load, "paged+sharing", 5 * 64 + 12 * 16)
    assert held.peak_sequences == 12
    assert simulate(load, "paged", 5 * 64 + 12 * 16).peak_sequences == 2


@given(seed=st.integers(0, 1000), scheme=st.sampled_from(SCHEMES), slots=st.integers(600, 5000))
def test_shares_add_up_and_everybody_is_served(seed: int, scheme: str, slots: int) -> None:
    load = from_distribution("lognormal", num_sequences=60, max_length=512, mean_input=60, seed=seed)
    result = simulate(load, scheme, slots)
    shares = (
        result.used_share,
        result.reserved_share,
        result.internal_share,
        result.external_share,
        result.free_share,
    )
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= -1e-9
    assert result.completed + result.refused == 60
    assert result.peak_sequences <= 60


@given(orders=st.lists(st.integers(1, 300), max_size=60), seed=st.integers(0, 99))
def test_buddies_never_overlap_and_merge_again(orders: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    buddy = BuddyAllocator(1000, min_order=3)
    held: dict[int, int] = {}
    for index, length in enumerate(orders):
        if buddy.admit(ReplayedSequence(index, 1, length), 0):
            held[index] = length
        if held and rng.random() < 0.4:
            gone = int(rng.choice(list(held)))
            buddy.release(gone)
            del held[gone]
        buddy.check()
    for index in held:
        buddy.release(index)
    assert buddy.reserved_slots() == 0
    assert buddy.admit(ReplayedSequence(10**6, 1, 512), 0)  # the largest extent is whole again


def test_paper_figures_on_short_chats() -> None:
    load = from_distribution("sharegpt", num_sequences=1000)
    by_scheme = {scheme: simulate(load, scheme, 100_000) for scheme in SCHEMES}
    assert by_scheme["paged"].waste < 0.04
    assert by_scheme["slab"].waste > 0.6
    assert by_scheme["paged"].waste < by_scheme["buddy"].waste < by_scheme["slab"].waste
    assert by_scheme["paged"].mean_sequences > 2 * by_scheme["buddy"].mean_sequences


def test_paged_waste_on_recorded_conversations() -> None:
    load = from_file(traces_folder() / "mooncake_conversation.jsonl.gz")
    assert simulate(load, "paged", 196_608).waste < 0.04


def test_waste_of_a_pool() -> None:
    def table(*blocks: int) -> np.ndarray:
        return np.array(blocks, np.int32)

    # block 0 is shared; the second sequence ends inside block 2, which the first one fills; a pin holds one
    usage = measure_pool([(49, table(0, 1, 2, 3)), (36, table(0, 4, 2)), (0, table())], 16, held_blocks=6)
    assert (usage.sequences, usage.used_slots, usage.allocated_slots) == (3, 4 * 16 + 1, 6 * 16)
    assert usage.waste == pytest.approx(31 / 96)
    samples = [(20, table(0, 1)), (18, table(0, 1))]
    assert measure_pool(samples, 16, held_blocks=2).used_slots == 20
    assert measure_pool([], 16, held_blocks=0).waste == 0
    with pytest.raises(ValueError, match="do not lie in 1 blocks"):
        measure_pool([(17, table(0))], 16, held_blocks=1)
    with pytest.raises(ValueError, match="only 1 are held"):
        measure_pool([(17, table(0, 1))], 16, held_blocks=1)


def test_user_mistakes() -> None:
    load = equal(1, 1, 1)
    with pytest.raises(ConfigError, match="give more memory"):
        simulate(load, "paged", 3)
    with pytest.raises(ConfigError, match="unknown scheme"):
        simulate(load, "magic", 100)
    with pytest.raises(ConfigError, match="neither a file nor one of"):
        from_distribution("gaussian")
