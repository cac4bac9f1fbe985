# SPDX-License-Identifier: Apache-2.0
"""Products of float32 numbers on tensor cores: each operand is the sum of two bfloat16 numbers.

bfloat16 operands are exact, and enter as they are. The part of a product that is left out is 2^-16 of it;
with operands rounded to bfloat16 it would be 2^-9, and states would be off by percents.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(x):
    """The two bfloat16 numbers whose sum is x, to 16 bits."""
    high = x.to(tl.bfloat16)
    return high, (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def split_product(a, b):
    """a b, float32, of matrices of any float type; the smaller parts are added first."""
    if a.dtype == tl.bfloat16:
        if b.dtype == tl.bfloat16:
            return tl.dot(a, b)
        b_high, b_low = halves(b)
        return tl.dot(a, b_high, tl.dot(a, b_low))
    a_high, a_low = halves(a)
    if b.dtype == tl.bfloat16:
        return tl.dot(a_high, b, tl.dot(a_low, b))
    b_high, b_low = halves(b)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
