# SPDX-License-Identifier: Apache-2.0
"""A stored weight whose inputs have a scale each, as ModelOpt smooths them (`pre_quant_scale`).

number[o, i] = number of the stored weight[o, i] * scale[i]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from radixkv.model.stored_weights.stored_weight import ScaleGroupCut, StoredWeight, check_floats


class ScaledInputs(StoredWeight):
    """A weight in any form, and a factor for each of its inputs.

    Args:
        weight: in its own form.
        scales: floats [in].

    Raises:
        ValueError: as many scales as inputs are expected.
    """

    title = "weights with scales of their inputs"

    def __init__(self, weight: StoredWeight, scales: Tensor) -> None:
        super().__init__(weight.out_features, weight.in_features)
        if scales.shape != (weight.in_features,):
            raise ValueError(f"{weight.in_features} inputs have {list(scales.shape)} scales of their own")
        check_floats(scales, "inputs' scales")
        self.weight, self.scales = weight, scales

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.weight.tensors, self.scales)

    def rows(self, own: range) -> Tensor:
        numbers = self.weight.rows(own)
        numbers *= self.scales.to(torch.float32)
        return numbers

    def of_outputs(self, spans: Sequence[range]) -> Self:
        return type(self)(self.weight.of_outputs(spans), self.scales)

    def of_inputs(self, own: range) -> Self:
        return type(self)(self.weight.of_inputs(own), self.scales[own.start : own.stop])

    @classmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        first = weights[0]
        for each in weights[1:]:
            if type(each.weight) is not type(first.weight) or not torch.equal(each.scales, first.scales):
                raise ScaleGroupCut("weights with different scales of their inputs are not one product")
        return cls(type(first.weight).concat([each.weight for each in weights]), first.scales)

    def to(self, device: torch.device) -> Self:
        return type(self)(self.weight.to(device), self.scales.to(device))
