# SPDX-License-Identifier: Apache-2.0
"""Rotary parameters of GGUF files as transformers' configurations have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Keys of a file's scaling -> transformers' parameters.
_YARN = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
#: transformers' names of LongRoPE's factors -> tensors.
LONG_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def rotary_parameters(of: Callable[..., Any], head_size: int, default: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by a file's keys.

    Args:
        of: gives the value of a key without the architecture, or its second argument.
        head_size: elements of a head, of which some may not be rotated.
        default: the configuration's own: with one entry for each kind of layer, they get some each.
    """
    theta = float(of("rope.freq_base", 10_000.0))
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    rotated = of("rope.dimension_count", head_size)
    if rotated != head_size or "partial_rotary_factor" in default:
        found["partial_rotary_factor"] = rotated / head_size
    if "full_attention" in default:
        sliding = found | {"rope_theta": float(of("rope.freq_base_swa", theta))}
        return {"full_attention": found | scaling(of), "sliding_attention": sliding}
    return found | scaling(of)


def scaling(of: Callable[..., Any]) -> dict[str, Any]:
    """The scaling that a file states: linear or YaRN; empty for none."""
    kind, factor = of("rope.scaling.type", "none"), of("rope.scaling.factor", None)
    if not factor or kind not in ("linear", "yarn"):
        return {}
    found: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        found["original_max_position_embeddings"] = int(of("rope.scaling.original_context_length"))
        for key, name in _YARN.items():
            value = of(f"rope.scaling.{key}", None)
            if value is not None:
                found[name] = float(value)
    return found
