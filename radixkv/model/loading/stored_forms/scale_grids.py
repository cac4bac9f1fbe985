# SPDX-License-Identifier: Apache-2.0
"""From a scale as formats store it to the grid and the block that `ScaledWeight` takes."""

from __future__ import annotations

import torch
from torch import Tensor

#: Scales that are exponents of two alone, a byte each.
_EXPONENTS = torch.float8_e8m0fnu


def grid_of(
    codes: Tensor, scale: Tensor, block: tuple[int, int] | None, *, only: bool = False
) -> tuple[Tensor, tuple[int, int]]:
    """Scales as a grid, and the block that each belongs to.

    A single number belongs to the whole weight, as many as there are outputs to one each; others, to blocks.

    Args:
        codes: [out, in].
        scale: a number, [out], [out, 1] or a grid; bytes of blocks are exponents of two.
        block: height and width of blocks, as the configuration has them; None: it has none.
        only: nothing but these blocks will do.

    Raises:
        ValueError: it is none of these.
    """
    rows, columns = codes.shape
    if only and scale.dtype == torch.uint8:
        scale = scale.view(_EXPONENTS)
    if scale.ndim == 4 and scale.shape[1] == scale.shape[3] == 1:  # as ModelOpt keeps blocks
        scale = scale[:, 0, :, 0]
    if not only and scale.numel() == 1:
        return scale.reshape(1, 1), (max(1, rows), max(1, columns))
    if not only and scale.shape in ((rows,), (rows, 1)):
        return scale.reshape(rows, 1), (1, max(1, columns))
    if block is None or scale.ndim != 2:
        raise ValueError(f"{rows} x {columns} numbers have scales of the shape {list(scale.shape)}")
    return scale, block


def as_grid(values: Tensor, grid: list[int], what: str) -> Tensor:
    """Scales or zero points in the shape of their grid; one column may come without its dimension.

    Raises:
        ValueError: they have another shape.
    """
    flat = values.ndim == 1 and grid[1] == 1 and len(values) == grid[0]
    if list(values.shape) != grid and not flat and not values.numel() == grid[0] * grid[1] == 1:
        raise ValueError(f"its {what} are {list(values.shape)}, expected {grid}")
    return values.reshape(grid)
