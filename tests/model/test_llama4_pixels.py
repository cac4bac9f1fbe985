# SPDX-License-Identifier: Apache-2.0
"""Llama 4's image processor: canvases as transformers' own chooses them, and its pixels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from PIL import Image

from radixkv.model.vision.llama4_pixels import Llama4Pixels

SMALL = {"size": {"height": 32, "width": 32}, "max_patches": 6}
LARGE = {**SMALL, "resize_to_max_canvas": True}
#: Width and height, and the rows and columns of tiles that transformers gives, by settings.
SIZES = {
    (96, 64): ((2, 3), (2, 3), (1, 1)),
    (10, 10): ((1, 1), (2, 2), (1, 1)),
    (300, 20): ((1, 6), (1, 6), (1, 1)),
    (7, 200): ((6, 1), (6, 1), (1, 1)),
    (33, 31): ((1, 2), (2, 3), (1, 1)),
    (500, 400): ((2, 3), (2, 3), (2, 2)),
    (1000, 700): ((2, 3), (2, 3), (3, 3)),
    (1, 1): ((1, 1), (2, 2), (1, 1)),
}


def random_image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", SIZES)
def test_canvases(size: tuple[int, int]) -> None:
    for settings, expected in zip((SMALL, LARGE, {}), SIZES[size], strict=True):
        found = Llama4Pixels(settings)([random_image(*size)])
        assert found["aspect_ratios"].tolist() == [list(expected)]
        count = expected[0] * expected[1]
        side = 32 if settings else 336
        assert found["pixel_values"].shape == (count + (count > 1), 3, side, side)


def test_pixels_of_an_image_that_is_a_canvas_are_its_own() -> None:
    image = random_image(96, 64)
    tiles = Llama4Pixels(SMALL)([image])["pixel_values"].float()
    whole = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
    assert torch.allclose(tiles[4], whole[:, 32:, 32:64], atol=0.01)  # row 1, column 1
    assert torch.allclose(tiles[6].mean(), whole.mean(), atol=0.02)  # the whole image, shrunk


def test_padding_is_black_at_the_right_and_at_the_bottom() -> None:
    tiles = Llama4Pixels(SMALL)([Image.new("RGB", (40, 72), "white")])["pixel_values"].float()
    assert (tiles[0] == 1).all()
    assert (tiles[5, :, -1, -1] == -1).all()


def test_settings_come_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**SMALL, "image_mean": [0, 0, 0]}))
    pixels = Llama4Pixels.read(tmp_path)
    assert pixels.to_dict()["image_mean"] == [0, 0, 0]
    assert pixels.size["height"] == 32
    with pytest.raises(ValueError, match="square"):
        Llama4Pixels({"size": {"height": 32, "width": 16}})
