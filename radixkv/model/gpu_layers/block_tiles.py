# SPDX-License-Identifier: Apache-2.0
"""Blocks of GGUF files in the forms that a GPU's kernels read by tiles. No number is rounded.

    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0   as in the file, codes and scales apart
    Q4_K, Q5_K, Q6_K               scales of 6 bits (8 of Q6_K) a byte each, times those of 256 inputs
    MXFP4                          as in the file

Other formats have no tile form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from radixkv.model.stored_weights.block_weight import BlockWeight
from radixkv_kernels.triton.tiled_weight import TiledWeight

_WIDE = 256


def tiled_blocks(weight: BlockWeight) -> TiledWeight | None:
    """A weight's tile form; None: it has none."""
    make = _FORMS.get(weight.kind.name)
    if make is None:
        return None
    return make(weight.blocks.view(weight.out_features, -1, weight.block_bytes))


def pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits one by one, uint8 [..., in], as bytes of two, the first one in the low half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def plane(codes: Tensor, bits: int) -> Tensor:
    """Bits above the fourth of codes, uint8 [..., in] -> uint8 [..., in * bits / 8], rounded up."""
    each = 8 // bits
    upper = torch.nn.functional.pad(codes >> 4, (0, -codes.shape[-1] % each))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (upper.unflatten(-1, (-1, each)) << shifts).sum(-1, dtype=torch.uint8)


def _halves(part: Tensor) -> Tensor:
    """Bytes [..., 2 n] as float16 [..., n]."""
    return part.contiguous().view(torch.float16)


def _nibbles(part: Tensor, run: int) -> Tensor:
    """Low halves of `run` bytes, then their high ones, and so on: uint8 [..., n] -> [..., 2 n]."""
    runs = part.unflatten(-1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def _bits(part: Tensor, width: int) -> Tensor:
    """Bits of `width` each of all bytes, the lowest ones of each first: [..., n] -> [..., 8 / width, n]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=part.device)
    return (part[..., None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _small(blocks: Tensor, *, has_least: bool, has_fifth: bool, middle: int) -> TiledWeight:
    """Q4_0, Q4_1, Q5_0, Q5_1: [scale] [least] [fifth bits] [nibbles]."""
    start = 4 if has_least else 2
    scales = _halves(blocks[..., :start])
    codes = _nibbles(blocks[..., start + (4 if has_fifth else 0) :], 16).flatten(1)
    more: dict[str, Any] = {"zero": middle, "has_leasts": has_least}
    if has_fifth:
        fifth = _bits(blocks[..., start : start + 4], 1).transpose(-1, -2).flatten(1)
        more |= {"plane": plane(fifth << 4, 1), "plane_bits": 1}
    leasts = scales[..., 1] if has_least else None
    return TiledWeight.scaled(pairs(codes), scales[..., 0], (1, 32), leasts, packed=True, **more)


def _q8_0(blocks: Tensor) -> TiledWeight:
    codes = blocks[..., 2:].flatten(1).contiguous().view(torch.int8)
    return TiledWeight.scaled(codes, _halves(blocks[..., :2])[..., 0], (1, 32))


def _mxfp4(blocks: Tensor) -> TiledWeight:
    return TiledWeight.mxfp4(pairs(_nibbles(blocks[..., 1:], 16).flatten(1)), blocks[..., 0].contiguous())


def _with_six_bits(blocks: Tensor, *, has_fifth: bool) -> TiledWeight:
    """Q4_K, Q5_K: [scale] [least, negative] [12 bytes: 8 times scale and least] [fifth bits] [nibbles]."""
    supers = _halves(blocks[..., :4]).clone()
    supers[..., 1].neg_()
    first, second, rest = blocks[..., 4:16].split(4, -1)
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), -1).flatten(1)
    leasts = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), -1).flatten(1)
    codes = _nibbles(blocks[..., 48 if has_fifth else 16 :], 32).flatten(1)
    more: dict[str, Any] = {"has_leasts": True, "supers": supers, "super_width": _WIDE}
    if has_fifth:
        more |= {"plane": plane(_bits(blocks[..., 16:48], 1).flatten(1) << 4, 1), "plane_bits": 1}
    return TiledWeight.scaled(pairs(codes), scales, (1, 32), leasts, packed=True, **more)


def _q6_k(blocks: Tensor) -> TiledWeight:
    """[nibbles] [upper bits] [16 scales] [scale]."""
    low = _nibbles(blocks[..., :128], 64).flatten(1)
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(1)
    scales = blocks[..., 192:208].flatten(1).contiguous().view(torch.int8)
    return TiledWeight.scaled(
        pairs(low),
        scales,
        (1, 16),
        packed=True,
        zero=32,
        plane=plane(high << 4, 2),
        plane_bits=2,
        supers=_halves(blocks[..., 208:]),
        super_width=_WIDE,
    )


_FORMS: dict[str, Callable[[Tensor], TiledWeight]] = {
    "Q4_0": lambda blocks: _small(blocks, has_least=False, has_fifth=False, middle=8),
    "Q4_1": lambda blocks: _small(blocks, has_least=True, has_fifth=False, middle=0),
    "Q5_0": lambda blocks: _small(blocks, has_least=False, has_fifth=True, middle=16),
    "Q5_1": lambda blocks: _small(blocks, has_least=True, has_fifth=True, middle=0),
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q4_K": lambda blocks: _with_six_bits(blocks, has_fifth=False),
    "Q5_K": lambda blocks: _with_six_bits(blocks, has_fifth=True),
    "Q6_K": _q6_k,
}
