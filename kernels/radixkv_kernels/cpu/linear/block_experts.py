# SPDX-License-Identifier: Apache-2.0
"""Products of experts that keep a file's blocks: each row is multiplied by its own expert's weight.

    y[i] = x[i] W[e(i)]^T + b[e(i)]        ExpertProduct.multiply(rows, experts, counts, y)

Rows of the same expert are neighbours. One launch computes all experts, with the panels and the tiles of
`block_product`: an expert is a section with rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from radixkv_kernels.cpu.linear import block_product as launch
from radixkv_kernels.cpu.linear.block_method import BlockMethod, default_method
from radixkv_kernels.cpu.linear.block_panels import BlockPanels
from radixkv_kernels.cpu.linear.launch import ArgumentBlock, float_bits

_Array = np.ndarray[Any, Any]


class ExpertPanels:
    """The weights of all experts in panels.

    Args:
        number: of the format, one of `ALL_FORMATS`.
        rows: uint8 [experts, out, bytes of a row], C-contiguous: the file's blocks; not kept.
        method: of the products; None: the fastest.
        factors: by which each expert's weight is multiplied; None: they are not.

    Attributes:
        experts, out_features, in_features: their shape.
        format: their `BlockFormat`.
        addresses: int64 [experts], of each one's first panel.
        panels, panel_bytes: panels of an expert, and bytes from one to the next.

    Raises:
        ValueError: outputs that are not whole panels: one expert lies after the other. Blocks have 32 inputs,
            and an expert's outputs are inputs, so that this does not happen.
    """

    def __init__(
        self,
        number: int,
        rows: _Array,
        method: BlockMethod | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        self.factors = [1.0] * len(rows) if factors is None else factors
        self.experts, self.out_features, row_bytes = rows.shape
        self.method = default_method() if method is None else method
        self.panels, rest = divmod(self.out_features, self.method.columns)
        if rest:
            raise ValueError(f"experts with {self.out_features} outputs are not whole panels")
        self._whole = BlockPanels(number, rows.reshape(-1, row_bytes), method=self.method)
        self.format, self.in_features = self._whole.format, self._whole.in_features
        self.takes_floats = self._whole.takes_floats
        self.panel_bytes = self._whole.panel_bytes
        steps = np.arange(self.experts, dtype=np.int64)
        self.addresses = self._whole.address + steps * (self.panels * self.panel_bytes)

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes

    def __repr__(self) -> str:
        return f"ExpertPanels({self.format.name}, {self.experts}x{self.out_features}x{self.in_features})"


class ExpertProduct:
    """The product, with weights in sections of panels; not thread-safe.

    Args:
        sections: weights of the same experts with the same inputs, in the order of their outputs.
        biases: float32 [experts, out] of each section, or None.

    Raises:
        ValueError: sections that differ in their experts, inputs or methods.
    """

    def __init__(self, sections: Sequence[ExpertPanels], biases: Sequence[torch.Tensor | None]) -> None:
        first = sections[0]
        self.experts, self.in_features, method = first.experts, first.in_features, first.method
        if any(
            (each.experts, each.in_features, each.method) != (self.experts, self.in_features, method)
            for each in sections
        ):
            raise ValueError("sections of a product must have the same experts, inputs and method")
        if any(each.takes_floats != first.takes_floats for each in sections):
            raise ValueError("sections of a product must take the same rows, int8 or bfloat16")
        #: Of the rows that it multiplies, for `BlockRows`.
        self.row_dtype = torch.bfloat16 if first.takes_floats else torch.int8
        self.out_features = sum(each.out_features for each in sections)
        self._sections = tuple(sections)
        self._functions = [launch.format_kernel(each.format.number, method) for each in sections]
        self._biases: list[torch.Tensor] = []
        self._table = np.zeros((self.experts, len(sections), launch.SECTION_SIZE), dtype=np.int64)
        column = 0
        for index, (each, own) in enumerate(zip(sections, biases, strict=True)):
            row = self._table[:, index]
            bias = torch.zeros(1 if own is None else self.experts, each.panels * method.columns)
            if own is not None:
                bias[:, : each.out_features] = own
            self._biases.append(bias)
            places = np.arange(self.experts, dtype=np.int64) * (0 if own is None else 4 * bias.stride(0))
            row[:, launch.BIAS] = bias.data_ptr() + places
            row[:, launch.FUNCTION] = self._functions[index].address
            row[:, launch.PANELS], row[:, launch.PANEL_BYTES] = each.panels, each.panel_bytes
            row[:, launch.WEIGHT] = each.addresses
            row[:, launch.UNITS] = each.in_features // each.format.inputs
            row[:, launch.FACTOR] = [float_bits(factor) for factor in each.factors]
            row[:, launch.WIDTH], row[:, launch.FIRST_COLUMN] = each.out_features, column
            column += each.out_features
        self._block = ArgumentBlock(launch.NUM_ARGUMENTS)
        self._block.values[launch.ROWS_PER_ITEM] = launch.ITEM_ROWS
        self._kernel = launch.launch_kernel(method)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._sections) + sum(each.nbytes for each in self._biases)

    def multiply(
        self, rows: torch.Tensor, experts: _Array, counts: _Array, out: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows into `out` and return it.

        Args:
            rows: of `BlockRows`, made for `row_dtype`; rows of one expert are neighbours.
            experts, counts: int64 [n]: experts in the order of their rows, and how many each has.
            out: float32 [T, out], last dimension contiguous.
        """
        table = self._table[experts]
        table[:, :, launch.FIRST_ROW] = (np.cumsum(counts) - counts)[:, None]
        table[:, :, launch.ROWS] = counts[:, None]
        a = self._block.values
        a[launch.SECTIONS], a[launch.NUM_SECTIONS] = table.ctypes.data, table.shape[0] * table.shape[1]
        a[launch.INPUT], a[launch.INPUT_STRIDE] = rows.data_ptr(), rows.stride(0) * rows.itemsize
        a[launch.OUTPUT], a[launch.OUTPUT_STRIDE] = out.data_ptr(), 4 * out.stride(0)
        work = rows.shape[0] * self.out_features * self.in_features
        self._block.run(self._kernel, on_all_threads=work >= launch.SMALL)
        return out
