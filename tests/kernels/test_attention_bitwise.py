# SPDX-License-Identifier: Apache-2.0
"""Bit-identity: a row's result does not depend on the batch, the chunk, sharing, placement or cache state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from attention_batches import Batch, assert_close, fill_nan, make_batch
from nightly import by_day

from radixkv_kernels import PagedKV
from radixkv_kernels.cpu.attention.plan import CpuPlan
from radixkv_kernels.interface import AttentionBackend

FEATURES: list[dict[str, Any]] = [
    {},
    {"window": 300},
    {"softcap": 4.0, "sinks": torch.linspace(-1, 3, 9)},
]
# Requests 1 to 3 share 35 blocks with request 0, request 3 and 4 share 51: two depths, and one outsider.
SHARED = {1: (0, 35), 2: (0, 35), 3: (0, 35), 4: (3, 51)}
LENGTHS = [(700, 700), (1, 700), (5, 801), (1, 1000), (1, 900), (1, 1100), (40, 333)]


@pytest.fixture(scope="module", params=["numba", "torch"])
def batch(request: pytest.FixtureRequest) -> Batch:
    return make_batch(request.param, LENGTHS, shared=SHARED, deterministic=True)


@pytest.mark.parametrize("features", FEATURES)
def test_batch_order_and_company(batch: Batch, features: dict[str, Any]) -> None:
    whole = batch.attend(**features)
    starts = batch.query_starts
    for order in ([6, 5, 4, 3, 2, 1, 0], [1], [2, 1], [5, 3], [6]):
        part = batch.rows(order)
        result = part.attend(**features)
        for i, r in enumerate(order):
            mine = result[part.query_starts[i] : part.query_starts[i + 1]]
            assert torch.equal(mine, whole[starts[r] : starts[r + 1]]), f"request {r} in {order}"


@pytest.mark.parametrize("features", FEATURES)
def test_cold_equals_hit_at_any_cut_and_any_chunking(batch: Batch, features: dict[str, Any]) -> None:
    cold = batch.rows([0]).attend(**features)
    for cut in (1, 15, 16, 255, 256, 257, 511, 639, 699):
        assert torch.equal(batch.chunk(0, cut, 700).attend(**features), cold[cut:]), f"cut at {cut}"
    for size in (1, 7, 100, 256, 333):
        # Single tokens only near a segment's edge: seven hundred calls would prove the same.
        bounds = range(500, 524) if size == 1 else range(0, 700, size)
        for first in bounds:
            end = min(first + size, 700)
            assert torch.equal(batch.chunk(0, first, end).attend(**features), cold[first:end]), (first, end)


@pytest.mark.parametrize("features", FEATURES[:2])
def test_tokens_that_see_each_other_have_the_same_bits(batch: Batch, features: dict[str, Any]) -> None:
    """In any company, and in any chunks that end where they end."""
    seeing = batch.see_each_other((0, 100, 300), (0, 500, 530), (6, 300, 333))
    whole, starts = seeing.attend(**features), batch.query_starts
    assert_close(whole, seeing.reference(**features))
    for r in (0, 6):
        alone = seeing.rows([r])
        assert torch.equal(alone.attend(**features), whole[starts[r] : starts[r + 1]])
    for first, end in ((0, 300), (100, 300), (217, 300), (300, 500), (400, 530), (529, 530), (530, 700)):
        assert torch.equal(seeing.chunk(0, first, end).attend(**features), whole[first:end]), (first, end)


@pytest.mark.parametrize("features", FEATURES)
def test_shared_equals_plain(batch: Batch, features: dict[str, Any]) -> None:
    config = dataclasses.replace(batch.backend.config, share_prefixes=False)
    plain: AttentionBackend = type(batch.backend)(config)
    assert torch.equal(batch.attend(**features), batch.attend(plain, **features))


def test_sharing_happens_where_expected() -> None:
    batch = make_batch("cpu", LENGTHS, shared=SHARED, deterministic=True)
    plan = batch.backend.plan(batch.query_starts, batch.context_lengths, batch.block_tables)
    assert isinstance(plan, CpuPlan)
    # Segments 0 and 1 by requests 1 to 4 (0 is a long chunk), segment 2 by requests 3 and 4.
    assert plan.work(None)[0].num_groups == 3
    assert plan.work(300)[0].num_groups > 0


def test_block_placement(batch: Batch) -> None:
    expected = batch.attend()
    moved = PagedKV(batch.kv.spec)
    fill_nan(moved)
    order = np.random.default_rng(5).permutation(batch.kv.spec.num_blocks)
    moved.load_blocks(order.tolist(), batch.kv.save_blocks(range(batch.kv.spec.num_blocks)))
    tables = [order[t].astype(np.int32) for t in batch.block_tables]
    other = Batch(
        batch.backend, moved, batch.query, batch.query_starts, batch.context_lengths, tables, batch.scale
    )
    assert torch.equal(other.attend(), expected)


def test_threads(batch: Batch) -> None:
    expected = batch.attend()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(batch.attend(), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("quantization", by_day(["int8", "fp8_e4m3", "fp8_e5m2"], "int8"))
def test_quantized(quantization: str) -> None:
    batch = make_batch(
        "cpu", LENGTHS, head_size=16, shared=SHARED, deterministic=True, quantization=quantization
    )
    whole = batch.attend()
    assert torch.equal(batch.rows([4, 1]).attend()[0], whole[batch.query_starts[4]])
    assert torch.equal(batch.chunk(0, 444, 700).attend(), whole[444:700])


@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"),
    [
        ((1, 1), 64, 16),
        ((2, 1), 64, 64),
        pytest.param((4, 1), 80, 16, marks=pytest.mark.nightly),
        ((10, 2), 64, 8),
        pytest.param((7, 1), 24, 32, marks=pytest.mark.nightly),
        ((8, 1), 64, 256),
    ],
)
def test_every_number_of_rows(heads: tuple[int, int], head_size: int, block_size: int) -> None:
    """Tiles of 1, 2, 3 ... rows run differently unrolled code, which must agree to the bit."""
    n = 299
    batch = make_batch("numba", [(n, n)], heads=heads, head_size=head_size, block_size=block_size)
    whole = batch.attend()
    assert_close(whole, batch.reference())
    for count in range(1, 9):
        first = n - 10 - count
        part = batch.chunk(0, first, first + count).attend()
        assert torch.equal(part, whole[first : first + count]), f"{count} tokens"
