# SPDX-License-Identifier: Apache-2.0
"""Families of models that see, as the tests hold them to transformers' own eager model, and the others.

A family is served where the rows of its images are computed by a tower before the first layer, no token sees
later ones but those of its own image, and an image has the same tokens wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.model.vision import facts, layouts
from radixkv.model.vision.layouts import Facts, Tokens


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Rules of one family.

    Attributes:
        name: as people know it.
        layout: tokens of an image; see `radixkv.model.vision.layouts`.
        facts: what the layout needs of a model; see `radixkv.model.vision.facts`.
        has_grid: rotary positions have three components (time, row, column), and an image moves what is
            behind it by the larger side of its grid (M-RoPE, arXiv 2409.12191); the processor gives the grid
            as `image_grid_thw`.
        is_deep: rows of an image are also added behind the first layers (DeepStack, arXiv 2406.04334).
        options: arguments of the image processor that the family's own processor gives it.
        note: for people who look the family up.
    """

    name: str
    layout: Callable[[Mapping[str, Any], Facts], Tokens] = layouts.in_a_grid
    facts: Callable[[Any, Any, Any], dict[str, Any]] = facts.of_grids
    has_grid: bool = False
    is_deep: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    note: str = ""


def _grid(name: str, note: str = "", *, is_deep: bool = False) -> VisionFamily:
    """Return a family with rotary positions in three components."""
    return VisionFamily(name, has_grid=True, is_deep=is_deep, note=note)


_PIXTRAL = layouts.in_lines, facts.of_lines
_NUMBERED = layouts.of_numbered_tiles, facts.of_numbered_tiles
_IN_TILES: tuple[tuple[str, Any], ...] = (("crop_to_patches", True),)
_WITH_PLACES: tuple[tuple[str, Any], ...] = (("return_row_col_info", True),)
_DEEP = "rows are added behind the first layers, too"
_STATES = "checkpoints of [states](hybrid_models.md) lie behind images as behind text"

#: Names of towers in models, and in the names of their tensors.
TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder")

#: By `model_type`, with the tower's behind it where a type has towers of several families.
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": _grid("Qwen2-VL"),
    "qwen2_5_vl": _grid("Qwen2.5-VL"),
    "qwen3_vl": _grid("Qwen3-VL", _DEEP, is_deep=True),
    "qwen3_vl_moe": _grid("Qwen3-VL, mixtures of experts", _DEEP, is_deep=True),
    "qwen3_5": _grid("Qwen3.5", _STATES),
    "qwen3_5_moe": _grid("Qwen3.5, mixtures of experts", _STATES),
    "glm4v": _grid("GLM-4.1V"),
    "glm4v_moe": _grid("GLM-4.5V"),
    "glm46v": _grid("GLM-4.6V"),
    "glm_ocr": _grid("GLM-OCR"),
    "paddleocr_vl": _grid("PaddleOCR-VL"),
    "gemma3": VisionFamily(
        "Gemma 3",
        *(layouts.between_marks, facts.of_gemma3),
        options=(("do_pan_and_scan", False),),
        note="an image's tokens see each other; never cut into crops",
    ),
    "gemma4": VisionFamily(
        "Gemma 4",
        *(layouts.of_counted_rows, facts.of_gemma4),
        note="an image's tokens see each other in windows, but for E2B and E4B",
    ),
    "llama4": VisionFamily(
        "Llama 4",
        *(layouts.of_separated_tiles, facts.of_separated_tiles),
        note="with an image processor of radixkv's own",
    ),
    "mistral3": VisionFamily("Mistral 3", *_PIXTRAL),
    "llava pixtral": VisionFamily("Pixtral", *_PIXTRAL, note="`llava` with Pixtral's tower"),
    "internvl": VisionFamily("InternVL", layouts.between_marks, facts.of_marked_tiles, options=_IN_TILES),
    "aya_vision": VisionFamily(
        "Aya Vision", layouts.of_counted_tiles, facts.of_counted_tiles, options=_IN_TILES
    ),
    "llava": VisionFamily("LLaVA", layouts.of_one_tile, facts.of_patches),
    "vipllava": VisionFamily("ViP-LLaVA", layouts.of_one_tile, facts.of_plain_patches),
    "deepseek_vl": VisionFamily("DeepSeek-VL", layouts.of_one_tile, facts.of_plain_patches),
    "llava_next": VisionFamily("LLaVA-NeXT", layouts.of_unpadded_tiles, facts.of_pinpoints),
    "idefics3": VisionFamily("Idefics 3", *_NUMBERED, options=_WITH_PLACES),
    "smolvlm": VisionFamily("SmolVLM", *_NUMBERED, options=_WITH_PLACES),
    "lighton_ocr": VisionFamily("LightOnOCR", layouts.of_merged_patches, facts.of_merged_patches),
    "got_ocr2": VisionFamily("GOT-OCR 2", layouts.of_one_tile, facts.of_shrunk_patches),
    "exaone4_5": VisionFamily("EXAONE 4.5"),
    "hyperclovax_vision_v2": VisionFamily("HyperCLOVA X Vision"),
    "video_llama_3": VisionFamily("VideoLLaMA 3", note="images alone"),
    "lfm3_vl": VisionFamily("LFM3-VL", note=_STATES),
}


