# SPDX-License-Identifier: Apache-2.0
"""Tokens of one image in a prompt, by family: how many rows of the tower, and which text between them.

Each function takes what the image processor gives for an image of that size (tensors by name) and the
`Facts` of the model, and returns the tokens: ids of text, and None for each row of the tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Numbers of a model's configuration and ids of its tokens, by name; plain data.
Facts = Mapping[str, Any]
Tokens = Sequence[int | None]


def in_a_grid(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """One row for each square of merged patches (Qwen-VL, GLM-V)."""
    return [None] * (int(inputs["image_grid_thw"][0].prod()) // facts["merge"] ** 2)


def in_lines(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """Lines of patches that end with a token, the last one with another (Pixtral, Mistral 3)."""
    height, width = (int(side) // facts["patch"] for side in inputs["image_sizes"][0])
    if height * width == 1:  # transformers takes a single row for none
        raise ValueError(f"it is one patch of {facts['patch']} pixels; the model takes two or more")
    line: list[int | None] = [*[None] * width, facts["line_end"]]
    return [*(line * height)[:-1], facts["image_end"]]


def between_marks(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """As many rows for each tile, all of them between two tokens (InternVL, Gemma 3)."""
    num_rows = len(inputs["pixel_values"]) * facts["rows_of_tile"]
    return [facts["image_start"], *[None] * num_rows, facts["image_end"]]


def of_counted_rows(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """As many rows as the processor says, between two tokens (Gemma 4)."""
    num_rows = int(inputs["num_soft_tokens_per_image"][0])
    return [facts["image_start"], *[None] * num_rows, facts["image_end"]]


def of_one_tile(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """One row for each patch of an image of a fixed size (LLaVA)."""
    height, width = (side // facts["patch"] for side in inputs["pixel_values"].shape[-2:])
    return [None] * (height * width + facts["class_rows"])


def of_merged_patches(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """One row for each square of merged patches, of an image of any size (LightOnOCR)."""
    height, width = (int(side) // facts["patch"] for side in inputs["image_sizes"][0])
    return [None] * (height * width)


def of_counted_tiles(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """Tiles after words with their number, then the whole image (Aya Vision)."""
    words, tile = facts["words"], [None] * facts["rows_of_tile"]
    tokens: list[int | None] = [*words["start"]]
    for number in range(1, len(inputs["pixel_values"])):
        tokens += [*words[f"{number}"], *tile]
    return [*tokens, *words["whole"], *tile, *words["end"]]


def of_separated_tiles(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """Tiles with a token between those of a line, and one after it, then the whole image (Llama 4)."""
    rows, columns = (int(count) for count in inputs["aspect_ratios"][0])
    tile = [None] * facts["rows_of_tile"]
    tokens: list[int | None] = [facts["image_start"]]
    for _ in range(rows if rows * columns > 1 else 0):
        for column in range(columns):
            tokens += tile if column == 0 else [facts["tile_x_separator"], *tile]
        tokens.append(facts["tile_y_separator"])
    return [*tokens, facts["image"], *tile, facts["image_end"]]


def of_unpadded_tiles(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """The rows of the image shrunk to a tile, then of tiles without their padding, by lines (LLaVA-NeXT)."""
    from transformers.image_processing_utils import select_best_resolution  # heavy

    height, width = (int(side) for side in inputs["image_sizes"][0])
    tile = int(inputs["pixel_values"].shape[-1])
    patches = tile // facts["patch"]
    best_height, best_width = select_best_resolution((height, width), facts["resolutions"])
    lines, columns = best_height // tile * patches, best_width // tile * patches
    if width / height > columns / lines:
        lines -= (lines - int(round(height * columns / width, 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * lines / height, 7))) // 2 * 2
    return [None] * (patches * patches + facts["class_rows"] + lines * (columns + 1))


def of_numbered_tiles(inputs: Mapping[str, Any], facts: Facts) -> Tokens:
    """Tiles after words with their row and column, by lines, then the whole image (Idefics 3, SmolVLM)."""
    rows, columns, words = int(inputs["rows"][0][0]), int(inputs["cols"][0][0]), facts["words"]
    tile, tokens = [None] * facts["rows_of_tile"], list[int | None]()
    for row in range(rows):
        for column in range(columns):
            tokens += [*words[f"{row} {column}"], *tile]
    return [*tokens, *words["whole after tiles" if rows and columns else "whole"], *tile, *words["end"]]
