# SPDX-License-Identifier: Apache-2.0
"""Queries that grow with their position, in modules that count rows where a step has positions (Llama 4).

transformers' module scales queries of layers without a rotary embedding by their place in the call. A step
has rows of several requests, so that the hook scales them instead, by the positions of the step::

    query * (1 + scale * log(1 + floor((position + 1) / length)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from radixkv.model.step_context import current_positions
from radixkv_kernels import QueryGrowth


@dataclass(frozen=True)
class QueryScale:
    """Factor of queries by their position; attributes: see `QueryGrowth`."""

    scale: float
    length: float
    first: float = 1.0
    rounded: bool = False

    def at(self, positions: Tensor) -> QueryGrowth:
        """The factors of a step's tokens."""
        return QueryGrowth(positions, self.scale, self.length, self.first, self.rounded)


def scale_queries_by_position(model: Any) -> None:
    """Let the hook scale the queries of modules that would count a step's rows."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.query_scale = QueryScale(float(module.attn_scale), float(module.floor_scale))
            module.attn_temperature_tuning = False


def scaled_queries(module: Any, query: Tensor) -> Tensor:
    """[T, H, D] of a module in a step, scaled where it asks for that."""
    scale: QueryScale | None = getattr(module, "query_scale", None)
    return query if scale is None else scale.at(current_positions()).apply(query)


def query_scales(module: Any) -> list[QueryScale]:
    """Scales that an attention module may have, by what it has been given or by its configuration."""
    given: QueryScale | None = getattr(module, "query_scale", None)
    if given is not None:
        return [given]
    rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return [QueryScale(float(beta), float(length), first=0.0, rounded=True)] if beta and length else []
