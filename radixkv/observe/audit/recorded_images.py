# SPDX-License-Identifier: Apache-2.0
"""Images in recorded bodies: words by which they are compared, and estimates of their tokens.

The words come from the pixels, as a server's do: the same picture in another file is the same image. An
image that is given by its address or can't be read is known by a digest of its part alone.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from radixkv.errors import InvalidRequestError
from radixkv.images.image_files import LOW_DETAIL_SIDE, decode_base64, decode_image
from radixkv.images.image_parts import IMAGE_KINDS, image_data
from radixkv.observe.audit.record import Block, Dialect
from radixkv.observe.image_difference import IMAGE_WORDS

MAX_FILE_BYTES = 32 << 20
MAX_PIXELS = 36_000_000
_MAX_KNOWN = 4096  # images whose words are kept: a conversation sends each of them with every turn


_known: OrderedDict[bytes, str] = OrderedDict()


def image_words(part: Mapping[str, Any]) -> str:
    """Return the words for the image of a part; empty: it is none, or can't be read.

    O(pixels), once an image.
    """
    found = image_data(part) if part.get("type") in IMAGE_KINDS else None
    if found is None or found.is_address:
        return ""
    key = hashlib.sha256(f"{found.detail}\n{found.data}".encode("utf-8", "replace")).digest()
    if key not in _known:
        try:
            data = decode_base64(found.data, MAX_FILE_BYTES)
            side = LOW_DETAIL_SIDE if found.detail == "low" else None
            _known[key] = decode_image(data, MAX_PIXELS, max_side=side).words
        except InvalidRequestError:
            _known[key] = ""
        if len(_known) > _MAX_KNOWN:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]


def with_image_tokens(block: Block, model: str, dialect: Dialect) -> Block:
    """Return a block with the estimated tokens of its image; another block as it is."""
    words = IMAGE_WORDS.fullmatch(block.text) if block.kind == "media" else None
    if words is None:
        return block
    return block._replace(image_tokens=estimated_tokens(int(words[2]), int(words[3]), model, dialect))


def estimated_tokens(width: int, height: int, model: str, dialect: Dialect) -> int:
    """Estimate the tokens that an image takes, by the published rule of its model's provider.

    Anthropic's   a token for 750 pixels, after shrinking to 1,568 pixels a side and 1.2 million in all
    OpenAI's      85, and 170 for each tile of 512 x 512, after shrinking to 2,048 pixels a side and 768 at
    the
                  shorter one (gpt-4o's rule in high detail; newer models' differ by up to a half)
    others        a token for 28 x 28 pixels (Qwen2.5-VL's), at most 16,384

    >>> models = (("claude-x", "messages"), ("gpt-4o", "chat"), ("", "chat"))
    >>> [estimated_tokens(1024, 768, *model) for model in models]
    [1049, 765, 999]
    """
    if dialect == "messages" or "claude" in model:
        scale = min(1.0, 1568 / max(width, height), math.sqrt(1_200_000 / (width * height)))
        return math.ceil(width * height * scale * scale / 750)
    if model.startswith(("gpt-", "o1", "o3", "o4", "chatgpt", "computer-use")):
        scale = min(1.0, 2048 / max(width, height))
        scale *= min(1.0, 768 / (min(width, height) * scale))
        return 85 + 170 * math.ceil(width * scale / 512) * math.ceil(height * scale / 512)
    return min(16384, max(1, round(width / 28)) * max(1, round(height / 28)))
