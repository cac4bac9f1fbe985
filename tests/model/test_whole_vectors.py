# SPDX-License-Identifier: Apache-2.0
"""Activations whose bits do not depend on a row's place, whatever the width and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from radixkv.model.whole_vectors import AlignedActivations, WholeVectors

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


class Turned(nn.Module):
    """A rotary embedding, and an activation where it has one."""

    class Rotary(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.cos()

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.rotary, self.gated = Turned.Rotary(), gated

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.silu(self.rotary(rows)) if self.gated else self.rotary(rows)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("gated", [False, True])
def test_steps_keep_their_bits_when_only_rotary_embeddings_are_looked_at(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(511, 1001, generator=torch.Generator().manual_seed(0))
    model = Turned(gated=gated)
    activations = AlignedActivations(model)

    def step(piece: slice) -> torch.Tensor:
        with activations.step(piece.stop - piece.start):
            piece_rows = rows[piece].contiguous()
            looked_at.append(seen.pop() if seen else None)
            result: torch.Tensor = model(piece_rows)
        seen.clear()
        return result

    own, seen, looked_at = WholeVectors.__torch_function__, [], []

    def noted(self: WholeVectors, func: Any, *rest: Any) -> Any:
        seen.append(func)
        return own(self, func, *rest)

    monkeypatch.setattr(WholeVectors, "__torch_function__", noted)
    whole = step(slice(0, 511))
    for piece in (slice(0, 1), slice(1, 17), slice(17, 300), slice(300, 511)):
        assert torch.equal(step(piece), whole[piece])
    assert [each is not None for each in looked_at] == [True, True] + [gated] * 3
