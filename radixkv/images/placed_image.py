# SPDX-License-Identifier: Apache-2.0
"""PlacedImage: an image in a prompt, and the ids by which the cache knows it.

Each token of an image is a virtual id at or above `FIRST_IMAGE_ID`, which no vocabulary reaches: bits of a
hash over the image's pixels, its size, and the settings by which the model sees it:

    prompt     See  <start>   <image>                      <end>  What
    ids         11        5   1830423311  1190077123 ...       6    13
    position     0        1            2           3          ...

So the tree, hits to the token, tiers, events and explanations work with images as they do with text: another
image parts from this one at its first token. What computes a model looks an image up by its place instead.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.images.image_files import DecodedImage

#: Ids from here to 2^31 - 1 are tokens of images: 30 bits of a hash each.
FIRST_IMAGE_ID = 2**30
_BITS = 2**30 - 1
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, repr=False)
class PlacedImage:
    """An image at its place in a prompt; plain data.

    Attributes:
        image: its pixels.
        identity: 32 bytes, a hash over pixels, size and the model's settings for images.
        start: position of its first token.
        length: positions from there to its end.
        between: offsets in [0, length) of tokens that are text, such as the ends of its rows; ascending.
        grid: rows and columns of its tokens, for models whose rotary positions have three components; None:
            a token's position is its place in the prompt.
        rope_start: rotary position of its first token: less than `start` where other images come before.
        together: offsets [first, end) of tokens that see each other, later ones too, run by run; ascending.
    """

    image: DecodedImage
    identity: bytes
    start: int
    length: int
    between: tuple[int, ...] = ()
    grid: tuple[int, int] | None = None
    rope_start: int = 0
    together: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_rows(self) -> int:
        """Number of its tokens that are no text."""
        return self.length - len(self.between)

    @property
    def rope_end(self) -> int:
        """Rotary position of the first token behind it."""
        return self.rope_start + (self.length if self.grid is None else max(self.grid))

    def row_at(self, position: int) -> int:
        """Return how many of its tokens before a position are no text. O(log(between))."""
        offset = position - self.start
        return offset - bisect_left(self.between, offset)

    def __repr__(self) -> str:
        return f"PlacedImage({self.image.words} at {self.start} to {self.end})"


def chunk_end(images: Sequence[PlacedImage], start: int, end: int) -> int:
    """Return where a chunk of a prompt ends that begins at `start` and has room up to `end`.

    Tokens that see each other are computed in one step: one that would be parted from later ones waits for
    the next chunk, unless it is the first, and then the chunk goes on to the last of them. A chunk may begin
    inside of them: what is cached of them was computed with all of them. O(log images).
    """
    at = bisect_right(images, end, key=lambda image: image.end)
    for first, last in images[at].together if at < len(images) else ():
        first, last = images[at].start + first, images[at].start + last
        if first < end < last:
            return first if start < first else last
    return end


def identity_of(image: DecodedImage, settings: str) -> bytes:
    """Return the 32 bytes that name an image as a model sees it.

    Args:
        settings: all that the model's view depends on beside the pixels.
    """
    return hashlib.sha256(image.digest + settings.encode()).digest()


def image_ids(identity: bytes, count: int) -> array[int]:
    """Return the virtual ids of an image's first `count` tokens. O(count)."""
    numbers = array("I")
    assert numbers.itemsize == _ID_BYTES
    numbers.frombytes(hashlib.shake_256(identity).digest(count * _ID_BYTES))
    if sys.byteorder != "little":
        numbers.byteswap()
    return array("i", [FIRST_IMAGE_ID | number & _BITS for number in numbers])
