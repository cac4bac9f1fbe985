# SPDX-License-Identifier: Apache-2.0
"""Checks that a prompt's virtual ids are those of its images, each at its place.

A step reads an image's pixels by its place in the prompt, and the cache knows it by its ids: if they could
differ, a prompt would hit another one's K/V.
"""

from __future__ import annotations

import numpy as np

from radixkv.cache.keys import EncodedTokens
from radixkv.errors import InvalidRequestError
from radixkv.images.placed_image import FIRST_IMAGE_ID, PlacedImage, image_ids
from radixkv.scheduling.request import Request

_REMEDY = "give the prompt and the images as the engine's image_processor.place returns them"


def check_images(request: Request, prompt: EncodedTokens, *, takes_images: bool) -> None:
    """Check the images of a request against the ids of its prompt. O(length).

    Raises:
        InvalidRequestError: the model takes none; or the prompt has virtual ids where no image of the request
            is, or others than the image's.
    """
    if not takes_images:
        if request.images:
            raise _refused("this model takes text only, and no images")
        return  # ids beyond the vocabulary were refused
    token_ids = prompt.token_ids
    end = 0
    for image in request.images:
        if not isinstance(image, PlacedImage) or not end <= image.start < image.end <= len(prompt):
            raise _refused(f"images have other places than the prompt ({image!r:.80}): {_REMEDY}")
        if (token_ids[end : image.start] >= FIRST_IMAGE_ID).any():
            raise _refused(f"the prompt has tokens of an image behind {end} that is not given: {_REMEDY}")
        own = np.delete(token_ids[image.start : image.end], image.between)
        if not np.array_equal(own, np.asarray(image_ids(image.identity, image.num_rows))):
            raise _refused(f"the prompt has other tokens at {image.start} than those of its image: {_REMEDY}")
        end = image.end
    if (token_ids[end:] >= FIRST_IMAGE_ID).any():
        raise _refused(f"the prompt has tokens of an image behind {end} that is not given: {_REMEDY}")


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(why, param="images", code="invalid_image")
