# SPDX-License-Identifier: Apache-2.0
"""Queries that grow with their position, in modules that count rows where a step has positions (Llama 4).

transformers' module scales queries of layers without a rotary embedding by their place in the call. A step
has rows of several requests, so that the hook scales them instead, by the positions of the step::

    query * (1 + scale * log(1 + floor((position + 1) / floor_scale)))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixkv.model.step_context import current_positions


class QueryScale:
    """Factor of queries by their position.

    Args:
        scale, floor_scale: of the formula above.
    """

    def __init__(self, scale: float, floor_scale: float) -> None:
        self._scale, self._floor_scale = scale, floor_scale

    def apply(self, query: Tensor, positions: Tensor) -> Tensor:
        """[T, H, D] at positions [T] -> [T, H, D]."""
        steps = torch.floor((positions.float() + 1.0) / self._floor_scale)
        factors = torch.log1p(steps) * self._scale + 1.0
        return (query * factors[:, None, None]).to(query.dtype)


def scale_queries_by_position(model: Any) -> None:
    """Let the hook scale the queries of modules that would count a step's rows."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.query_scale = QueryScale(float(module.attn_scale), float(module.floor_scale))
            module.attn_temperature_tuning = False


def scaled_queries(module: Any, query: Tensor) -> Tensor:
    """[T, H, D] of a module in a step, scaled where it asks for that."""
    scale: QueryScale | None = getattr(module, "query_scale", None)
    return query if scale is None else scale.apply(query, current_positions())
