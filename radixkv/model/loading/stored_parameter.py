# SPDX-License-Identifier: Apache-2.0
"""Tensors that stand for stored weights while transformers puts a state into a model.

transformers renames tensors, stacks experts and joins gates and ups. A `StoredParameter` goes through this
without memory and knows at the end which stored weights a parameter consists of. What it can't follow
is computed with the numbers.

    stack([w0, w1])                          2 experts, of one part each
    cat([stack(gates), stack(ups)], dim=1)   2 experts, of two parts each
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from radixkv.model.stored_weights.stored_weight import StackedWeights, StoredWeight

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default)

#: Of each expert, weights one above the other.
Parts = tuple[tuple[StoredWeight, ...], ...]


class StoredParameter(Tensor):
    """A tensor whose numbers are those of stored weights.

    Attributes:
        parts: weights of each expert; a matrix has those of one.
        is_matrix: it has no dimension of experts.
        inputs_first: its last two dimensions are swapped.
    """

    parts: Parts
    is_matrix: bool
    inputs_first: bool

    @staticmethod
    def of(weight: StoredWeight | StackedWeights, dtype: torch.dtype) -> StoredParameter:
        """A tensor with a weight's numbers, rounded to `dtype`."""
        if isinstance(weight, StoredWeight):
            return _tensor_of(((weight,),), dtype, is_matrix=True, inputs_first=False)
        parts = tuple((each,) for each in weight.weights)
        return _tensor_of(parts, dtype, is_matrix=False, inputs_first=weight.inputs_first)

    def numbers(self) -> Tensor:
        """A plain tensor with the same numbers."""
        return _numbers(self.parts, self.is_matrix, self.inputs_first, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _followed(function, args, kwargs)
        if found is not None:
            return found
        plain = tree_map(
            lambda each: each.numbers() if isinstance(each, StoredParameter) else each, (args, kwargs)
        )
        return function(*plain[0], **plain[1])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StoredParameter({list(self.shape)}, {self.parts[0][0]!r})"


def stored_experts(module: Any) -> tuple[Parts, Parts] | None:
    """Weights of the first and the last product of transformers' module of all experts.

    None: it is none, or not all of its weights are stored ones.
    """
    if not (hasattr(module, "has_gate") and hasattr(module, "num_experts")):
        return None
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    found = [getattr(module, name).data for name in names]
    for weight in found:
        if not isinstance(weight, StoredParameter) or weight.is_matrix:
            return None
        if weight.inputs_first != bool(module.is_transposed):
            return None
    return found[0].parts, found[1].parts


def _tensor_of(parts: Parts, dtype: torch.dtype, *, is_matrix: bool, inputs_first: bool) -> StoredParameter:
    rows = sum(weight.out_features for weight in parts[0])
    columns = parts[0][0].in_features
    sizes = [columns, rows] if inputs_first else [rows, columns]
    shape = sizes if is_matrix else [len(parts), *sizes]
    made: StoredParameter = Tensor._make_wrapper_subclass(
        StoredParameter, shape, dtype=dtype, device=torch.device("cpu")
    )
    made.parts, made.is_matrix, made.inputs_first = parts, is_matrix, inputs_first
    return made


def _numbers(parts: Parts, is_matrix: bool, inputs_first: bool, dtype: torch.dtype) -> Tensor:
    whole = torch.stack([torch.cat([each.dequantized(dtype) for each in one]) for one in parts])
    if inputs_first:
        whole = whole.transpose(1, 2).contiguous()
    return whole[0] if is_matrix else whole


def _followed(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> StoredParameter | None:
    """The result of an operation on whole weights; None: it is none that is followed."""
    first = args[0] if args else None
    if isinstance(first, StoredParameter):
        if function in _SAME and kwargs.get("device", first.device) in (None, first.device):
            dtype = kwargs.get("dtype") or first.dtype
            return _tensor_of(first.parts, dtype, is_matrix=first.is_matrix, inputs_first=first.inputs_first)
        return None
    if not isinstance(first, list | tuple) or not all(isinstance(each, StoredParameter) for each in first):
        return None
    one, dim = first[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shapes = {(each.shape[-1], each.is_matrix, each.inputs_first, len(each.parts)) for each in first}
    if len(shapes) > 1 or one.inputs_first:
        return None
    if function is _aten.stack.default and dim == 0 and one.is_matrix:
        if len({each.shape for each in first}) > 1:
            return None
        parts = tuple(each.parts[0] for each in first)
        return _tensor_of(parts, one.dtype, is_matrix=False, inputs_first=False)
    if function is _aten.cat.default and dim % one.ndim == one.ndim - 2:
        joined = zip(*(each.parts for each in first), strict=True)
        parts = tuple(tuple(weight for part in each for weight in part) for each in joined)
        return _tensor_of(parts, one.dtype, is_matrix=one.is_matrix, inputs_first=False)
    return None
