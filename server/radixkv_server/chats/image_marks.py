# SPDX-License-Identifier: Apache-2.0
"""Marks that stand for images in the texts of a chat, on their way from a body to the chat template.

Everything between these two works on texts: joining of parts, breakpoints by characters, clients' rules,
comparison of prompts. An image is therefore a mark in the text, until the template gets it as a part:

    body      [{"type": "text", "text": "See"}, {"type": "image_url", ...}]
    texts     "See\\n<mark>"
    template  [{"type": "text", "text": "See"}, {"type": "image"}]

A mark holds private-use characters that are drawn at random by each process, so that no text can spell one,
and the digest of the image's source. Nothing with a mark leaves the process or outlives it: what is stored or
shown has parts (`with_parts`) or words (`with_words`) in its place.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from radixkv.images.image_parts import IN_NEXT_MESSAGE
from radixkv_server.dialect import Json

Detail = Literal["auto", "low", "high", "original"]
DETAILS = ("auto", "low", "high", "original")

_PRIVATE_USE = 0x100000  # another plane than that of the marks of control tokens
_PRIVATE_USE_SIZE = 0xFFFE


def _secret() -> str:
    """Draw six private-use characters: 96 random bits."""
    return "".join(chr(_PRIVATE_USE + secrets.randbelow(_PRIVATE_USE_SIZE)) for _ in range(6))


_BEGIN = _secret()
_END = _secret()
_MARK = re.compile(f"{_BEGIN}([0-9a-f]{{32}}){_END}")
# Parts are joined by a line break, which is no text of theirs.
_SPLIT = re.compile(f"\n?{_BEGIN}([0-9a-f]{{32}}){_END}\n?")


@dataclass(frozen=True)
class ImageSource:
    """Image as a client gave it.

    Args:
        data: base64 text, a data URL, or an address.
        detail: what the client asks for; `low` bounds its size.
        place: its path in the body, for errors.
        is_latest: it is in the user's latest words: where it can't be shown, the request is refused.
    """

    data: str
    detail: Detail = "auto"
    place: str = ""
    is_latest: bool = False

    @functools.cached_property
    def key(self) -> str:
        """Digest of the data and the detail, 32 hex digits. O(length), once."""
        digest = hashlib.sha256(self.data.encode("utf-8", "replace"))
        digest.update(b"\nlow" if self.detail == "low" else b"\n")
        return digest.hexdigest()[:32]

    @property
    def mark(self) -> str:
        """Text that stands for it."""
        return _BEGIN + self.key + _END

    @property
    def is_address(self) -> bool:
        """True for an http(s) address."""
        return self.data[:8].lower().startswith(("http://", "https://"))


def has_marks(text: object) -> bool:
    """Return True for a text with an image in it."""
    return isinstance(text, str) and _BEGIN in text


def split_text(text: str) -> Iterator[tuple[str, bool]]:
    """Iterate over the pieces of a text: texts, and keys of images with True. Empty texts are left out."""
    for at, piece in enumerate(_SPLIT.split(text)):
        if piece or at % 2:
            yield piece, bool(at % 2)


def keys_in(value: Any) -> Iterator[str]:
    """Iterate over the keys of all images in JSON-like data, in their order."""
    if isinstance(value, str):
        if _BEGIN in value:
            yield from _MARK.findall(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from keys_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from keys_in(item)


def template_content(text: str, unshown: Mapping[str, str]) -> str | list[Json]:
    """Return a content with marks as the parts that chat templates expect.

    Args:
        unshown: key of an image that can't be shown -> words for it.
    """
    parts: list[Json] = []
    for piece, is_image in split_text(text):
        if is_image and piece not in unshown:
            parts.append({"type": "image"})
            continue
        words = unshown[piece] if is_image else piece
        if parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += "\n" + words
        else:
            parts.append({"type": "text", "text": words})
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def images_after_results(messages: Iterable[Json], shown: Container[str]) -> list[Json]:
    """Return messages whose results of tools have no images: these are in the user's message behind them.

    As clients of providers without images in results send them. The text that stands in a result for its
    image is the same for all, so that a prompt is found again.

    Args:
        shown: keys of the images that are shown; others stay where they are.
    """
    moved: list[Json] = []
    waiting: list[str] = []

    def words(found: re.Match[str]) -> str:
        if found[1] not in shown:
            return found[0]
        waiting.append(found[0])
        return IN_NEXT_MESSAGE

    for message in messages:
        content = message.get("content")
        if message.get("role") == "tool":
            if isinstance(content, str) and has_marks(content):
                message = {**message, "content": _MARK.sub(words, content)}
            moved.append(message)
            continue
        if waiting and message.get("role") == "user" and isinstance(content, str):
            message = {**message, "content": "\n".join([*waiting, content])}
        elif waiting:
            moved.append({"role": "user", "content": "\n".join(waiting)})
        waiting = []
        moved.append(message)
    if waiting:
        moved.append({"role": "user", "content": "\n".join(waiting)})
    return moved


def with_words(value: Any, words: Mapping[str, str]) -> Any:
    """Return JSON-like data with words in place of marks; what has none is returned as it is.

    Args:
        words: by the images' keys.
    """
    if isinstance(value, str):
        return _MARK.sub(lambda found: words.get(found[1], "[image]"), value) if _BEGIN in value else value
    if isinstance(value, dict):
        changed = {name: with_words(item, words) for name, item in value.items()}
        return changed if any(changed[name] is not item for name, item in value.items()) else value
    if isinstance(value, list):
        items = [with_words(item, words) for item in value]
        return items if any(one is not other for one, other in zip(items, value, strict=True)) else value
    return value


def with_parts(
    content: Any, sources: Mapping[str, ImageSource], text_part: Callable[[str], Json], image_part: MakePart
) -> Any:
    """Return a content, a text or a list of parts, with a part of its own for each image; to be stored.

    Args:
        sources: by the images' keys.
        text_part, image_part: make parts of the API's form.
    """
    if isinstance(content, str):
        if not has_marks(content):
            return content
        content = [text_part(content)]
    if not isinstance(content, list) or not any(map(_has_marked_text, content)):
        return content
    parts: list[Json] = []
    for part in content:
        if not _has_marked_text(part):
            parts.append(part)
            continue
        for piece, is_image in split_text(part["text"]):
            parts.append(image_part(sources[piece]) if is_image else {**part, "text": piece})
    return parts


MakePart = Callable[[ImageSource], Json]


def _has_marked_text(part: Any) -> bool:
    return isinstance(part, Mapping) and has_marks(part.get("text"))


def chat_keys(messages: Iterable[Json]) -> Sequence[str]:
    """Return the keys of all images in the contents of messages, in their order, with repetitions."""
    return [key for message in messages for key in keys_in(message.get("content"))]
