# SPDX-License-Identifier: Apache-2.0
"""Images, files and sounds in messages: shown, refused, or replaced by a short text before a body is checked.

Most models read text. Clients send their whole history again with each turn, so one image that is refused
there ends a session for good. `--images` decides:

                the user's latest words     results of tools, and all before these words
    auto        refused                     replaced, and the header `warning` says so
    placeholder replaced, with the warning  likewise
    refuse      refused                     refused
    show        images are shown, in messages of the user and results of tools; all else as with `auto`

`auto` is `show` where the model sees. The user's latest words are the messages of the user's last turn.
Messages that follow results of tools in the same turn belong to these results: clients add the images of a
result that way. The text is a function of the content alone, so that a later turn finds its prompt in the
cache. An image that is shown becomes a mark in the text (`chats.image_marks`). Nothing is fetched here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

from pydantic import BeforeValidator, PrivateAttr, ValidationInfo, model_validator

from radixkv.images.image_parts import IMAGE_KINDS, image_data
from radixkv_server.chats.image_marks import DETAILS, Detail, ImageSource
from radixkv_server.dialect import Json
from radixkv_server.http.body import ParamError, StrictModel
from radixkv_server.http.fields import Ignored

#: Types of parts and blocks -> words for them.
_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "file": "file",
    "input_file": "file",
    "document": "file",
    "container_upload": "file",
    "input_audio": "sound",
    "audio_url": "sound",
    "video_url": "video",
}
# Fields that name the content of a part: the first that is a text counts.
_CONTENT = ("data", "url", "image_url", "file_data", "file_url", "file_id", "uri", "filename")
_NESTED = ("source", "image_url", "file", "input_audio", "audio_url", "video_url")
#: Types and roles of the messages and items whose images are shown.
_SHOWING_ITEMS = frozenset(
    {
        *(None, "message", "function_call_output", "custom_tool_call_output", "computer_call_output"),
        *("image_generation_call", "code_interpreter_call"),
    }
)
_SHOWING_ROLES = frozenset({None, "user", "tool", "function"})
# Members of messages, items, results and documents that hold parts.
_PARTS = ("content", "output", "outputs", "source")


def placeholder(kind: str, content: str, reads: str = "text") -> str:
    """Return the text that stands for an image or another medium.

    Args:
        content: its data, or its address. The query of an address is ignored: signatures change each time.
        reads: what the model reads.
    """
    named = content.partition(";base64,")[2] or content
    if named.startswith(("http://", "https://")):
        named = named.partition("?")[0]
    digest = hashlib.sha256(named.encode("utf-8", "replace")).hexdigest()[:8]
    return f"[{kind} {digest}: not shown, this model reads {reads}]"


def as_text(messages: Any, info: ValidationInfo) -> Any:
    """Return the messages or items of a body with text in place of all media: marks for those to be shown.

    Raises:
        ParamError: one that is refused, or without content.
    """
    if not isinstance(messages, list):
        return messages
    ignored = info.context if isinstance(info.context, Ignored) else Ignored()
    latest = _latest_words(messages)
    replaced, found, shown = [], [], 0
    for index, message in enumerate(messages):
        media = _Media(ignored, is_latest=index in latest, shows=_shows(message, ignored))
        replaced.append(media.replaced(message, f"{info.field_name}[{index}]"))
        found += [(index, place) for place in media.places]
        shown += media.num_shown
    if not found:
        return replaced if shown else messages
    for index, place in found:
        if ignored.images == "refuse":
            raise ParamError(
                f"{place}: the model reads text, and this server refuses images, files and sounds "
                "(--images refuse).",
                place,
                "unsupported_content",
            )
        if ignored.images != "placeholder" and index in latest:
            raise ParamError(f"{place}: {_why_not(ignored)}", place, "unsupported_content")
    ignored.note_part("images, files and sounds (the model is shown a short text for each)")
    return replaced


def _why_not(ignored: Ignored) -> str:
    if ignored.images == "show":
        urls = "" if ignored.image_urls else ", which --image-urls would change"
        return (
            "the model reads text and images, and can't be shown this. Images are shown in messages of the "
            f"user and results of tools, as base64 data; the server fetches nothing{urls}. Leave it out, or "
            "send an image's data."
        )
    return (
        "the model reads text and can't be shown this; the server fetches nothing, either. "
        "Leave it out, or describe it in words (--images placeholder puts a mark in its place)."
    )


#: Marks a list of messages or items whose images become text before they are checked.
TEXT_ONLY = BeforeValidator(as_text)


class WithImages(StrictModel):
    """Body whose messages may have images."""

    _image_sources: dict[str, ImageSource] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _take_images(self, info: ValidationInfo) -> WithImages:
        if isinstance(info.context, Ignored):
            self._image_sources = info.context.sources
        return self

    @property
    def image_sources(self) -> dict[str, ImageSource]:
        """Its images by the keys of their marks."""
        return self._image_sources


def _latest_words(messages: Sequence[Any]) -> list[int]:
    """Return indices of the messages of the user's last turn, without messages of tool results."""
    words: list[int] = []
    before = ""
    for index, message in enumerate(messages):
        speaker = _speaker(message) if isinstance(message, dict) else ""
        if speaker == "user" and before != "tool":
            words = [*words, index] if before == "user" else [index]
        if speaker and not (speaker == "user" and before == "tool"):
            before = speaker
    return words


