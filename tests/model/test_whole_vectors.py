# SPDX-License-Identifier: Apache-2.0
"""Activations whose bits do not depend on a row's place, whatever the width and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from radixkv.model.whole_vectors import WholeVectors

FUNCTIONS = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": lambda x: x.tanh(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_rows_have_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(0)
    cases = [torch.randn(511, width) for width in (104, 300, 1001)]
    pieces = [slice(0, 1), slice(1, 17), slice(17, 300), slice(300, 511)]

    def differ() -> set[str]:
        return {
            name
            for name, function in FUNCTIONS.items()
            for rows in cases
            for piece in pieces
            if not torch.equal(function(rows[piece].contiguous()), function(rows)[piece])
        }

    with WholeVectors():
        assert differ() == set()
        for name, function in FUNCTIONS.items():
            exact = function(cases[0].double()).float()
            torch.testing.assert_close(function(cases[0]), exact, msg=name)
