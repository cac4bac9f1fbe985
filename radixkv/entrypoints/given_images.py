# SPDX-License-Identifier: Apache-2.0
"""Images that users of `LLM` give with prompts and in messages, on their way to pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidRequestError
from radixkv.images.image_files import DecodedImage, decode_base64, decode_image, image_of, invalid_image
from radixkv.images.image_parts import IN_NEXT_MESSAGE

#: Bounds of one image; it comes from the program itself.
MAX_BYTES = 2**28
MAX_PIXELS = 2**27
_GIVEN = "multi_modal_data"
_IMAGE = {"type": "image"}


def split_prompt(prompt: Any) -> tuple[Any, list[Any]]:
    """Return a prompt without its images, and these, as given.

    `{"prompt": text, "multi_modal_data": {"image": image or images}}` has them, as vLLM's programs write it.

    Raises:
        InvalidRequestError: there is something else in `multi_modal_data`.
    """
    if not isinstance(prompt, Mapping) or not prompt.get(_GIVEN):
        return prompt, []
    data = prompt[_GIVEN]
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        kinds = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise InvalidRequestError(
            f'{_GIVEN} must be {{"image": image or images}}, not {kinds:.80}: no audio or video is served',
            param=_GIVEN,
        )
    given = data["image"]
    rest = {name: value for name, value in prompt.items() if name != _GIVEN}
    return rest, list(given) if isinstance(given, list | tuple) else [given]


def split_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return messages with `{"type": "image"}` for each of their images, and these, as given.

    `{"type": "image", "image": image}` and OpenAI's `{"type": "image_url", "image_url": {"url": data URL}}`
    are images.
    """
    found: list[Any] = []
    return [_without_images(message, found) for message in messages], found


def has_images_in_results(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a result of a tool has an image; messages are those of `split_messages`."""
    return any(message.get("role") == "tool" and _IMAGE in _parts(message) for message in messages)


def images_behind_results(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages of `split_messages` with the images of results in the user's message behind these.

    As the server does where a chat template shows no images in results; the images keep their order.
    """
    moved: list[Mapping[str, Any]] = []
    waiting: list[Any] = []
    for message in messages:
        parts = _parts(message)
        if message.get("role") == "tool":
            if _IMAGE in parts:
                texts = [IN_NEXT_MESSAGE if part == _IMAGE else str(part.get("text", "")) for part in parts]
                waiting += [_IMAGE] * parts.count(_IMAGE)
                message = {**message, "content": "\n".join(texts)}
        elif waiting:
            if message.get("role") == "user":
                message = {**message, "content": [*waiting, *parts]}
            else:
                moved.append({"role": "user", "content": waiting})
            waiting = []
        moved.append(message)
    return [*moved, {"role": "user", "content": waiting}] if waiting else moved


def _parts(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content) if isinstance(content, list | tuple) else []


def _without_images(message: Mapping[str, Any], found: list[Any]) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image" and "image" in part:
            found.append(part["image"])
        elif kind == "image_url":
            address = part.get("image_url")
            found.append(address.get("url") if isinstance(address, Mapping) else address)
        else:
            parts.append(part)
            continue
        parts.append(_IMAGE)
    return {**message, "content": parts}


def decoded(image: Any) -> DecodedImage:
    """Return the pixels of an image: Pillow's, the bytes of a file, a `Path` of one, or a data URL.

    Raises:
        InvalidRequestError: it is none of these, or can't be read.
    """
    if isinstance(image, DecodedImage):
        return image
    if isinstance(image, str) and image.startswith("data:"):
        image = decode_base64(image, MAX_BYTES)
    if isinstance(image, Path):
        try:
            image = image.read_bytes()
        except OSError as error:
            raise invalid_image(f"{image} can't be read ({error.strerror or error})") from None
    if isinstance(image, bytes):
        return decode_image(image, MAX_PIXELS)
    if hasattr(image, "getexif") and hasattr(image, "tobytes"):
        return image_of(image)
    raise invalid_image(
        "an image is one of Pillow's, the bytes of a file, a pathlib.Path of one, or a data URL, not "
        f"{image!r:.80}"
    )
