# SPDX-License-Identifier: Apache-2.0
"""Weights of 2 to 8 bits in MLX's affine form: codes in a stream of bits, a scale and a bias for each group.

    number[o, i] = code[o, i] * scale[o, i // group] + bias[o, i // group]

Code i of a row takes bits `bits * i` and following of the row's bytes, the lowest bit first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from radixkv.model.stored_weights.stored_weight import (
    ScaleGroupCut,
    StoredWeight,
    check_floats,
    groups_of,
    take_rows,
)


class AffineWeight(StoredWeight):
    """Codes of a few bits with a scale and a bias for each group of an output's inputs.

    Args:
        codes: uint8 [out, in * bits / 8].
        scales, biases: floats [out, in / group].
        bits: of a code.
        signed: codes are stored less half of their range, in two's complement.

    Raises:
        ValueError: shapes that do not fit.
    """

    title = "affine groups"

    def __init__(
        self, codes: Tensor, scales: Tensor, biases: Tensor, bits: int, *, signed: bool = False
    ) -> None:
        if codes.ndim != 2 or codes.dtype != torch.uint8 or not 2 <= bits <= 8:
            raise ValueError(f"{bits} bits in {list(codes.shape)} of {codes.dtype}")
        super().__init__(len(codes), codes.shape[1] * 8 // bits)
        if scales.ndim != 2 or scales.shape != biases.shape or len(scales) != len(codes):
            raise ValueError(
                f"{len(codes)} outputs have {list(scales.shape)} scales and {list(biases.shape)} biases"
            )
        if not scales.shape[1] or self.in_features % scales.shape[1]:
            raise ValueError(f"{self.in_features} inputs are no {scales.shape[1]} groups of one size")
        check_floats(scales, "scales")
        check_floats(biases, "biases")
        self.codes, self.scales, self.biases, self.bits = codes, scales, biases, bits
        self.signed = signed
        self.group_size = self.in_features // scales.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.biases

    def code_rows(self, own: range) -> Tensor:
        """Codes of some outputs one by one, uint8 [len(own), in]."""
        codes = unpacked_bits(self.codes[own.start : own.stop], self.bits, self.in_features)
        return codes ^ (1 << (self.bits - 1)) if self.signed else codes

    def rows(self, own: range) -> Tensor:
        part = slice(own.start, own.stop)
        codes = self.code_rows(own).to(torch.float32)
        grouped = codes.view(len(own), -1, self.group_size)
        grouped.mul_(self.scales[part].to(torch.float32)[..., None])
        grouped.add_(self.biases[part].to(torch.float32)[..., None])
        return codes

    def of_outputs(self, spans: Sequence[range]) -> Self:
        return type(self)(
            take_rows(self.codes, spans),
            take_rows(self.scales, spans),
            take_rows(self.biases, spans),
            self.bits,
            signed=self.signed,
        )

    def of_inputs(self, own: range) -> Self:
        groups = groups_of(own, self.group_size, self.in_features, "Inputs")
        part = slice(groups.start, groups.stop)
        codes = self.codes[:, own.start * self.bits // 8 : own.stop * self.bits // 8]
        scales, biases = self.scales[:, part], self.biases[:, part]
        return type(self)(codes.contiguous(), scales, biases, self.bits, signed=self.signed)

    @classmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        if len({(each.bits, each.signed, each.group_size) for each in weights}) > 1:
            raise ScaleGroupCut("weights with different groups of inputs are not one product")
        return cls(
            torch.cat([each.codes for each in weights]),
            torch.cat([each.scales for each in weights]),
            torch.cat([each.biases for each in weights]),
            weights[0].bits,
            signed=weights[0].signed,
        )

    def to(self, device: torch.device) -> Self:
        codes, scales, biases = (each.to(device) for each in self.tensors)
        return type(self)(codes, scales, biases, self.bits, signed=self.signed)


def unpacked_bits(codes: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of a stream of bits; uint8 [rows, bytes] -> uint8 [rows, count]."""
    if bits == 8:
        return codes[:, :count]
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
        return ((codes[..., None] >> shifts) & mask).flatten(1)[:, :count]
    first = torch.arange(count, device=codes.device) * bits
    index = first // 8
    wide = codes.to(torch.int16)
    both = wide[:, index] | (wide[:, (index + 1).clamp_max(codes.shape[1] - 1)] << 8)
    return ((both >> (first % 8)) & mask).to(torch.uint8)
