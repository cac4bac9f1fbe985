# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes of a product, interpreted: near float64, each row by its own adapter, replayable."""

from __future__ import annotations

import pytest
import torch

from radixkv_kernels.triton.low_rank import LowRankProduct, add_low_rank, cut_tiles

INPUTS, WIDTHS, MAX_RANK = 150, (40, 24, 140), 40
#: Ranks of each slot's three linear layers; 0: it leaves the layer as it is.
RANKS = ((3, 16, 40), (0, 0, 0), (17, 0, 1))
#: Rows of a step: three segments, one of them empty; rows 0, 24 and 25 have no adapter.
SEGMENTS = ((1, 19, 2), (19, 23, 0), (23, 23, 0), (23, 24, 1), (26, 30, 0))
ROWS = 30
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


class Slots:
    """Random matrices of each slot, their places, and what they add to outputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.matrices = [
            [(random(rank, INPUTS), random(rank, width)) for rank, width in zip(ranks, WIDTHS, strict=True)]
            for ranks in RANKS
        ]
        # The product is not the model's first.
        self.places = torch.zeros(len(RANKS), len(WIDTHS) + 1, 3, dtype=torch.int64)
        for slot, parts in enumerate(self.matrices):
            for part, (down, up) in enumerate(parts):
                self.places[slot, 1 + part] = torch.tensor([down.data_ptr(), up.data_ptr(), len(down)])
        first = [sum(WIDTHS[:part]) for part in range(len(WIDTHS))]
        columns = torch.tensor(list(zip(first, WIDTHS, strict=True)), dtype=torch.int32)
        self.product = LowRankProduct(1, columns, WIDTHS)
        self.rows, self.before = random(ROWS, INPUTS), random(ROWS, sum(WIDTHS))

    def added(self, segments: tuple[tuple[int, int, int], ...], padding: int = 0) -> torch.Tensor:
        tiles = torch.from_numpy(cut_tiles(segments))
        tiles = torch.cat([tiles, tiles.new_zeros(padding, 3)])
        out = self.before.clone()
        add_low_rank(self.product, self.rows, out, tiles, self.places, MAX_RANK)
        return out

    def expected(self) -> torch.Tensor:
        out = self.before.double()
        for start, end, slot in SEGMENTS:
            changes = [
                self.rows[start:end].double() @ down.double().T @ up.double()
                for down, up in self.matrices[slot]
            ]
            out[start:end] += torch.cat(changes, dim=1)
        return out


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_rows_of_many_adapters(dtype: torch.dtype) -> None:
    """Mixed ranks, layers left as they are, empty segments, rows without an adapter, tiles of padding."""
    slots = Slots(dtype)
    out, wanted = slots.added(SEGMENTS, padding=2), slots.expected()
    assert (out.double() - wanted).abs().max() <= ERRORS[dtype] * wanted.abs().max()
    without = [0, 23, 24, 25]  # the slot of row 23 changes nothing
    assert torch.equal(out[without], slots.before[without])
    # Bit for bit, whatever else is in the batch.
    assert torch.equal(slots.added(((5, 6, 2),))[5], out[5])
    assert torch.equal(slots.added(()), slots.before)


def test_other_types_are_refused() -> None:
    slots = Slots(torch.float32)
    with pytest.raises(ValueError, match="one dtype"):
        add_low_rank(
            slots.product,
            slots.rows,
            slots.before.half(),
            torch.zeros(1, 3, dtype=torch.int32),
            slots.places,
            MAX_RANK,
        )
