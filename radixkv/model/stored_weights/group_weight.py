# SPDX-License-Identifier: Apache-2.0
"""Weights of 2 to 8 bits with scales and zero points for groups of inputs: AWQ, GPTQ, compressed-tensors.

    number[o, i] = (code[o, i] - zero[o, g]) * scale[o, g]        g = i // group, or the group of input i

GPTQ with activation order quantises inputs by their importance: each input names its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from radixkv.model.stored_weights.packed_codes import PackedCodes
from radixkv.model.stored_weights.stored_weight import (
    ScaleGroupCut,
    StoredWeight,
    check_floats,
    check_whole,
    groups_of,
    take_rows,
)


class GroupWeight(StoredWeight):
    """Unsigned codes with a scale and a zero point for each group of an output's inputs.

    Args:
        codes: of all numbers.
        scales: floats [out, groups].
        zeros: whole numbers [out, groups]; None: the middle of the codes, 8 for 4 bits.
        group_of: int [in], the group of each input; None: groups are neighbours of one size.

    Raises:
        ValueError: shapes that do not fit.
    """

    title = "whole numbers in groups"

    def __init__(
        self,
        codes: PackedCodes,
        scales: Tensor,
        zeros: Tensor | None = None,
        group_of: Tensor | None = None,
    ) -> None:
        super().__init__(codes.out_features, codes.in_features)
        if scales.ndim != 2 or len(scales) != self.out_features or not scales.shape[1]:
            raise ValueError(f"{self.out_features} outputs have {list(scales.shape)} scales")
        groups = scales.shape[1]
        if zeros is not None and zeros.shape != scales.shape:
            raise ValueError(f"{list(scales.shape)} scales have {list(zeros.shape)} zero points")
        if group_of is None:
            if self.in_features % groups:
                raise ValueError(f"{self.in_features} inputs are no {groups} groups of one size")
        elif group_of.shape != (self.in_features,) or (
            self.in_features and not 0 <= int(group_of.min()) <= int(group_of.max()) < groups
        ):
            raise ValueError(f"its inputs name groups beyond {groups}, or are not {self.in_features}")
        check_floats(scales, "scales")
        for each, what in ((zeros, "zero points"), (group_of, "inputs' groups")):
            if each is not None:
                check_whole(each, what)
        self.codes, self.scales, self.zeros, self.group_of = codes, scales, zeros, group_of

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.codes.bits

    @property
    def middle(self) -> int:
        """Zero point of all groups where there are none of their own."""
        middle: int = 1 << (self.bits - 1)
        return middle

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.in_features // self.scales.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        others = (self.zeros, self.group_of)
        return (self.codes.words, self.scales, *(each for each in others if each is not None))

    def rows(self, own: range) -> Tensor:
        numbers = self.codes.rows(own).to(torch.float32)
        part = slice(own.start, own.stop)
        numbers -= self.middle if self.zeros is None else self._spread(self.zeros[part])
        numbers *= self._spread(self.scales[part])
        return numbers

    def _spread(self, grid: Tensor) -> Tensor:
        values = grid.to(torch.float32)
        if self.group_of is not None:
            return values[:, self.group_of]
        return values.repeat_interleave(self.group_size, dim=1)

    def of_outputs(self, spans: Sequence[range]) -> Self:
        zeros = None if self.zeros is None else take_rows(self.zeros, spans)
        return type(self)(self.codes.of_outputs(spans), take_rows(self.scales, spans), zeros, self.group_of)

    def of_inputs(self, own: range) -> Self:
        if self.group_of is not None:
            group_of = self.group_of[own.start : own.stop]
            return type(self)(self.codes.of_inputs(own), self.scales, self.zeros, group_of)
        if self.scales.shape[1] == 1:
            return type(self)(self.codes.of_inputs(own), self.scales, self.zeros)
        groups = groups_of(own, self.group_size, self.in_features, "Inputs")
        part = slice(groups.start, groups.stop)
        zeros = None if self.zeros is None else self.zeros[:, part]
        return type(self)(self.codes.of_inputs(own), self.scales[:, part], zeros)

    @classmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        first = weights[0]
        for each in weights[1:]:
            same = (each.group_of is None) == (first.group_of is None)
            if same and each.group_of is not None and first.group_of is not None:
                same = torch.equal(each.group_of, first.group_of)
            if not same or each.scales.shape[1] != first.scales.shape[1]:
                raise ScaleGroupCut("weights with different groups of inputs are not one product")
        zeros = None
        if any(each.zeros is not None for each in weights):
            zeros = torch.cat(
                [
                    torch.full(each.scales.shape, each.middle, device=each.scales.device)
                    if each.zeros is None
                    else each.zeros.long()
                    for each in weights
                ]
            )
        codes = PackedCodes.concat([each.codes for each in weights])
        return cls(codes, torch.cat([each.scales for each in weights]), zeros, first.group_of)

    def to(self, device: torch.device) -> Self:
        zeros = None if self.zeros is None else self.zeros.to(device)
        group_of = None if self.group_of is None else self.group_of.to(device)
        return type(self)(self.codes.to(device), self.scales.to(device), zeros, group_of)
