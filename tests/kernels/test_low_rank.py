# SPDX-License-Identifier: Apache-2.0
"""Low-rank sums: close to float64, each row on its own, rows between segments untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from radixkv.model.adapters.lora_weights import LoraWeights, LowRank
from radixkv.model.adapters.packed_adapter import PackedAdapter, ProductPlace
from radixkv_kernels.cpu.linear import low_rank
from radixkv_kernels.cpu.linear.float_product import COLUMNS, PackedFloat, PackedGate

RANKS = {(2, 5): 3, (7, 14): 17}  # rows of each segment -> its rank; 5 and 6 lie between
ROWS, DEPTH = 14, 70


class Segments:
    """Segments of rows, each with random matrices, and the sums that they add to outputs."""

    def __init__(self, widths: tuple[int, ...], starts: tuple[int, ...], only: int | None = None) -> None:
        chance = np.random.default_rng(0)
        paths = tuple(map(str, range(len(widths))))
        place = ProductPlace(paths, starts, widths, DEPTH, is_packed=True)
        self.table = np.zeros((len(RANKS) + 1, low_rank.SEGMENT_SIZE), np.int64)
        self.rows = torch.from_numpy(chance.standard_normal((ROWS, DEPTH), dtype=np.float32))
        self.sums = torch.zeros(ROWS, starts[-1] + widths[-1], dtype=torch.float64)
        self.kept = []
        for row, ((start, end), rank) in zip(self.table[::2], RANKS.items(), strict=True):
            modules = {
                path: LowRank(
                    chance.standard_normal((rank, DEPTH), dtype=np.float32),
                    chance.standard_normal((width, rank), dtype=np.float32),
                )
                for path, width in zip(paths, widths, strict=True)
                if path == str(only) or only is None
            }
            self.kept.append(PackedAdapter(LoraWeights("", rank, modules), [place]))
            row[:] = self.kept[-1].table[0]
            row[[low_rank.START, low_rank.END]] = start, end
            for path, each in modules.items():
                inner = self.rows[start:end].double() @ torch.from_numpy(each.down).double().T
                column, width = starts[int(path)], widths[int(path)]
                up = torch.from_numpy(each.up).double()
                self.sums[start:end, column : column + width] += inner @ up.T
        self.table[1, [low_rank.START, low_rank.END]] = 5, 7
        self.rank = int(self.table[:, low_rank.RANK].max())

    def arguments(self, first: int, count: int) -> tuple[int, int, int, int, int]:
        return self.table.ctypes.data, len(self.table), self.rank, first, count


@pytest.mark.parametrize("only", [None, 1])
@pytest.mark.parametrize("widths", [(600,), (30, 20, 10), (96, 48, 48)], ids=str)
def test_rows_and_segments(widths: tuple[int, ...], only: int | None) -> None:
    """Onto any output, and inside a product of floats: the same bits."""
    only = only if len(widths) > 1 else None
    starts = tuple(sum(widths[:place]) for place in range(len(widths)))
    segments, sums = Segments(widths, starts, only), low_rank.LowRankSums()
    before = torch.randn(ROWS, sum(widths), generator=torch.Generator().manual_seed(0))

    def added(first: int, count: int) -> torch.Tensor:
        out = before.clone()
        sums.add(*segments.arguments(first, count), segments.rows, out)
        return out

    together = added(2, ROWS - 2)
    torch.testing.assert_close(together.double(), before + segments.sums, rtol=0, atol=1e-3)
    assert torch.equal(together[[0, 1, 5, 6]], before[[0, 1, 5, 6]])
    for row in range(2, ROWS):
        alone = added(row, 1)
        assert torch.equal(alone[row], together[row])  # bit for bit, whatever else is in the batch
        alone[row] = before[row]
        assert torch.equal(alone, before)
    weight = torch.randn(sum(widths), DEPTH, generator=torch.Generator().manual_seed(1))
    product, out = PackedFloat(weight), torch.empty(ROWS, sum(widths))
    product.multiply(segments.rows, out, changes=sums.inner(*segments.arguments(2, ROWS - 2), segments.rows))
    expected = segments.rows.double() @ weight.double().T + segments.sums
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)
    one = torch.empty(ROWS, sum(widths))
    product.multiply(segments.rows, one, changes=sums.inner(*segments.arguments(9, 1), segments.rows))
    assert torch.equal(one[9], out[9])


def test_gates() -> None:
    width, generator = 100, torch.Generator().manual_seed(1)
    start = -(-width // COLUMNS) * COLUMNS
    segments, sums = Segments((width, width), (0, start)), low_rank.LowRankSums()
    gate, up = (torch.randn(width, DEPTH, generator=generator) for _ in range(2))
    out = torch.empty(ROWS, width)
    changes = sums.inner(*segments.arguments(2, ROWS - 2), segments.rows)
    PackedGate(gate, up).multiply(segments.rows, out, changes=changes)
    x = segments.rows.double()
    gates = x @ gate.double().T + segments.sums[:, :width]
    expected = torch.nn.functional.silu(gates) * (x @ up.double().T + segments.sums[:, start:])
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-2)
