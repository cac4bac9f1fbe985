# SPDX-License-Identifier: Apache-2.0
"""Block formats of GGUF files and checkpoints that are multiplied as they are, and their order in panels.

A block holds 32 to 256 neighbouring inputs of one output as small integers ("quants") and the numbers
that give them their size. A weight is

    scale * (quant - offset)            Q4_0, Q5_0, Q8_0, Q6_K
    scale * quant + least               Q4_1, Q5_1; Q4_K and Q5_K, whose least value is negative
    2^exponent * TABLE[quant]           MXFP4
    scale * (quant - zero)              U4, U8
    scale * quant                       I8
    scale * float                       E4M3, E5M2: floats of 8 bits; _128: with 128 inputs in a block
    factor * scale * TABLE[quant]       NVFP4: a scale in E4M3 for 16 inputs, a factor for the whole output
    scale * quant + least               A4, A8: unsigned quants; C4: 8 subtracted from them
    scale * TABLE[quant]                NF4, FP4: bitsandbytes' tables, with 16 bits in products

A panel holds C neighbouring outputs ("columns"). Within it, one unit per block of the file follows another,
each in the order that the loop reads it; [x] is an element per column, words have 32 bits:

    Q4_0   low[4] d                   Q5_0   high low[4] d              Q8_0   bytes[8] d
    Q4_1   low[4] d m                 Q5_1   high low[4] d m            MXFP4  low[4] e
    Q4_K   d dmin, then 8 times       scale least low[4]
    Q5_K   d dmin, then 8 times       scale least high low[4]
    Q6_K   d, then 8 times            scale scale, then twice  high low[2]

    d, dmin, m    float16, as in the file
    scale, least  one byte each, unpacked from 6 bits (Q6_K: signed, for 16 inputs each)
    e             a byte: the exponent, with 128 added
    low           words of 8 quants of 4 bits. Word p of four: inputs 4p to 4p + 3 in the low halves of its
                  bytes, inputs 16 + 4p to 19 + 4p in the high ones. Word p of two (Q6_K, 16 inputs): inputs
                  8p to 8p + 3, and 8p + 4 to 8p + 7.
    high          one word: bit s of byte b is the fifth bit of input 4s + b; Q6_K: bits 2s and 2s + 1
    bytes         words of 4 signed quants

Blocks of checkpoints are made for panels, whose order they have: first the scale, then the zero point. Names
with _64 are of blocks of 64 inputs, of which panels have the quants of both halves, then the rest.

    U4_*   low[4] scale zero          U8_*   bytes[8] scale zero        I8_SINGLE  bytes[8] scale
    E4M3, E5M2   floats scale         NVFP4  twice low[2], then scale scale
    A4, C4 low[4] scale least         A8_*   bytes[8] scale least       NF4, FP4  low[4] scale

    scale, least  float16 (HALF), bfloat16 (BFLOAT), float32 (SINGLE, E4M3, E5M2, NF4 and FP4) or E4M3
                  (NVFP4)
    zero          a byte, signed for U8, whose quants have 128 subtracted, as A8's have
    floats        words of 4; for products of pairs see `float8_tile`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

#: ggml's numbers of the formats.
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4 = 2, 3, 6, 7, 8, 12, 13, 14, 39
#: Numbers of the formats of checkpoints, beyond ggml's.
U4_HALF, U4_BFLOAT, U4_SINGLE, U8_HALF, U8_SINGLE, I8_SINGLE, E4M3, E5M2, NVFP4 = range(1001, 1010)
A4_HALF, A4_BFLOAT, A4_SINGLE, A8_HALF, A8_BFLOAT, A8_SINGLE, NF4, FP4, E4M3_128, E5M2_128 = range(1010, 1020)
C4_BFLOAT = 1020
#: Added to the number of a checkpoint's format: the same with 64 inputs in a block.
_WIDE = 100
#: Twice the values of MXFP4's and NVFP4's quants (E2M1), by OCP's Microscaling Formats.
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
#: Values of NF4's quants, by "QLoRA" (Dettmers et al., 2023), and of FP4's, as bitsandbytes has both.
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
_FP4 = (
    0.0,
    0.0052083334885537624,
    0.6666666865348816,
    1.0,
    0.3333333432674408,
    0.5,
    0.1666666716337204,
    0.25,
)
FP4_TABLE = (*_FP4, *(-value for value in _FP4))
FLOAT_TABLES = {NF4: NF4_TABLE, FP4: FP4_TABLE, NF4 + _WIDE: NF4_TABLE, FP4 + _WIDE: FP4_TABLE}
#: What stands for 1 in products with them.
LARGEST_OF_TABLE = 127 * 256
#: Inputs that share a scale, or of Q6_K two: the smallest number that a product goes through at once.
GROUP = 32


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format.

    Attributes:
        number, name: ggml's.
        inputs: weights of a block, neighbours of one output.
        file_bytes: bytes of a block in the file.
        bits: of a quant.
        offset: subtracted from an unsigned quant; 0 for Q8_0, whose quants are signed. MXFP4: added to the
            table to make it unsigned.
        has_least: the formula adds a least value instead.
        column_bytes: bytes of a block in a panel.
        scale: form of a block's scale, or of the two of its halves.
        has_zero: a zero point for each block is subtracted.
        is_float: quants are floats of 8 bits, for rows of bfloat16; see `block_rows`.
    """

    number: int
    name: str
    inputs: int
    file_bytes: int
    bits: int
    offset: int
    has_least: bool
    column_bytes: int
    scale: Literal["float16", "bfloat16", "float32", "exponent", "e4m3"] = "float16"
    has_zero: bool = False
    is_float: bool = False

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.inputs // GROUP

    @property
    def is_super(self) -> bool:
        """True if a block scales groups by multiples of its own scale."""
        return self.inputs > 128

    @property
    def is_table(self) -> bool:
        """True if quants are looked up in `MXFP4_TABLE`."""
        return self.scale in ("exponent", "e4m3")

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scales, its zero point not among them."""
        return {"float16": 2, "bfloat16": 2, "float32": 4, "exponent": 1, "e4m3": 2}[self.scale]

    @property
    def least_bytes(self) -> int:
        """Bytes of a block's least value beside a scale that the block is not scaled by twice."""
        return self.scale_bytes if self.has_least and not self.is_super else 0


