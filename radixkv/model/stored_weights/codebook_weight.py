# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits that are indices of a table of 16 numbers, as bitsandbytes stores NF4 and FP4.

    number = table[code] * scale of its block

Blocks are of consecutive numbers of the flat weight, so that they end at the ends of rows only where rows are
whole blocks. Two codes are a byte, the first one in its high half. (Dettmers et al., QLoRA, 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from radixkv.model.stored_weights.stored_weight import ScaleGroupCut, StoredWeight, check_floats, groups_of


class CodebookWeight(StoredWeight):
    """Indices of 4 bits with a scale for each block.

    Args:
        codes: uint8 [out * in / 2], rounded up.
        scales: float32 [out * in / block_size], rounded up.
        table: float32 [16].
        out_features, in_features, block_size: sizes.

    Raises:
        ValueError: shapes that do not fit.
    """

    title = "a table of 16 numbers (NF4, FP4)"

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        table: Tensor,
        out_features: int,
        in_features: int,
        block_size: int,
    ) -> None:
        super().__init__(out_features, in_features)
        count = out_features * in_features
        if codes.shape != (-(-count // 2),) or codes.dtype != torch.uint8:
            raise ValueError(
                f"{out_features} x {in_features} numbers of 4 bits need {-(-count // 2)} bytes, not "
                f"{list(codes.shape)} of {codes.dtype}"
            )
        if block_size < 1 or scales.shape != (-(-count // block_size),) or table.shape != (16,):
            raise ValueError(
                f"{count} numbers in blocks of {block_size} have {list(scales.shape)} scales and a table of "
                f"{list(table.shape)}"
            )
        check_floats(scales, "scales")
        check_floats(table, "numbers of the table")
        self.codes, self.scales, self.table, self.block_size = codes, scales, table, block_size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales, self.table

    def code_rows(self, own: range) -> Tensor:
        """Codes of some outputs one by one, uint8 [len(own), in]."""
        start, stop = own.start * self.in_features, own.stop * self.in_features
        pairs = self.codes[start // 2 : -(-stop // 2)]
        codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[start % 2 :]
        return codes[: stop - start].view(len(own), self.in_features)

    def rows(self, own: range) -> Tensor:
        start, stop = own.start * self.in_features, own.stop * self.in_features
        numbers = self.table[self.code_rows(own).flatten().int()]
        first = start // self.block_size
        scales = self.scales[first : -(-stop // self.block_size)].repeat_interleave(self.block_size)
        numbers *= scales[start - first * self.block_size :][: stop - start]
        return numbers.view(len(own), self.in_features)

    def of_outputs(self, spans: Sequence[range]) -> Self:
        total = self.out_features * self.in_features
        codes, scales = [], []
        for number, span in enumerate(spans):
            flat = range(span.start * self.in_features, span.stop * self.in_features)
            end = total if number == len(spans) - 1 else -1
            blocks = groups_of(flat, self.block_size, end, "Numbers")
            if flat.start % 2:
                raise ScaleGroupCut("a quantised weight is split within a byte of two numbers")
            codes.append(self.codes[flat.start // 2 : -(-flat.stop // 2)])
            scales.append(self.scales[blocks.start : blocks.stop])
        count = sum(map(len, spans))
        return type(self)(
            torch.cat(codes), torch.cat(scales), self.table, count, self.in_features, self.block_size
        )

    def of_inputs(self, own: range) -> Self:
        if self.in_features % self.block_size or self.block_size % 2:
            raise ScaleGroupCut(
                f"a quantised weight of {self.in_features} inputs is not split by inputs: its blocks of "
                f"{self.block_size} do not end at the ends of rows"
            )
        blocks = groups_of(own, self.block_size, self.in_features, "Inputs")
        codes = self.codes.view(self.out_features, -1)[:, own.start // 2 : own.stop // 2]
        scales = self.scales.view(self.out_features, -1)[:, blocks.start : blocks.stop]
        return type(self)(
            codes.flatten(), scales.flatten(), self.table, self.out_features, len(own), self.block_size
        )

    @classmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        first = weights[0]
        for each in weights:
            if each.block_size != first.block_size or not torch.equal(each.table, first.table):
                raise ScaleGroupCut("weights with different blocks or tables are not one product")
        for each in weights[:-1]:
            count = each.out_features * each.in_features
            if count % each.block_size or count % 2:
                raise ScaleGroupCut("weights that end within a block are not one product")
        return cls(
            torch.cat([each.codes for each in weights]),
            torch.cat([each.scales for each in weights]),
            first.table,
            sum(each.out_features for each in weights),
            first.in_features,
            first.block_size,
        )

    def to(self, device: torch.device) -> Self:
        codes, scales, table = (each.to(device) for each in self.tensors)
        return type(self)(codes, scales, table, self.out_features, self.in_features, self.block_size)
