# SPDX-License-Identifier: Apache-2.0
"""Images in the parts and blocks of all APIs: where their data is.

chat completions   {"type": "image_url", "image_url": {"url": DATA, "detail": ...}}
responses          {"type": "input_image", "image_url": DATA, "detail": ...}, or "computer_screenshot"
Messages           {"type": "image", "source": {"type": "base64", "data": DATA}}, or "url"
Ollama's           {"type": "image", "data": DATA}, as this server writes them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Stands in a result of a tool for an image that the user's message behind it has.
IN_NEXT_MESSAGE = "[image: in the next message]"
IMAGE_KINDS = frozenset({"image", "image_url", "input_image", "computer_screenshot"})


class ImageData(NamedTuple):
    """Image in a part.

    Attributes:
        data: base64 text, a data URL, or an address.
        detail: as the client wrote it.
    """

    data: str
    detail: str

    @property
    def is_address(self) -> bool:
        """True for an http(s) address."""
        return self.data[:8].lower().startswith(("http://", "https://"))


def image_data(part: Mapping[str, Any]) -> ImageData | None:
    """Return the image in a part; None: its data is not there (the id of a file, another kind of address)."""
    detail = "auto"
    nested = (part[name] for name in ("source", "image_url") if isinstance(part.get(name), dict))
    for place in (part, *nested):
        detail = str(place.get("detail") or detail)
        for name in ("data", "url", "image_url"):
            content = place.get(name)
            if isinstance(content, str) and content:
                found = ImageData(content, detail)
                is_data = name == "data" or content.startswith("data:")
                return found if is_data or found.is_address else None
    return None
