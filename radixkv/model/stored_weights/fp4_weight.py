# SPDX-License-Identifier: Apache-2.0
"""Weights of 4-bit floats (E2M1) with scales for groups of inputs: MXFP4 and NVFP4.

    number[o, i] = E2M1[code[o, i]] * scale[o, i // group]

    MXFP4   scales are exponents of two (E8M0) for 32 inputs (OCP Microscaling Formats, 2023)
    NVFP4   scales are floats of 8 bits (E4M3) for 16 inputs, and one float32 for the whole weight

Two codes are a byte, the first one in its low half.
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

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)])


class Fp4Weight(StoredWeight):
    """Floats of 4 bits with a scale for each group of an output's inputs.

    Args:
        codes: uint8 [out, in / 2].
        scales: [out, in / group] of float8_e8m0fnu or float8_e4m3fn.
        factor: float32 [], by which scales of NVFP4 are multiplied; None: 1.
        divides: scales are divided by the factor, not multiplied.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """

    title = "FP4"

    def __init__(
        self, codes: Tensor, scales: Tensor, factor: Tensor | None = None, *, divides: bool = False
    ) -> None:
        if codes.ndim != 2 or codes.dtype != torch.uint8:
            raise ValueError(f"codes are {list(codes.shape)} of {codes.dtype}")
        super().__init__(codes.shape[0], 2 * codes.shape[1])
        if scales.dtype not in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
            raise ValueError(f"scales are {scales.dtype}, expected exponents or float8_e4m3fn")
        self.group_size = 32 if scales.dtype == torch.float8_e8m0fnu else 16
        grid = [self.out_features, self.in_features // self.group_size]
        if list(scales.shape) != grid or self.in_features % self.group_size:
            raise ValueError(
                f"{self.out_features} x {self.in_features} numbers in groups of {self.group_size} need "
                f"{grid} scales, not {list(scales.shape)}"
            )
        if factor is not None and factor.numel() != 1:
            raise ValueError(f"it has {list(factor.shape)} scales of the whole weight, expected one")
        if factor is not None:
            check_floats(factor, "scales of the whole weight")
        self.codes, self.scales = codes, scales
        self.factor = None if factor is None else factor.reshape(()).to(torch.float32)
        self.divides = divides

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scales) if self.factor is None else (self.codes, self.scales, self.factor)

    def code_rows(self, own: range) -> Tensor:
        """Codes of some outputs one by one, uint8 [len(own), in]."""
        pairs = self.codes[own.start : own.stop]
        return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)

    def rows(self, own: range) -> Tensor:
        numbers = _E2M1.to(self.codes.device)[self.code_rows(own).int()]
        scales = self.scales[own.start : own.stop].to(torch.float32)
        if self.factor is not None:
            scales = scales / self.factor if self.divides else scales * self.factor
        numbers *= scales.repeat_interleave(self.group_size, dim=1)
        return numbers

    def of_outputs(self, spans: Sequence[range]) -> Self:
        return self._like(take_rows(self.codes, spans), take_rows(self.scales, spans))

    def of_inputs(self, own: range) -> Self:
        groups = groups_of(own, self.group_size, self.in_features, "Inputs")
        return self._like(
            self.codes[:, own.start // 2 : own.stop // 2], self.scales[:, groups.start : groups.stop]
        )

    @classmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        first = weights[0]
        for each in weights[1:]:
            if each.scales.dtype != first.scales.dtype or each.divides != first.divides:
                raise ScaleGroupCut("weights with different groups of inputs are not one product")
            if not _equal(each.factor, first.factor):
                raise ScaleGroupCut("weights with different scales of the whole weight are not one product")
        scales = torch.cat([each.scales.view(torch.uint8) for each in weights]).view(first.scales.dtype)
        return first._like(torch.cat([each.codes for each in weights]), scales)

    def to(self, device: torch.device) -> Self:
        factor = None if self.factor is None else self.factor.to(device)
        return type(self)(self.codes.to(device), self.scales.to(device), factor, divides=self.divides)

    def _like(self, codes: Tensor, scales: Tensor) -> Self:
        return type(self)(codes, scales, self.factor, divides=self.divides)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
