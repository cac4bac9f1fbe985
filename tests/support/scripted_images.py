# SPDX-License-Identifier: Apache-2.0
"""Images for tests: files of all formats, and a processor for `ScriptedEngine`."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image
from scripted_engine import IMAGE_PLACEHOLDER

from radixkv.errors import InvalidRequestError
from radixkv.images.image_files import DecodedImage
from radixkv.images.placed_image import PlacedImage, identity_of, image_ids


def picture(seed: int = 0, size: tuple[int, int] = (32, 24), mode: str = "RGB") -> Image.Image:
    """A picture with something in every place: no two seeds look alike."""
    width, height = size
    grey = bytes(
        (x * 8 * 40 // width * (seed + 3) + y * 8 * 40 // height * (seed * seed + 5)) % 256
        for y in range(height)
        for x in range(width)
    )
    return Image.frombytes("L", size, grey).convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def base64_of(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """A picture's file in base64."""
    return base64.b64encode(file_of(image, kind, **options)).decode()


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    """A picture as a data URL."""
    return f"data:image/{kind.lower()};base64,{base64_of(image, kind)}"


class ScriptedImageProcessor:
    """Image processor of a `ScriptedEngine`: one token for each 256 pixels."""

    def num_tokens(self, width: int, height: int) -> int:
        return max(1, width * height // 256)

    def place(
        self, token_ids: Sequence[int], images: Sequence[DecodedImage]
    ) -> tuple[list[int], list[PlacedImage]]:
        left = list(images)
        ids: list[int] = []
        placed: list[PlacedImage] = []
        for token in token_ids:
            if token != ord(IMAGE_PLACEHOLDER):
                ids.append(token)
                continue
            if not left:
                raise InvalidRequestError("more placeholders than images", code="invalid_image")
            image = left.pop(0)
            count = self.num_tokens(image.width, image.height)
            placed.append(PlacedImage(image, identity_of(image, ""), start=len(ids), length=count))
            ids += image_ids(placed[-1].identity, count)
        if left:
            raise InvalidRequestError("the template leaves an image out", code="invalid_image")
        return ids, placed


def ids_of(image: DecodedImage) -> list[int]:
    """The ids of an image's tokens, as `ScriptedImageProcessor` gives them."""
    return ScriptedImageProcessor().place([ord(IMAGE_PLACEHOLDER)], [image])[0]
