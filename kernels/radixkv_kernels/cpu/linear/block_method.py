# SPDX-License-Identifier: Apache-2.0
"""Ways to multiply bytes on this processor, for the products with a file's blocks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from radixkv_kernels.cpu.isa import features, widens_float16
from radixkv_kernels.cpu.linear.block_formats import FLOAT_TABLES, BlockFormat


@dataclass(frozen=True, slots=True)
class BlockMethod:
    """A way to multiply.

    Attributes:
        dots: vpdpbusd adds up four products in 32 bits (VNNI); else vpmaddubsw adds up two in 16.
        lanes: columns of a vector.
        emulated: dot products in plain arithmetic, for tests of that way on any processor.
        pairs: vdpbf16ps adds up two products of bfloat16, with 16 lanes; else floats become float32.
    """

    dots: bool
    lanes: int
    emulated: bool = False
    pairs: bool = False

    @property
    def columns(self) -> int:
        """Columns of a panel: two vectors."""
        return 2 * self.lanes

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows of a tile: with two accumulators each, as many as the registers hold, and fewer."""
        return (1, 2, 4, 6, 8, 12) if self.lanes == 16 else (1, 2, 4)

    def takes_floats(self, form: BlockFormat) -> bool:
        """Return True if a format is multiplied by rows of bfloat16, not int8: those of floats, and tables of
        floats where their products are as fast."""
        return form.is_float or (self.pairs and form.number in FLOAT_TABLES)

    @property
    def float_heights(self) -> tuple[int, ...]:
        """The same for floats of 8 bits, whose code is longer."""
        return (1, 2, 4, 8, 12) if self.lanes == 16 else (1, 2, 4)


@functools.cache
def methods() -> tuple[BlockMethod, ...]:
    """The methods of this processor, fastest first; empty: neither VNNI nor AVX2."""
    has, found = features(), []
    if not widens_float16() or not {"avx2", "fma"} <= has:
        return ()
    if {"avx512vnni", "avx512bf16", "avx512vbmi"} <= has:
        found.append(BlockMethod(True, 16, pairs=True))
    if "avx512vnni" in has:
        found.append(BlockMethod(True, 16))
    if {"avx512vnni", "avx512vl"} <= has:
        found.append(BlockMethod(True, 8))
    found.append(BlockMethod(False, 8))
    return tuple(found)


def default_method() -> BlockMethod:
    """The fastest method.

    Raises:
        ValueError: there is none.
    """
    if not methods():
        raise ValueError("this processor has neither VNNI nor AVX2: no products with blocks")
    return methods()[0]
