# SPDX-License-Identifier: Apache-2.0
"""Products of the rewritten layers whose rows adapters change; each replaces a plain product."""

from __future__ import annotations

import torch

from radixkv.model.adapters.attachment import ProductSlot
from radixkv_kernels.cpu.linear.block_product import BlockProduct
from radixkv_kernels.cpu.linear.block_rows import widened
from radixkv_kernels.cpu.linear.float_product import PackedFloat, PackedGate
from radixkv_kernels.cpu.linear.int8_product import GROUP, PackedInt8


class AdaptedFloat:
    """A `PackedFloat` whose rows adapters change."""

    def __init__(self, product: PackedFloat, slot: ProductSlot) -> None:
        self.product, self.slot = product, slot
        self.out_features = product.out_features

    def multiply(self, rows: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """See `PackedFloat.multiply`."""
        return self.product.multiply(rows, out, add=add, changes=self.slot.changes(rows))


class AdaptedGate:
    """A `PackedGate` whose rows adapters change before the SiLU."""

    def __init__(self, product: PackedGate, slot: ProductSlot) -> None:
        self.product, self.slot = product, slot
        self.out_features = product.out_features

    def multiply(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See `PackedGate.multiply`."""
        return self.product.multiply(rows, out, changes=self.slot.changes(rows))


class AdaptedInt8:
    """A `PackedInt8` whose rows adapters change, in float32, from the very inputs that it multiplies."""

    def __init__(self, product: PackedInt8, slot: ProductSlot) -> None:
        self.product, self.slot = product, slot
        self.out_features, self.row_width = product.out_features, product.row_width

    def multiply(
        self, rows: torch.Tensor, row_scales: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """See `PackedInt8.multiply`."""
        self.product.multiply(rows, row_scales, out, add=add)
        adapters = self.slot.active()
        if adapters is not None:
            inputs = _widened(rows, row_scales)[:, : self.product.in_features]
            self.slot.add(adapters, inputs, out)
        return out


class AdaptedBlocks:
    """A `BlockProduct` whose rows adapters change, in float32, from the very inputs that it multiplies."""

    def __init__(self, product: BlockProduct, slot: ProductSlot) -> None:
        self.product, self.slot = product, slot
        self.out_features, self.row_dtype = product.out_features, product.row_dtype
        self.order = product.order

    def multiply(self, rows: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """See `BlockProduct.multiply`."""
        self.product.multiply(rows, out, add=add)
        adapters = self.slot.active()
        if adapters is not None:
            inputs = widened(rows, self.product.in_features)
            if self.order is not None:
                inputs = torch.empty_like(inputs).index_copy_(1, self.order.long(), inputs)
            self.slot.add(adapters, inputs, out)
        return out


def _widened(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantised rows [T, W] as float32; see `radixkv_kernels.cpu.linear.int8_rows`."""
    values = rows.to(torch.float32)
    if rows.dtype == torch.uint8:
        values -= 128.0
    return values.view(len(rows), -1, GROUP).mul_(scales[:, :, None]).view(len(rows), -1)