#: Formats of GGUF files.
FORMATS = {
    one.number: one
    for one in (
        BlockFormat(Q4_0, "Q4_0", 32, 18, 4, 8, False, 18),
        BlockFormat(Q4_1, "Q4_1", 32, 20, 4, 0, True, 20),
        BlockFormat(Q5_0, "Q5_0", 32, 22, 5, 16, False, 22),
        BlockFormat(Q5_1, "Q5_1", 32, 24, 5, 0, True, 24),
        BlockFormat(Q8_0, "Q8_0", 32, 34, 8, 0, False, 34),
        BlockFormat(Q4_K, "Q4_K", 256, 144, 4, 0, True, 4 + 8 * 18),
        BlockFormat(Q5_K, "Q5_K", 256, 176, 5, 0, True, 4 + 8 * 22),
        BlockFormat(Q6_K, "Q6_K", 256, 210, 6, 32, False, 2 + 8 * 26),
        BlockFormat(MXFP4, "MXFP4", 32, 17, 4, 12, False, 17, "exponent"),
    )
}
#: These and the formats of checkpoints.
ALL_FORMATS = {
    **FORMATS,
    **{
        one.number: one
        for one in (
            BlockFormat(U4_HALF, "U4_HALF", 32, 19, 4, 0, False, 19, has_zero=True),
            BlockFormat(U4_BFLOAT, "U4_BFLOAT", 32, 19, 4, 0, False, 19, "bfloat16", has_zero=True),
            BlockFormat(U4_SINGLE, "U4_SINGLE", 32, 21, 4, 0, False, 21, "float32", has_zero=True),
            BlockFormat(U8_HALF, "U8_HALF", 32, 35, 8, 0, False, 35, has_zero=True),
            BlockFormat(U8_SINGLE, "U8_SINGLE", 32, 37, 8, 0, False, 37, "float32", has_zero=True),
            BlockFormat(I8_SINGLE, "I8_SINGLE", 32, 36, 8, 0, False, 36, "float32"),
            BlockFormat(E4M3, "E4M3", 32, 36, 8, 0, False, 36, "float32", is_float=True),
            BlockFormat(E5M2, "E5M2", 32, 36, 8, 0, False, 36, "float32", is_float=True),
            BlockFormat(E4M3_128, "E4M3_128", 128, 132, 8, 0, False, 132, "float32", is_float=True),
            BlockFormat(E5M2_128, "E5M2_128", 128, 132, 8, 0, False, 132, "float32", is_float=True),
            BlockFormat(NVFP4, "NVFP4", 32, 18, 4, 12, False, 18, "e4m3"),
            BlockFormat(A4_HALF, "A4_HALF", 32, 20, 4, 0, True, 20),
            BlockFormat(A4_BFLOAT, "A4_BFLOAT", 32, 20, 4, 0, True, 20, "bfloat16"),
            BlockFormat(A4_SINGLE, "A4_SINGLE", 32, 24, 4, 0, True, 24, "float32"),
            BlockFormat(A8_HALF, "A8_HALF", 32, 36, 8, -128, True, 36),
            BlockFormat(A8_BFLOAT, "A8_BFLOAT", 32, 36, 8, -128, True, 36, "bfloat16"),
            BlockFormat(A8_SINGLE, "A8_SINGLE", 32, 40, 8, -128, True, 40, "float32"),
            BlockFormat(C4_BFLOAT, "C4_BFLOAT", 32, 20, 4, 8, True, 20, "bfloat16"),
            BlockFormat(NF4, "NF4", 32, 20, 4, 0, False, 20, "float32"),
            BlockFormat(FP4, "FP4", 32, 20, 4, 0, False, 20, "float32"),
        )
    },
}
#: Formats of checkpoints and those that hold the same numbers where more inputs share a scale.
WIDE_FORMATS = {
    one.number: one.number + _WIDE
    for one in ALL_FORMATS.values()
    if one.number > NVFP4 or one.number in (U4_HALF, U4_BFLOAT, U4_SINGLE, U8_HALF, U8_SINGLE, I8_SINGLE)
    if not one.is_float
}
for _narrow, _number in WIDE_FORMATS.items():
    _one = ALL_FORMATS[_narrow]
    _bytes = _one.file_bytes + GROUP * _one.bits // 8
    ALL_FORMATS[_number] = replace(
        _one, number=_number, name=f"{_one.name}_64", inputs=64, file_bytes=_bytes, column_bytes=_bytes
    )
WIDE_FORMATS |= {E4M3: E4M3_128, E5M2: E5M2_128}


def digits_of(table: Sequence[float]) -> tuple[list[int], list[int]]:
    """Numbers of at most 1 as whole ones, `LARGEST_OF_TABLE` for 1, in two signed bytes: high and low."""
    whole = [round(each * LARGEST_OF_TABLE) for each in table]
    high = [(each + 128) >> 8 for each in whole]
    return high, [each - (up << 8) for each, up in zip(whole, high, strict=True)]
