# SPDX-License-Identifier: Apache-2.0
"""Weights of one code a byte, each a float of 8 bits or a whole number, with scales for blocks of them.

    number[o, i] = (code[o, i] - zero[o // height, i // width]) * scale[o // height, i // width]

A scale for the whole tensor, for each output (channel), for groups of an output's inputs and for blocks of
128 x 128 are one thing with different blocks. The last block of a row or column may be smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from radixkv.model.stored_weights.stored_weight import (
    ScaleGroupCut,
    StoredWeight,
    check_floats,
    check_whole,
    groups_of,
    take_rows,
)


class ScaledWeight(StoredWeight):
    """Codes of 8 bits with a grid of scales.

    Args:
        codes: [out, in].
        scales: [out / height, in / width], rounded up; any floats, also exponents alone (float8_e8m0fnu).
        block: height and width of what shares a scale; (1, in) is a scale for each output.
        zeros: as the scales, what is subtracted from codes; None: nothing.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """

    dtypes: ClassVar[frozenset[torch.dtype]]

    def __init__(
        self, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None = None
    ) -> None:
        if codes.ndim != 2 or codes.dtype not in self.dtypes:
            raise ValueError(f"codes are {list(codes.shape)} of {codes.dtype}")
        super().__init__(*codes.shape)
        if min(block) < 1:
            raise ValueError(f"a block of {list(block)} holds nothing")
        grid = [-(-size // each) for size, each in zip(codes.shape, block, strict=True)]
        if list(scales.shape) != grid:
            raise ValueError(
                f"{list(codes.shape)} numbers in blocks of {list(block)} need {grid} scales, not "
                f"{list(scales.shape)}"
            )
        if zeros is not None and zeros.shape != scales.shape:
            raise ValueError(f"{list(scales.shape)} scales have {list(zeros.shape)} zero points")
        check_floats(scales, "scales", torch.float8_e8m0fnu)
        if zeros is not None:
            check_whole(zeros, "zero points")
        self.codes, self.scales, self.block, self.zeros = codes, scales, block, zeros

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)

    def rows(self, own: range) -> Tensor:
        height, width = self.block
        numbers = self.codes[own.start : own.stop].to(torch.float32)
        index = torch.arange(own.start, own.stop, device=numbers.device) // height
        if self.zeros is not None:
            numbers -= self._spread(self.zeros[index], width)
        numbers *= self._spread(self.scales[index], width)
        return numbers

    def _spread(self, grid: Tensor, width: int) -> Tensor:
        """Each block's value for each input (or one that all of them use)."""
        values = grid.to(torch.float32)
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(width, dim=1)[:, : self.in_features]

    def of_outputs(self, spans: Sequence[range]) -> Self:
        height = self.block[0]
        codes = take_rows(self.codes, spans)
        if len(self.scales) == 1:
            return self._like(codes, self.scales, self.zeros, (max(1, len(codes)), self.block[1]))
        for span in spans[:-1]:
            if span.stop % height:  # the next span's groups would begin within this one's last
                raise ScaleGroupCut(
                    f"outputs up to {span.stop} of a quantised weight end within a group of {height} that "
                    f"share a scale: split it at multiples of {height}"
                )
        own = [groups_of(span, height, self.out_features, "Outputs") for span in spans]
        zeros = None if self.zeros is None else take_rows(self.zeros, own)
        return self._like(codes, take_rows(self.scales, own), zeros, self.block)

    def of_inputs(self, own: range) -> Self:
        height, width = self.block
        codes = self.codes[:, own.start : own.stop]
        if self.scales.shape[1] == 1:
            return self._like(codes, self.scales, self.zeros, (height, max(1, len(own))))
        columns = groups_of(own, width, self.in_features, "Inputs")
        part = slice(columns.start, columns.stop)
        zeros = None if self.zeros is None else self.zeros[:, part]
        return self._like(codes, self.scales[:, part], zeros, self.block)

    @classmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        heights = {1 if len(each.scales) == 1 else each.block[0] for each in weights}
        if len(weights) == 1:
            return weights[0]
        if len({each.block[1] for each in weights}) > 1 or len({each.zeros is None for each in weights}) > 1:
            raise ScaleGroupCut("weights with different groups of inputs are not one product")
        if heights == {1}:  # whole tensors' scales become those of channels
            weights = [each.per_channel() for each in weights]
            height = 1
        else:
            height = max(heights)
            if any(each.block[0] != height or each.out_features % height for each in weights[:-1]) or (
                weights[-1].block[0] != height
            ):
                raise ScaleGroupCut(
                    f"weights whose outputs are no whole groups of {height} are not one product"
                )
        zeros = None
        if weights[0].zeros is not None:
            zeros = torch.cat([each.zeros for each in weights if each.zeros is not None])
        return weights[0]._like(
            torch.cat([each.codes for each in weights]),
            torch.cat([each.scales for each in weights]),
            zeros,
            (height, weights[0].block[1]),
        )

    def per_channel(self) -> Self:
        """The same numbers with scales of one output each. Scales are copied, codes are not."""
        if self.block[0] == 1:
            return self
        height = self.block[0]

        def spread(grid: Tensor) -> Tensor:
            return grid.repeat_interleave(height, dim=0)[: self.out_features]

        zeros = None if self.zeros is None else spread(self.zeros)
        return self._like(self.codes, spread(self.scales), zeros, (1, self.block[1]))

    def to(self, device: torch.device) -> Self:
        zeros = None if self.zeros is None else self.zeros.to(device)
        return self._like(self.codes.to(device), self.scales.to(device), zeros, self.block)

    def _like(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int]) -> Self:
        return type(self)(codes, scales, block, zeros)


class Fp8Weight(ScaledWeight):
    """Floats of 8 bits (e4m3, e5m2) with scales.

    Args:
        codes, scales, block, zeros: see `ScaledWeight`; floats have no zero points.
        input_scale: by which a static form divides its inputs before it rounds them; a product that does not
            round its inputs leaves it alone.
    """

    title = "FP8"
    dtypes = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        zeros: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__(codes, scales, block, zeros)
        if input_scale is not None and input_scale.numel() != 1:
            raise ValueError(f"its inputs have {list(input_scale.shape)} scales, expected one")
        self.input_scale = input_scale

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return super().tensors if self.input_scale is None else (*super().tensors, self.input_scale)

    def to(self, device: torch.device) -> Self:
        moved = super().to(device)
        if moved.input_scale is not None:
            moved.input_scale = moved.input_scale.to(device)
        return moved

    def _like(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int]) -> Self:
        return type(self)(codes, scales, block, zeros, self.input_scale)


class Int8Weight(ScaledWeight):
    """Whole numbers of at most 8 bits, a byte each, with scales."""

    title = "INT8"
    dtypes = frozenset({torch.int8, torch.uint8})
