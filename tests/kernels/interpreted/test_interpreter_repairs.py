# SPDX-License-Identifier: Apache-2.0
"""Repairs of the interpreter: mistakes of a kernel that it would overlook without them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _multiply(out, left, right, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(left + place) * tl.load(right + place))


def test_an_int32_product_that_overflows_is_an_error() -> None:
    """A row's number times its length, as an address is computed: on a GPU it would wrap."""
    rows = torch.tensor([1 << 15, 3], dtype=torch.int32)
    for dtype in (torch.int64, torch.int32):
        out, lengths = torch.zeros(2, dtype=dtype), torch.tensor([1 << 16, 5], dtype=dtype)
        if dtype == torch.int32:
            with pytest.raises(Exception, match="int32 overflow in mul"):
                _multiply[(1,)](out, rows, lengths, 2)
        else:
            _multiply[(1,)](out, rows, lengths, 2)
            assert out.tolist() == [1 << 31, 15]