def _speaker(message: Json) -> str:
    """Return the speaker of a message: `user`, `assistant`, or `tool`; empty for the system."""
    kind, role, content = message.get("type"), message.get("role"), message.get("content")
    has_results = isinstance(content, list) and any(
        isinstance(block, dict) and block.get("type") == "tool_result" for block in content
    )
    if has_results or role in ("tool", "function") or str(kind).endswith("_output"):
        return "tool"
    if role == "user":
        return "user"
    return "" if role in ("system", "developer") else "assistant"


def _shows(message: Any, ignored: Ignored) -> bool:
    """Return True for a message or an item whose images are shown."""
    if ignored.images != "show" or not isinstance(message, dict):
        return False
    kind, role = message.get("type"), message.get("role")
    return all(name is None or isinstance(name, str) for name in (kind, role)) and (
        kind in _SHOWING_ITEMS and role in _SHOWING_ROLES
    )


class _Media:
    """Media of one message or item.

    Args:
        ignored: the body's context; its `sources` get the images that are shown.
        is_latest: the message belongs to the user's latest words.
        shows: its images are shown.

    Attributes:
        places: of what is replaced by words, and could not be shown.
        num_shown: number of its images that are shown.
    """

    def __init__(self, ignored: Ignored, *, is_latest: bool, shows: bool) -> None:
        self._ignored = ignored
        self._is_latest = is_latest
        self._shows = shows
        self.places: list[str] = []
        self.num_shown = 0

    def replaced(self, value: Any, path: str) -> Any:
        """Return a message, item, part or list of these with text in place of media.

        A copy where something was replaced. O(parts).
        """
        if isinstance(value, list):
            items = [self.replaced(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return items if any(one is not other for one, other in zip(items, value, strict=True)) else value
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if isinstance(kind, str) and kind in _KINDS and not _is_text(value):
            return {
                **_kept(value),
                "type": "text",
                "text": self._mark(value, path) or self._words(value, path),
            }
        if kind == "image_generation_call" and isinstance(value.get("result"), str):
            mark = self._mark({"type": "image", "data": value["result"]}, f"{path}.result")
            if not mark:
                self.places.append(f"{path}.result")
            return {**value, "result": mark or placeholder("image", value["result"])}
        changed = {
            name: new
            for name in _PARTS
            if isinstance(value.get(name), list | dict)
            and (new := self.replaced(value[name], f"{path}.{name}")) is not value[name]
        }
        return {**value, **changed} if changed else value

    def _mark(self, part: Json, path: str) -> str:
        """Return the mark of an image that is shown, and note its source; empty: it is not shown."""
        if not self._shows or part["type"] not in IMAGE_KINDS:
            return ""
        source = _source(part, path, is_latest=self._is_latest)
        if source is None or (source.is_address and not self._ignored.image_urls):
            return ""
        self.num_shown += 1
        return self._ignored.sources.setdefault(source.key, source).mark

    def _words(self, part: Json, path: str) -> str:
        """Return the words for a medium that is not shown."""
        self.places.append(path)
        content = next(_contents(part), None)
        if content is None:
            raise ParamError(f"{path}: a part of type {part['type']!r} needs its content.", path)
        title = part.get("title")
        reads = "text and images" if self._ignored.images == "show" else "text"
        text = placeholder(_KINDS[part["type"]], content, reads)
        return f"{title}\n{text}" if isinstance(title, str) and title else text


def _source(part: Json, path: str, *, is_latest: bool) -> ImageSource | None:
    """Return the source of an image in a part or block; None: its data is not there.

    Raises:
        ParamError: an unknown `detail`.
    """
    found = image_data(part)
    if found is None:
        return None
    if found.detail not in DETAILS:
        raise ParamError(f"{path}: detail must be one of {', '.join(DETAILS)}.", path)
    return ImageSource(found.data, cast(Detail, found.detail), path, is_latest)


def _is_text(part: Json) -> bool:
    """Return True for a document of text."""
    source = part.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def _kept(part: Json) -> Json:
    """Return the fields of a part that stay with its text: cache controls."""
    return {name: part[name] for name in ("cache_control", "prompt_cache_breakpoint") if name in part}


def _contents(part: Json) -> Iterator[str]:
    """Return names of a part's content, the best first."""
    for place in (part, *(part[name] for name in _NESTED if isinstance(part.get(name), dict))):
        yield from (place[name] for name in _CONTENT if isinstance(place.get(name), str) and place[name])
