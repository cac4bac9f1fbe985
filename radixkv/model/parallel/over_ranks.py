# SPDX-License-Identifier: Apache-2.0
"""Modules computed in part by each rank, which give every rank the whole result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from radixkv.model.parallel.communicator import Communicator


class SummedOverRanks(nn.Module):
    """A module whose result is the sum of the ranks' terms.

    Attributes:
        term: the rank's own module.
    """

    def __init__(self, term: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.term = term
        self.communicator = communicator

    def forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        return self.communicator.add_up(self.term(*inputs, **options).contiguous())


class JoinedOverRanks(nn.Module):
    """A linear layer whose ranks each compute some of its outputs from all of its inputs.

    Each output is one sum, as on one rank, so that its bits are the same where they do not depend on the
    layer's width. That costs more messages than a sum over the ranks does.

    Args:
        term: gives the rank's own outputs.
        inputs, outputs: how many of them each rank has.
    """

    def __init__(
        self, term: nn.Module, communicator: Communicator, inputs: Sequence[int], outputs: Sequence[int]
    ) -> None:
        super().__init__()
        self.term = term
        self.communicator = communicator
        self._inputs, self._outputs = inputs, outputs
        first = sum(outputs[: communicator.rank])
        self.own_outputs = slice(first, first + outputs[communicator.rank])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.join_outputs(self.term(self.join_inputs(inputs)))

    def join_inputs(self, own: torch.Tensor) -> torch.Tensor:
        """Inputs of this rank -> inputs of all ranks, in the last dimension."""
        return self.communicator.join(own, self._inputs)

    def join_outputs(self, own: torch.Tensor) -> torch.Tensor:
        """Outputs of this rank -> outputs of all ranks, in the last dimension."""
        return self.communicator.join(own, self._outputs)


class GatheredOverRanks(nn.Module):
    """A linear layer whose ranks each compute some of its outputs, from inputs that all of them have.

    Args:
        term: gives the rank's own outputs.
        outputs: how many of them each rank has.
    """

    def __init__(self, term: nn.Module, communicator: Communicator, outputs: Sequence[int]) -> None:
        super().__init__()
        self.term = term
        self.communicator = communicator
        self._outputs = outputs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.communicator.join(self.term(inputs), self._outputs)


class NormedOverRanks(nn.Module):
    """A norm over elements that the ranks compute apart; each rank keeps its own elements of the result.

    Args:
        norm: of all elements; every rank computes it whole, so that its bits are those of one rank.
        widths: how many elements each rank has.
    """

    def __init__(self, norm: nn.Module, communicator: Communicator, widths: Sequence[int]) -> None:
        super().__init__()
        self.norm = norm
        self.communicator = communicator
        self._widths = widths
        first = sum(widths[: communicator.rank])
        self._own = slice(first, first + widths[communicator.rank])

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.communicator.join(own, self._widths))
        return normed[..., self._own]


def holds_everywhere(model: nn.Module, holds: bool) -> bool:
    """Return True if something holds for each rank's share of a model; all ranks call it at once."""
    kinds = (SummedOverRanks, JoinedOverRanks, GatheredOverRanks)
    found = next((each for each in model.modules() if isinstance(each, kinds)), None)
    return holds if found is None else bool(found.communicator.smallest(int(holds)))


class NoLogits(nn.Module):
    """The output layer of a rank that chooses no tokens: [..., H] -> [..., 0]."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., :0]
