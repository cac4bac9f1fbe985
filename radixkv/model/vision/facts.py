# SPDX-License-Identifier: Apache-2.0
"""Facts of a model's images, by family: what `layouts` needs of the model.

Each function takes its configuration, its image processor and its tokenizer, and returns plain data.
`placeholder`, where it is among them, is the id that stands for an image in what a chat template gives;
otherwise that is the id of an image's tokens.
"""

from __future__ import annotations

from typing import Any

#: Longest run of line breaks that is looked for beside an image.
_MOST_BREAKS = 32


def of_grids(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Return the number of patches of a side that are merged (Qwen-VL, GLM-V)."""
    return {"merge": int(processor.merge_size)}


def of_lines(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Patches as Pixtral's tower and a projector merge them, and the tokens that end lines."""
    patch = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    line_end, image_end = hf_tokenizer.convert_tokens_to_ids(["[IMG_BREAK]", "[IMG_END]"])
    return {"patch": patch, "line_end": line_end, "image_end": image_end}


def of_merged_patches(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Patches as Pixtral's tower and a projector merge them (LightOnOCR)."""
    return {"patch": config.vision_config.patch_size * config.spatial_merge_size}


def of_marked_tiles(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Rows of a tile, and the tokens around all of them (InternVL)."""
    names = [
        getattr(hf_tokenizer, name, None) or default
        for name, default in (("start_image_token", "<img>"), ("end_image_token", "</img>"))
    ]
    start, end = hf_tokenizer.convert_tokens_to_ids(names)
    return {"rows_of_tile": int(config.image_seq_length), "image_start": start, "image_end": end}


def of_patches(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Patches, and rows of the tower beside those of patches, such as CLIP's of the class (LLaVA)."""
    class_rows = 0 if getattr(config, "vision_feature_select_strategy", "default") == "default" else 1
    return {"patch": _patch(config), "class_rows": class_rows}


def of_plain_patches(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Patches (DeepSeek-VL, ViP-LLaVA)."""
    return {"patch": _patch(config), "class_rows": 0}


def of_shrunk_patches(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Patches that two convolutions shrink to a sixteenth (GOT-OCR 2)."""
    return {"patch": 4 * _patch(config), "class_rows": 0}


def of_pinpoints(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """The same, and the sizes that images are cut from (LLaVA-NeXT)."""
    resolutions = [list(each) for each in config.image_grid_pinpoints]
    return {**of_patches(config, processor, hf_tokenizer), "resolutions": resolutions}


def of_numbered_tiles(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Rows of a tile, and the words before each by its row and column (Idefics 3, SmolVLM)."""
    side = config.vision_config.image_size // _patch(config) // config.scale_factor
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


def of_counted_tiles(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Rows of a tile, and the words before each by its number (Aya Vision)."""

    def ids(text: str) -> list[int]:
        found: list[int] = hf_tokenizer.encode(text, add_special_tokens=False)
        return found

    side = config.vision_config.image_size // _patch(config) // config.downsample_factor
    words = {"start": ids("<|START_OF_IMG|>"), "end": ids("<|END_OF_IMG|>"), "whole": ids("TILE_GLOBAL")}
    words |= {f"{tile}": ids(f"TILE_{tile}") for tile in range(1, int(processor.max_patches) + 1)}
    (placeholder,) = hf_tokenizer.convert_tokens_to_ids(["<image>"])
    return {"rows_of_tile": side * side, "words": words, "placeholder": placeholder}


def of_separated_tiles(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Rows of a tile, and the tokens between tiles, lines of them, and the whole image (Llama 4)."""
    vision = config.vision_config
    side = int(processor.size["height"]) // vision.patch_size
    names = "image_start", "tile_x_separator", "tile_y_separator", "image", "image_end"
    ids = hf_tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
    rows = int(side * side * vision.pixel_shuffle_ratio**2)
    return {"rows_of_tile": rows, **dict(zip(names, ids, strict=True)), "placeholder": ids[3]}


def of_gemma3(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """Rows that see each other, the tokens around them, and the line breaks around those."""
    count = int(config.mm_tokens_per_image)
    # There are two line breaks before and behind an image, and a run of them is one token of the vocabulary.
    runs = (hf_tokenizer.encode("\n" * n, add_special_tokens=False) for n in range(_MOST_BREAKS + 1))
    return {
        "image_start": config.boi_token_index,
        "image_end": config.eoi_token_index,
        "rows_of_tile": count,
        "sees_ahead": "everywhere",
        "most_together": count,
        "placeholder": config.boi_token_index,
        "breaks": list(runs),
    }


def of_gemma4(config: Any, processor: Any, hf_tokenizer: Any) -> dict[str, Any]:
    """The tokens around an image, whose rows see each other in windows alone, or not in smaller models."""
    facts = {"image_start": config.boi_token_id, "image_end": config.eoi_token_id}
    if config.text_config.use_bidirectional_attention == "vision":
        facts |= {"sees_ahead": "in windows", "most_together": int(processor.max_soft_tokens)}
    return facts


def _patch(config: Any) -> int:
    patch = config.vision_config.patch_size
    return int(patch if isinstance(patch, int) else patch[0])
