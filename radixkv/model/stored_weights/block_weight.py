# SPDX-License-Identifier: Apache-2.0
"""Weights in the blocks of a GGUF file: 32 or 256 neighbouring inputs of an output with their scales.

`radixkv_kernels.cpu.linear.block_formats` describes the formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from radixkv.model.stored_weights.stored_weight import ScaleGroupCut, StoredWeight, groups_of, take_rows


class BlockWeight(StoredWeight):
    """Rows of blocks of one format.

    Args:
        blocks: uint8 [out, bytes].
        kind: the format, a `GGMLQuantizationType` of the gguf package.

    Raises:
        ValueError: bytes that are no whole blocks.
    """

    def __init__(self, blocks: Tensor, kind: Any) -> None:
        import gguf  # slow to import

        self.block_inputs, self.block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if blocks.ndim != 2 or blocks.dtype != torch.uint8 or blocks.shape[1] % self.block_bytes:
            raise ValueError(f"{list(blocks.shape)} of {blocks.dtype} are no blocks of {kind.name}")
        super().__init__(len(blocks), blocks.shape[1] // self.block_bytes * self.block_inputs)
        self.blocks, self.kind = blocks, kind

    @property
    def title(self) -> str:  # type: ignore[override]
        return str(self.kind.name)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.blocks,)

    def rows(self, own: range) -> Tensor:
        import gguf  # slow to import

        data = self.blocks[own.start : own.stop].cpu().numpy()
        return torch.from_numpy(gguf.quants.dequantize(data, self.kind)).to(self.blocks.device)

    def of_outputs(self, spans: Sequence[range]) -> Self:
        return type(self)(take_rows(self.blocks, spans), self.kind)

    def of_inputs(self, own: range) -> Self:
        groups = groups_of(own, self.block_inputs, self.in_features, "Inputs")
        part = slice(groups.start * self.block_bytes, groups.stop * self.block_bytes)
        return type(self)(self.blocks[:, part].contiguous(), self.kind)

    def in_order(self, order: Tensor) -> Self:
        """The same outputs in another order, by their numbers."""
        return type(self)(self.blocks[order], self.kind)

    @classmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        if len({each.kind for each in weights}) > 1:
            raise ScaleGroupCut("weights in blocks of different formats are not one product")
        return cls(torch.cat([each.blocks for each in weights]), weights[0].kind)

    def to(self, device: torch.device) -> Self:
        return type(self)(self.blocks.to(device), self.kind)
