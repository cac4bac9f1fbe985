# SPDX-License-Identifier: Apache-2.0
"""The weight of one product in the form in which a checkpoint stores it.

A stored form is codes of 2 to 8 bits and what makes numbers of them: scales, zero points, a table. It knows
four things: its size, the numbers that it stands for, its parts (outputs or inputs, for tensor parallelism
and fused products), and how several of it are joined. What multiplies it is chosen elsewhere, by its class.

    a reader of `radixkv.model.loading.stored_forms`  ->  StoredWeight  ->  a product, or `dequantized`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from radixkv.errors import ConfigError

#: Numbers that are dequantised at once: their float32 form lies beside the result.
_NUMBERS_AT_ONCE = 4 << 20


class ScaleGroupCut(ConfigError):
    """A part of a stored weight would begin or end within numbers that share a scale."""


class StoredWeight(ABC):
    """One product's weight, [out, in], as a checkpoint stores it. Nothing changes it.

    Args:
        out_features, in_features: as of `nn.Linear`.
    """

    #: What messages call the form.
    title: ClassVar[str]

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features, self.in_features = out_features, in_features

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that it consists of."""

    @abstractmethod
    def rows(self, own: range) -> Tensor:
        """Some outputs' numbers: float32 [len(own), in]."""

    @abstractmethod
    def of_outputs(self, spans: Sequence[range]) -> Self:
        """Some of its outputs, one span after the other.

        Raises:
            ScaleGroupCut: a span begins or ends within a scale's group.
        """

    @abstractmethod
    def of_inputs(self, own: range) -> Self:
        """Some of its inputs.

        Raises:
            ScaleGroupCut: they begin or end within a scale's group.
        """

    @classmethod
    @abstractmethod
    def concat(cls, weights: Sequence[Self]) -> Self:
        """Weights of this class with the same inputs, one above the other.

        Raises:
            ScaleGroupCut: they differ in their groups, or one ends within a group.
        """

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """The same weight with its tensors on a device."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and the rest."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that it stands for, [out, in], computed in float32 and rounded to `dtype`."""
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.tensors[0].device)
        step = max(1, _NUMBERS_AT_ONCE // max(1, self.in_features))
        for start in range(0, self.out_features, step):
            own = range(start, min(start + step, self.out_features))
            out[own.start : own.stop] = self.rows(own)
        return out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.out_features} x {self.in_features}, {self.nbytes:,} bytes)"


class StackedWeights:
    """The weights of a layer's experts, all of one shape: [experts, out, in].

    Args:
        weights: of each expert.
        inputs_first: a model has them as [experts, in, out].
    """

    def __init__(self, weights: Sequence[StoredWeight], *, inputs_first: bool = False) -> None:
        self.weights, self.inputs_first = tuple(weights), inputs_first

    @property
    def title(self) -> str:
        return self.weights[0].title

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the numbers, in the model's order."""
        one = self.weights[0]
        sizes = (
            (one.in_features, one.out_features) if self.inputs_first else (one.out_features, one.in_features)
        )
        return (len(self.weights), *sizes)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that they stand for, in the model's order."""
        out = torch.empty(self.shape, dtype=dtype, device=self.weights[0].tensors[0].device)
        for own, weight in zip(out, self.weights, strict=True):
            numbers = weight.dequantized(dtype)
            own.copy_(numbers.t() if self.inputs_first else numbers)
        return out


def check_floats(tensor: Tensor, what: str, *more: torch.dtype) -> None:
    """Refuse what stands for scales and is no floats of 16 bits or more.

    Args:
        what: they are, for messages.
        more: dtypes that will do, too.

    Raises:
        ValueError: they are something else.
    """
    if not (tensor.is_floating_point() and tensor.dtype.itemsize > 1) and tensor.dtype not in more:
        raise ValueError(f"its {what} are {tensor.dtype}, expected floats")


def check_whole(tensor: Tensor, what: str) -> None:
    """Refuse what stands for whole numbers and is none.

    Raises:
        ValueError: they are something else.
    """
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ValueError(f"its {what} are {tensor.dtype}, expected whole numbers")


def take_rows(tensor: Tensor, spans: Sequence[range]) -> Tensor:
    """Rows of a tensor, one span after the other; a view where it is one span."""
    parts = [tensor[span.start : span.stop] for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def groups_of(own: range, size: int, end: int, what: str) -> range:
    """Numbers of the groups of `size` that a span consists of; the last group may be shorter.

    Args:
        end: number of all rows or columns.
        what: of the parts, for messages.

    Raises:
        ScaleGroupCut: it begins or ends within a group.
    """
    if own.start % size or (own.stop % size and own.stop != end):
        raise ScaleGroupCut(
            f"{what} {own.start} to {own.stop} of a quantised weight begin or end within a group of {size} "
            f"that share a scale: split it at multiples of {size}"
        )
    return range(own.start // size, -(-own.stop // size))
