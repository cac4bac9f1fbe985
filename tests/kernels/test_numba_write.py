# SPDX-License-Identifier: Apache-2.0
"""Writing float32 K/V in place: the same memory as by torch's rounding, bad slots refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from radixkv_kernels import KVSpec, PagedKV
from radixkv_kernels.cpu.attention.kv_write import FloatWriter
from radixkv_kernels.cpu.linear.float_product import can_store

SLOTS = 8 * 16


DTYPES = [each for each in (torch.float32, torch.bfloat16, torch.float16) if can_store(each)]


def cache(dtype: torch.dtype = torch.float32) -> PagedKV:
    spec = KVSpec(2, 8, 16, 3, 24, dtype, torch.device("cpu"))
    kv = PagedKV(spec)
    kv.key.fill_(-1)
    kv.value.fill_(-2)
    return kv


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tokens=st.integers(1, 90), layer=st.integers(0, 1), with_rows=st.booleans())
def test_each_row_lands_in_its_slot(data: st.DataObject, tokens: int, layer: int, with_rows: bool) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    kv = cache(dtype)
    # Views into one wide matrix, as the fused layers hand them over.
    merged = torch.randn(tokens, 9, 24) * 10.0 ** data.draw(st.integers(-12, 12))
    key, value = merged[:, 2:5], merged[:, 5:8]
    count = data.draw(st.integers(1, 70)) if with_rows else tokens
    slots = data.draw(st.permutations(range(SLOTS)))[:count]
    slots = [-1 if data.draw(st.integers(0, 9)) == 0 else slot for slot in slots]
    rows = (
        data.draw(st.lists(st.integers(0, tokens - 1), min_size=count, max_size=count)) if with_rows else None
    )
    FloatWriter(kv).write(
        layer, key, value, torch.tensor(slots), None if rows is None else torch.tensor(rows)
    )
    expected = cache(dtype)
    for i, slot in enumerate(slots):
        if slot >= 0:
            row = i if rows is None else rows[i]
            expected.key[layer].flatten(1, 2)[:, slot] = key[row]
            expected.value[layer].flatten(1, 2)[:, slot] = value[row]
    assert torch.equal(kv.key, expected.key)
    assert torch.equal(kv.value, expected.value)


def test_a_slot_outside_the_cache_is_refused_and_nothing_else_touched() -> None:
    kv, new = cache(), torch.ones(2, 3, 24)
    with pytest.raises(IndexError, match=str(SLOTS)):
        FloatWriter(kv).write(0, new, new, torch.tensor([5, SLOTS]), None)
    assert bool((kv.key[0].flatten(1, 2)[:, 5] == 1).all())
    assert int((kv.key == 1).sum()) == 3 * 24


def test_other_types_are_left_to_the_generic_way() -> None:
    kv, new = cache(), torch.ones(2, 3, 24)
    assert FloatWriter.accepts(kv, new, new)
    assert not FloatWriter.accepts(kv, new.to(torch.bfloat16), new)
    assert not FloatWriter.accepts(kv, new, torch.ones(2, 24, 3).transpose(1, 2))
    narrow = PagedKV(KVSpec(2, 8, 16, 3, 24, torch.float32, torch.device("cpu"), quantization="int8"))
    assert not FloatWriter.accepts(narrow, new, new)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_what_is_not_a_number_stays_that_and_ties_go_to_even(dtype: torch.dtype) -> None:
    kv, step = cache(dtype), torch.finfo(dtype).eps
    special = [torch.nan, -torch.nan, torch.inf, -torch.inf, 3e38, -0.0, 1 + step / 2, 1 + 1.5 * step]
    row = torch.tensor(special * 9).view(1, 3, 24)
    FloatWriter(kv).write(0, row, row, torch.tensor([5]), None)
    stored = kv.key[0].flatten(1, 2)[:, 5]
    torch.testing.assert_close(stored, row[0].to(dtype), rtol=0, atol=0, equal_nan=True)
