# SPDX-License-Identifier: Apache-2.0
"""ImageProcessor: what the edge of an engine needs to know of a model that sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from radixkv.images.image_files import DecodedImage
from radixkv.images.placed_image import PlacedImage


class ImageProcessor(Protocol):
    """A model's rules for images in prompts. Plain data, for any thread and any process."""

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens that an image of this size takes in a prompt. O(1).

        Raises:
            InvalidRequestError: no image of this shape can be shown.
        """

    def place(
        self, token_ids: Sequence[int], images: Sequence[DecodedImage]
    ) -> tuple[Sequence[int], Sequence[PlacedImage]]:
        """Return a prompt with the ids of its images' tokens, and what `Request.images` takes. O(tokens).

        Args:
            token_ids: as a chat template gives them: one placeholder for each image.
            images: in their order.

        Raises:
            InvalidRequestError: there are more or fewer placeholders than images, or one can't be shown.
        """
