# SPDX-License-Identifier: Apache-2.0
"""Logits of chosen rows, also of models that compute those of all whatever is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.model.step_context import call_model


class OfAll(torch.nn.Module):
    """Logits [1, T, 1]: the token ids."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        assert "logits_to_keep" not in kwargs
        return SimpleNamespace(logits=input_ids[..., None].float())


class OfChosen(torch.nn.Module):
    """The same, of the rows that are asked for."""

    def forward(self, input_ids: torch.Tensor, logits_to_keep: Any = slice(None), **kwargs: Any) -> Any:
        return SimpleNamespace(logits=input_ids[:, logits_to_keep, None].float())


@pytest.mark.parametrize("kind", [OfAll, OfChosen])
def test_the_rows_are_those_that_were_asked_for(kind: type[torch.nn.Module]) -> None:
    ids = torch.tensor([7, 3, 9, 5])
    for rows in (torch.tensor([3]), torch.tensor([1, 2]), torch.tensor([2, 0, 1, 3]), None):
        found = call_model(kind(), ids, torch.arange(4), rows, object())
        assert found[:, 0].tolist() == (ids if rows is None else ids[rows]).tolist()
