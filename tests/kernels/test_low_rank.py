# SPDX-License-Identifier: Apache-2.0
"""Low-rank sums: close to float64, each row on its own, rows between segments untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from radixkv_kernels.cpu.linear import low_rank

RANKS = {(2, 5): 3, (7, 13): 16}  # rows of each segment -> its rank; 5 and 6 lie between
ROWS, DEPTH = 13, 70


@pytest.mark.parametrize("widths", [(600,), (30, 20, 10)], ids=str)
def test_rows_and_segments(widths: tuple[int, ...]) -> None:
    chance = np.random.default_rng(0)
    x = torch.from_numpy(chance.standard_normal((ROWS, DEPTH), dtype=np.float32))
    before = torch.from_numpy(chance.standard_normal((ROWS, sum(widths)), dtype=np.float32))
    expected, kept = before.double(), []
    table = np.zeros((len(RANKS) + 1, low_rank.SEGMENT_SIZE), np.int64)
    table[1, [low_rank.START, low_rank.END]] = 5, 7
    for row, ((start, end), rank) in zip(table[::2], RANKS.items(), strict=True):
        down = chance.standard_normal((rank * len(widths), DEPTH), dtype=np.float32)
        row[: low_rank.PARTS] = start, end, down.ctypes.data, len(down), len(widths)
        column = 0
        for part, width in enumerate(widths):
            up = chance.standard_normal((rank, width), dtype=np.float32)
            at = low_rank.PARTS + part * low_rank.PART_SIZE
            row[at : at + low_rank.PART_SIZE] = up.ctypes.data, rank, column, width
            inner = x[start:end].double() @ torch.from_numpy(down[part * rank : (part + 1) * rank]).double().T
            expected[start:end, column : column + width] += inner @ torch.from_numpy(up).double()
            column += width
            kept += [down, up]
    sums = low_rank.LowRankSums()

    def added(first: int, count: int) -> torch.Tensor:
        out = before.clone()
        sums.add(table.ctypes.data, len(widths), 16 * len(widths), first, count, x, out)
        return out

    together = added(2, ROWS - 2)
    torch.testing.assert_close(together.double(), expected, rtol=0, atol=1e-3)
    assert torch.equal(together[[0, 1, 5, 6]], before[[0, 1, 5, 6]])
    for row in range(2, ROWS):
        alone = added(row, 1)
        assert torch.equal(alone[row], together[row])  # bit for bit, whatever else is in the batch
        alone[row] = before[row]
        assert torch.equal(alone, before)
