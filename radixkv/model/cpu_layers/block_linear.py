# SPDX-License-Identifier: Apache-2.0
"""Linear layers and embeddings whose weights stay the blocks of a GGUF file.

Rows of a product are rounded to int8 with a scale for each 32 inputs, as llama.cpp does: the error against
the dequantised weights is below a hundredth, less than that of rounding weights to 4 bits by an order of
magnitude. A row of the result depends on its own row of the input only, bit for bit.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

from radixkv.model.decoder_layers import StoredProduct
from radixkv_kernels.cpu.linear.block_panels import BlockPanels
from radixkv_kernels.cpu.linear.block_product import BlockProduct
from radixkv_kernels.cpu.linear.block_rows import BlockRows

_Array = np.ndarray[Any, Any]


class BlockLinear(StoredProduct):
    """`y = x W^T + b`; [..., in] float32 -> [..., out] float32.

    Args:
        panels: the weight.
        bias: float32 [out] or None.
        rows: shared by all layers of a model.
        inputs: for each column of the panels, the input; None: the same.
    """

    def __init__(
        self, panels: BlockPanels, bias: torch.Tensor | None, rows: BlockRows, inputs: _Array | None = None
    ) -> None:
        super().__init__(panels.in_features, panels.out_features)
        self.panels, self.bias, self.rows = panels, bias, rows
        self.product = BlockProduct([panels], [bias], _order(inputs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(len(rows), self.out_features)
        own = self.rows.quantize(rows, self.product.row_dtype, self.product.order)
        return self.product.multiply(own, out).view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.panels.format.name}"


class ReorderedBlocks(StoredProduct):
    """A product of several weights, one above the other, in the file's order of inputs or outputs.

    Args:
        panels: the weights, whose formats may differ.
        bias: float32 [out] in the order of the panels, or None.
        rows: shared by all layers of a model.
        inputs: for each column of the panels, the input; None: the same.
        outputs: for each output, the row of the panels; None: the same.
    """

    def __init__(
        self, panels: list[BlockPanels], bias: torch.Tensor | None, rows: BlockRows,
        inputs: _Array | None = None, outputs: _Array | None = None,
    ) -> None:  # fmt: skip
        super().__init__(panels[0].in_features, sum(each.out_features for each in panels))
        self.rows = rows
        sizes = [each.out_features for each in panels]
        biases = [None] * len(panels) if bias is None else list(bias.split(sizes))
        self.product = BlockProduct(panels, biases, _order(inputs))
        self.outputs = None if outputs is None else torch.from_numpy(outputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features).contiguous()
        own = self.rows.quantize(rows, self.product.row_dtype, self.product.order)
        out = self.product.multiply(own, torch.empty(len(rows), self.out_features))
        if self.outputs is not None:
            out = out[:, self.outputs]
        return out.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _order(inputs: _Array | None) -> torch.Tensor | None:
    return None if inputs is None else torch.from_numpy(inputs.astype(np.int32))


class BlockEmbedding(torch.nn.Module):
    """An embedding that dequantises the rows it is asked for, from the mapped file.

    Args:
        stored: [vocabulary, bytes of a row], blocks, or [vocabulary, width] numbers.
        number: ggml's number of their format.
        scale: by which every row is multiplied.
    """

    def __init__(self, stored: np.ndarray[Any, Any], number: int, scale: float = 1.0) -> None:
        super().__init__()
        self.stored, self.format = stored, gguf.GGMLQuantizationType(number)
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        chosen = ids.reshape(-1).numpy()
        rows = gguf.quants.dequantize(self.stored[chosen], self.format)
        out = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))
        if self.scale != 1.0:
            out.mul_(self.scale)
        return out.view(*ids.shape, -1)

    def extra_repr(self) -> str:
        return f"{len(self.stored)} rows, {self.format.name}"
