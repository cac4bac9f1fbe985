# SPDX-License-Identifier: Apache-2.0
"""Differences between the images of two texts, by the words that stand for them (`DecodedImage.words`)."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Bits of 64 in which two sizes of one picture may differ. Measured over 30 drawn screens, shrunk to 0.33
#: to 0.6 as PNG and JPEG: 0 to 5; between two of the screens: 7 and more, mostly over 14.
MAX_LOOK_BITS = 6

IMAGE_WORDS = re.compile(r"\[image ([0-9a-f]{8}) (\d+)x(\d+) ([0-9a-f]{16})\]")


class ImageChange(NamedTuple):
    """Change of an image.

    Attributes:
        cause: `image_resized` or `another_image`.
        old, new: the words for it.
    """

    cause: str
    old: str
    new: str


def changed_image(old: str, new: str) -> ImageChange | None:
    """Name the first image that differs between two texts that are the same but for images; None: no such."""
    if IMAGE_WORDS.sub("", old) != IMAGE_WORDS.sub("", new):
        return None
    pairs = zip(IMAGE_WORDS.finditer(old), IMAGE_WORDS.finditer(new), strict=False)
    for one, other in pairs:
        if one[0] == other[0]:
            continue
        same_look = (int(one[4], 16) ^ int(other[4], 16)).bit_count() <= MAX_LOOK_BITS
        resized = same_look and (one[2], one[3]) != (other[2], other[3])
        return ImageChange("image_resized" if resized else "another_image", one[0], other[0])
    return None
