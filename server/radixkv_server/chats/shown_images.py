# SPDX-License-Identifier: Apache-2.0
"""ShownImages: the latest images of prompts, for people who read explanations and watch the cache.

An image's tokens have ids that no text belongs to. Where tokens are shown as text, words stand for an
image, and the console draws its thumbnail beside them.

    tokens   ... 529, 30  |  1073741829, 1090271334, ...  |  198, 872 ...
    text     ...is this?     [image 3f2a9c1b 1280x720 0f1e2d3c4b5a6978]   \nassistant...
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from radixkv.images.image_files import DecodedImage
from radixkv.images.placed_image import FIRST_IMAGE_ID

MAX_SHOWN_IMAGES = 256
#: Of an image whose tokens are shown, and which was not among the latest.
UNKNOWN_WORDS = "[image]"


@dataclass(frozen=True, slots=True)
class _ShownImage:
    words: str
    width: int
    height: int
    thumbnail: str
    ids: frozenset[int]
    owners: set[str] = field(default_factory=set)


class ShownImages:
    """Thumbnails of the latest images and the ids of their tokens: 256 images, some kilobytes each."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, _ShownImage] = OrderedDict()

    def note(self, tenant: str, image: DecodedImage, token_ids: Sequence[int]) -> None:
        """Remember an image of a tenant's prompt. O(pixels) for a new one."""
        name = image.name
        shown = self._by_name.get(name)
        if shown is None:
            ids = frozenset(map(int, token_ids))
            shown = _ShownImage(image.words, image.width, image.height, image.thumbnail(), ids)
            self._by_name[name] = shown
            if len(self._by_name) > MAX_SHOWN_IMAGES:
                self._by_name.popitem(last=False)
        else:
            self._by_name.move_to_end(name)
        shown.owners.add(tenant)

    def find(self, name: str, tenant: str) -> dict[str, object] | None:
        """Return an image by the name in its words; None: it is not known, or the tenant has not shown it."""
        shown = self._by_name.get(name)
        if shown is None or tenant not in shown.owners:
            return None
        return {
            "object": "cache.image",
            "id": name,
            "width": shown.width,
            "height": shown.height,
            "thumbnail": shown.thumbnail,
        }

    def texts(self, token_ids: Sequence[int]) -> Iterator[Sequence[int] | str]:
        """Iterate over runs of text tokens, and the words of images in between. O(tokens x images)."""
        for is_image, run in groupby(token_ids, lambda token: token >= FIRST_IMAGE_ID):
            if not is_image:
                yield list(run)
                continue
            for words, _ in groupby(map(self._words, run)):
                yield words

    def _words(self, token: int) -> str:
        found = (shown.words for shown in reversed(self._by_name.values()) if token in shown.ids)
        return next(found, UNKNOWN_WORDS)