def family_of(config: Any) -> str:
    """Return the key of a configuration's family in `VISION_FAMILIES`; empty: it is not served with sight."""
    kind = str(config.model_type)
    tower = getattr(getattr(config, "vision_config", None), "model_type", "")
    named = f"{kind} {tower}"
    if named in VISION_FAMILIES:
        return named
    return kind if kind in VISION_FAMILIES else ""


def is_in_tower(path: str) -> bool:
    """Return True if a layer encodes images: its rows are not a step's."""
    return not set(TOWERS).isdisjoint(path.split("."))


#: Why other architectures of transformers that read images don't see here: reason -> `model_type`s.
NOT_SERVED: Mapping[str, tuple[str, ...]] = {
    "its image processor needs torchvision": (
        "cohere2_vision", "gemma4_unified", "inkling2", "inkling_mm_model", "kimi_k25", "lfm2_vl",
        "minicpm_ocr", "minimax_m3_vl", "molmo2", "muse_glimmer", "muse_spark", "nemotron_h_omni",
        "perception_lm", "pp_formulanet", "step3p7", "unlimited_ocr",
    ),
    "its tower needs timm": ("fast_vlm", "gemma3n"),
    "a prompt's tokens see each other, text too, so that no prefix of it can be used again": ("paligemma",),
    "an image has other tokens in a prompt with several": (
        "idefics2", "llava_onevision", "minicpmv4_6", "minicpmv4_7",
    ),
    "layers attend to the image apart from the prompt": (
        "blip", "evolla", "florence2", "git", "idefics", "mllama", "pix2struct", "t5gemma2", "udop",
        "vision-encoder-decoder",
    ),
    "images are tokens of the vocabulary that another model makes": ("chameleon", "emu3", "janus"),
    "its experts depend on which tokens are an image's": ("ernie4_5_vl_moe",),
    "it does not write text, or not from left to right": ("diffusion_gemma", "pi0", "shieldgemma2"),
    "it has not been tried": (
        "aria", "blip-2", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2",
        "deepseek_vl_hybrid", "dots3_note", "fuyu", "glm5_next", "glmga", "granite4_vision",
        "granite_docling", "hunyuan_vl", "instructblip", "instructblipvideo", "kosmos-2", "kosmos-2.5",
        "llava_next_video", "mistral4", "mistral_large4", "ovis2", "pp_chart2table", "qianfan_ocr",
        "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "qwen4_exp", "video_llava",
    ),
}  # fmt: skip


def reason_without_sight(config: Any) -> str:
    """Return why an architecture that reads images does not see here; empty: it sees, or reads none."""
    kind = str(config.model_type)
    return next((reason for reason, kinds in NOT_SERVED.items() if kind in kinds), "")
