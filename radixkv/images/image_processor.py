# SPDX-License-Identifier: Apache-2.0
"""ImageProcessor: what the edge of an engine needs to know of a model that sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from radixkv.images.image_files import DecodedImage


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """Prompt with the ids of its images' tokens.

    Attributes:
        token_ids: of the whole prompt.
        inputs: what `Request.images` takes.
        spans: positions of each image's tokens, in the order of the images.
    """

    token_ids: Sequence[int]
    inputs: Sequence[Any]
    spans: Sequence[range]


class ImageProcessor(Protocol):
    """A model's rules for images in prompts. Plain data, for any thread and any process."""

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens that an image of this size takes in a prompt. O(1).

        Raises:
            InvalidRequestError: no image of this shape can be shown.
        """

    def place(self, token_ids: Sequence[int], images: Sequence[DecodedImage]) -> PlacedImages:
        """Return a prompt with the ids of its images' tokens. O(pixels).

        Args:
            token_ids: as a chat template gives them: one placeholder for each image.
            images: in their order.

        Raises:
            InvalidRequestError: there are more or fewer placeholders than images, or one can't be shown.
        """
