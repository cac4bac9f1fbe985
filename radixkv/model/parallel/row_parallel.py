"""Modules whose ranks each compute a part of a sum, and add the parts up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from radixkv.model.parallel.communicator import Communicator


class SummedOverRanks(nn.Module):
    """A module each of whose ranks gives one term of a sum: it gives the sum.

    Attributes:
        term: the rank's own module.
    """

    def __init__(self, term: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.term = term
        self.communicator = communicator

    def forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        return self.communicator.add_up(self.term(*inputs, **options).contiguous())


class NoLogits(nn.Module):
    """The output layer of a rank that chooses no tokens: [..., H] -> [..., 0]."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., :0]
