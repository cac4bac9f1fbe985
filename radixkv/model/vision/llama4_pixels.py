# SPDX-License-Identifier: Apache-2.0
"""Llama4Pixels: Llama 4's image processor without torchvision, which transformers' own needs.

An image is scaled, without distortion and never up beyond one tile's side, onto the canvas of whole tiles
that shrinks it least, padded at its right and its bottom, and cut into tiles; the whole image, as one more
tile, comes last where there are several. Rules and constants are those of transformers'
`Llama4ImageProcessor`, whose pixels differ by one level of 255 in places, where torchvision rounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DEFAULTS: Mapping[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"height": 336, "width": 336},
    "rescale_factor": 1 / 255,
    "max_patches": 16,
    "resize_to_max_canvas": False,
}


class Llama4Pixels:
    """Prepares images for Llama 4's tower; with the interface of transformers' image processors.

    Args:
        settings: of a model's `preprocessor_config.json`; those that are missing have transformers' defaults.

    Attributes:
        size: height and width of a tile, which are equal.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = {name: settings.get(name, default) for name, default in _DEFAULTS.items()}
        self.size: Mapping[str, int] = self._settings["size"]
        side = int(self.size["height"])
        if side != self.size["width"]:
            raise ValueError(f"its tiles must be square, not {dict(self.size)}")
        most = int(self._settings["max_patches"])
        self._canvases = [
            (rows * side, count // rows * side)
            for count in range(most, 0, -1)
            for rows in range(1, count + 1)
            if count % rows == 0
        ]

    @classmethod
    def read(cls, folder: Path) -> Llama4Pixels:
        """Return the processor of a model's folder."""
        files = (folder / "preprocessor_config.json", folder / "processor_config.json")
        settings = json.loads(next(file for file in files if file.is_file()).read_text(encoding="utf-8"))
        return cls(settings.get("image_processor", settings))

    def to_dict(self) -> dict[str, Any]:
        """Return all that the pixels depend on."""
        return {"image_processor_type": "Llama4Pixels", **self._settings}

    def __call__(self, images: Sequence[Any], return_tensors: str = "pt") -> dict[str, Tensor]:
        """Prepare images of Pillow's.

        Returns:
            `pixel_values`: bfloat16 [tiles of all images, 3, side, side]. `aspect_ratios`: int [images, 2],
            rows and columns of tiles, without those of the whole image.
        """
        tiles, grids = zip(*map(self._tiles, images), strict=True)
        return {"pixel_values": torch.cat(tiles), "aspect_ratios": torch.tensor(grids)}

    def _tiles(self, image: Any) -> tuple[Tensor, tuple[int, int]]:
        side = int(self.size["height"])
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        height, width = pixels.shape[1:]
        canvas = self._canvas(height, width)
        most = canvas
        if not self._settings["resize_to_max_canvas"]:
            most = min(max(height, side), canvas[0]), min(max(width, side), canvas[1])
        scaled = _resized(pixels, _within(height, width, *most))
        padding = 0, canvas[1] - scaled.shape[2], 0, canvas[0] - scaled.shape[1]
        padded = self._normalised(torch.nn.functional.pad(scaled, padding))
        rows, columns = canvas[0] // side, canvas[1] // side
        tiles = padded.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
        if len(tiles) > 1:
            tiles = torch.cat([tiles, self._normalised(_resized(pixels, (side, side)))[None]])
        return tiles, (rows, columns)

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return the smallest of the canvases that scale an image up least, or else shrink it least."""
        scales = [min(h / height, w / width) for h, w in self._canvases]
        larger = [scale for scale in scales if scale >= 1]
        if larger:
            chosen = max(larger) if self._settings["resize_to_max_canvas"] else min(larger)
        else:
            chosen = max(scales)
        fitting = [canvas for canvas, scale in zip(self._canvases, scales, strict=True) if scale == chosen]
        return min(fitting, key=lambda canvas: canvas[0] * canvas[1])

    def _normalised(self, pixels: Tensor) -> Tensor:
        """Return pixels [3, h, w] as the tower takes them, computed in bfloat16 as the model was trained."""
        scaled = pixels.to(torch.bfloat16) * self._settings["rescale_factor"]
        mean, std = (
            torch.tensor(self._settings[name], dtype=torch.bfloat16)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        return (scaled - mean) / std


def _within(height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
    """Return the largest size of an image within bounds that does not distort it; no side is 0."""
    by_width, by_height = most_width / width, most_height / height
    if by_width < by_height:
        return max(1, min(math.floor(height * by_width), most_height)), most_width
    return most_height, max(1, min(math.floor(width * by_height), most_width))


def _resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return uint8 pixels [3, h, w] at another size, each the weighted mean of those it covers."""
    if pixels.shape[1:] == size:
        return pixels
    options: dict[str, Any] = {"mode": "bilinear", "align_corners": False, "antialias": True}
    wide = torch.nn.functional.interpolate(pixels[None].float(), size, **options)[0]
    return wide.round().clamp(0, 255).to(torch.uint8)
