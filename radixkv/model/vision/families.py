# SPDX-License-Identifier: Apache-2.0
"""Families of models that see, as the tests hold them to transformers' own eager model.

A family is served where the rows of its images are computed by a tower before the first layer, and all
positions attend to earlier ones alone. Others are served as models of text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Rules of one family.

    Attributes:
        name: as people know it.
        has_grid: rotary positions have three components (time, row, column), and an image moves what is
            behind it by the larger side of its grid (M-RoPE, arXiv 2409.12191); the processor gives the grid
            as `image_grid_thw`.
        is_deep: rows of an image are also added behind the first layers (DeepStack, arXiv 2406.04334).
    """

    name: str
    has_grid: bool = False
    is_deep: bool = False


#: By `model_type`.
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": VisionFamily("Qwen2-VL", has_grid=True),
    "qwen2_5_vl": VisionFamily("Qwen2.5-VL", has_grid=True),
    "qwen3_vl": VisionFamily("Qwen3-VL", has_grid=True, is_deep=True),
    "qwen3_vl_moe": VisionFamily("Qwen3-VL MoE", has_grid=True, is_deep=True),
    "qwen3_5": VisionFamily("Qwen3.5", has_grid=True),
    "qwen3_5_moe": VisionFamily("Qwen3.5 MoE", has_grid=True),
}
