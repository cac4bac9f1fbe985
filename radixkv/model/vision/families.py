# SPDX-License-Identifier: Apache-2.0
"""Families of models that see, as the tests hold them to transformers' own eager model.

A family is served where the rows of its images are computed by a tower before the first layer, and no token
sees later ones but those of its own image. Others are served as models of text, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.model.vision import layouts
from radixkv.model.vision.layouts import Facts, Tokens


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Rules of one family.

    Attributes:
        name: as people know it.
        layout: tokens of an image; see `radixkv.model.vision.layouts`.
        has_grid: rotary positions have three components (time, row, column), and an image moves what is
            behind it by the larger side of its grid (M-RoPE, arXiv 2409.12191); the processor gives the grid
            as `image_grid_thw`.
        is_deep: rows of an image are also added behind the first layers (DeepStack, arXiv 2406.04334).
        options: arguments of the image processor that the family's own processor gives it.
    """

    name: str
    layout: Callable[[Mapping[str, Any], Facts], Tokens] = layouts.in_a_grid
    has_grid: bool = False
    is_deep: bool = False
    options: tuple[tuple[str, Any], ...] = ()


#: Longest run of line breaks that is looked for beside an image.
_MOST_BREAKS = 32
_NUMBERED = (("return_row_col_info", True),)
#: By `model_type`.
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": VisionFamily("Qwen2-VL", has_grid=True),
    "qwen2_5_vl": VisionFamily("Qwen2.5-VL", has_grid=True),
    "qwen3_vl": VisionFamily("Qwen3-VL", has_grid=True, is_deep=True),
    "qwen3_vl_moe": VisionFamily("Qwen3-VL MoE", has_grid=True, is_deep=True),
    "qwen3_5": VisionFamily("Qwen3.5", has_grid=True),
    "qwen3_5_moe": VisionFamily("Qwen3.5 MoE", has_grid=True),
    "glm4v": VisionFamily("GLM-4V", has_grid=True),
    "glm4v_moe": VisionFamily("GLM-4.5V", has_grid=True),
    "mistral3": VisionFamily("Mistral 3", layouts.in_lines),
    "internvl": VisionFamily("InternVL", layouts.between_marks, options=(("crop_to_patches", True),)),
    "llava": VisionFamily("LLaVA", layouts.of_one_tile),
    "llava_next": VisionFamily("LLaVA-NeXT", layouts.of_unpadded_tiles),
    "idefics3": VisionFamily("Idefics 3", layouts.of_numbered_tiles, options=_NUMBERED),
    "smolvlm": VisionFamily("SmolVLM", layouts.of_numbered_tiles, options=_NUMBERED),
    "gemma3": VisionFamily("Gemma 3", layouts.between_marks, options=(("do_pan_and_scan", False),)),
    "gemma4": VisionFamily("Gemma 4", layouts.of_counted_rows),
}


def is_served(config: Any) -> bool:
    """Return True if a configuration is of a family that sees.

    LLaVA with Pixtral's tower has the tokens of neither: no model of that kind has been tried.
    """
    tower = getattr(getattr(config, "vision_config", None), "model_type", "")
    return config.model_type in VISION_FAMILIES and not (config.model_type == "llava" and tower == "pixtral")


def facts_of(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Return the facts that layouts need, of a model's configuration, image processor and tokenizer."""
    vision, kind = config.vision_config, config.model_type
    if VISION_FAMILIES[kind].has_grid:
        return {"merge": int(processor.merge_size)}
    patch = getattr(vision, "patch_size", 1)
    patch = int(patch if isinstance(patch, int) else patch[0])
    if kind == "mistral3":
        line_end, image_end = hf_tokenizer.convert_tokens_to_ids(["[IMG_BREAK]", "[IMG_END]"])
        return {"patch": patch * config.spatial_merge_size, "line_end": line_end, "image_end": image_end}
    if kind in ("gemma3", "gemma4"):
        return _gemma_facts(config, processor, hf_tokenizer)
    if kind == "internvl":
        names = [
            getattr(hf_tokenizer, name, None) or default
            for name, default in (("start_image_token", "<img>"), ("end_image_token", "</img>"))
        ]
        start, end = hf_tokenizer.convert_tokens_to_ids(names)
        return {"rows_of_tile": int(config.image_seq_length), "image_start": start, "image_end": end}
    if VISION_FAMILIES[kind].options == _NUMBERED:
        return _numbered_facts(vision.image_size // patch // config.scale_factor, processor, hf_tokenizer)
    # Rows of the tower beside those of patches, such as CLIP's of the class.
    class_rows = 0 if config.vision_feature_select_strategy == "default" else 1
    facts: dict[str, Any] = {"patch": patch, "class_rows": class_rows}
    if kind == "llava_next":
        facts["resolutions"] = [list(each) for each in config.image_grid_pinpoints]
    return facts


def _gemma_facts(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Return the facts of Gemma's images, whose tokens see each other: in Gemma 4 in windows alone."""
    if config.model_type == "gemma4":
        facts = {"image_start": config.boi_token_id, "image_end": config.eoi_token_id}
        if config.text_config.use_bidirectional_attention == "vision":
            facts |= {"sees_ahead": "in windows", "most_together": int(processor.max_soft_tokens)}
        return facts
    count = int(config.mm_tokens_per_image)
    facts = {
        "image_start": config.boi_token_index,
        "image_end": config.eoi_token_index,
        "rows_of_tile": count,
    }
    facts |= {"sees_ahead": "everywhere", "most_together": count, "placeholder": config.boi_token_index}
    # There are two line breaks before and behind an image, and a run of them is one token of the vocabulary.
    runs = (hf_tokenizer.encode("\n" * n, add_special_tokens=False) for n in range(_MOST_BREAKS + 1))
    return facts | {"breaks": list(runs)}


def _numbered_facts(side: int, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Return the facts of `of_numbered_tiles`, whose tiles have `side` rows of the tower at each side."""
    most = -(-int(processor.size["longest_edge"]) // int(processor.max_image_size["longest_edge"]))

    def ids(text: str) -> list[int]:
        found: list[int] = hf_tokenizer.encode(text, add_special_tokens=False)
        return found

    around = "<fake_token_around_image>"
    words = {"end": ids(around), "whole": ids(around + "<global-img>")}
    words["whole after tiles"] = ids("\n\n" + around + "<global-img>")
    for row in range(most):
        for column in range(most):
            begin = "\n" if row and not column else ""
            words[f"{row} {column}"] = ids(f"{begin}{around}<row_{row + 1}_col_{column + 1}>")
    return {"rows_of_tile": side * side, "words": words}
