# SPDX-License-Identifier: Apache-2.0
"""Padding is only trusted if it holds for every number of rows that a step may have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from radixkv.model.batch_invariance import ROW_MULTIPLES, choose_row_multiple


class Switching(nn.Linear):
    """A product whose bits change from some number of rows on, as when a library changes its algorithm."""

    def __init__(self, at: int) -> None:
        super().__init__(8, 8, bias=False)
        self.at = at

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        exact = torch.einsum("rk,ok->ro", inputs, self.weight)
        return exact + (1e-3 if len(inputs) >= self.at else 0.0)


@pytest.mark.parametrize(
    ("at", "max_rows", "expected"),
    [
        (1500, 1024, ROW_MULTIPLES[0]),
        (1500, 2048, 0),
        (300, 2048, 0),
        (5000, 8192, 0),
        (1, 2048, ROW_MULTIPLES[0]),
    ],
)
def test_products_are_probed_up_to_the_most_rows_of_a_step(at: int, max_rows: int, expected: int) -> None:
    assert choose_row_multiple(nn.Sequential(Switching(at)), max_rows) == expected
