# SPDX-License-Identifier: Apache-2.0
"""Images, files and sounds in messages: refused, or replaced by a short text before a body is checked.

The models served here read text. Clients send their whole history again with each turn, so one image that is
refused there ends a session for good. `--images` decides:

                the user's latest words     results of tools, and all before these words
    auto        refused                     replaced, and the header `warning` says so
    placeholder replaced, with the warning  likewise
    refuse      refused                     refused

The user's latest words are the messages of the user's last turn. Messages that follow results of tools in the
same turn belong to these results: clients add the images of a result that way. The text is a function of the
content alone, so that a later turn finds its prompt in the cache. Nothing is fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from radixkv_server.dialect import Json
from radixkv_server.http.body import ParamError
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
# Members of messages, items, results and documents that hold parts.
_PARTS = ("content", "output", "outputs", "source")


def placeholder(kind: str, content: str) -> str:
    """Return the text that stands for an image or another medium.

    Args:
        content: its data, or its address. The query of an address is ignored: signatures change each time.
    """
    named = content.partition(";base64,")[2] or content
    if named.startswith(("http://", "https://")):
        named = named.partition("?")[0]
    digest = hashlib.sha256(named.encode("utf-8", "replace")).hexdigest()[:8]
    return f"[{kind} {digest}: not shown, this model reads text]"


def _as_text_only(messages: Any, info: ValidationInfo) -> Any:
    """Return the messages or items of a body with text in place of all media.

    Raises:
        ParamError: one that is refused, or without content.
    """
    if not isinstance(messages, list):
        return messages
    replaced, found = [], []
    for index, message in enumerate(messages):
        places: list[str] = []
        replaced.append(_replaced(message, f"{info.field_name}[{index}]", places))
        found += [(index, place) for place in places]
    if not found:
        return messages
    ignored = info.context if isinstance(info.context, Ignored) else Ignored()
    latest = _latest_words(messages)
    for index, place in found:
        if ignored.images == "refuse":
            raise ParamError(
                f"{place}: the model reads text, and this server refuses images, files and sounds "
                "(--images refuse).",
                place,
                "unsupported_content",
            )
        if ignored.images == "auto" and index in latest:
            raise ParamError(
                f"{place}: the model reads text and can't be shown this; the server fetches nothing, either. "
                "Leave it out, or describe it in words (--images placeholder puts a mark in its place).",
                place,
                "unsupported_content",
            )
    ignored.note_part("images, files and sounds (the model is shown a short text for each)")
    return replaced


#: Marks a list of messages or items whose images become text before they are checked.
TEXT_ONLY = BeforeValidator(_as_text_only)


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


def _replaced(value: Any, path: str, places: list[str]) -> Any:
    """Return a message, item, part or list of these without media; their places are added to `places`.

    A copy where something was replaced. O(parts).
    """
    if isinstance(value, list):
        items = [_replaced(item, f"{path}[{index}]", places) for index, item in enumerate(value)]
        return items if any(one is not other for one, other in zip(items, value, strict=True)) else value
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and kind in _KINDS and not _is_text(value):
        places.append(path)
        return {**_kept(value), "type": "text", "text": _shown(_KINDS[kind], value, path)}
    if kind == "image_generation_call" and isinstance(value.get("result"), str):
        places.append(f"{path}.result")
        return {**value, "result": placeholder("image", value["result"])}
    changed = {
        name: new
        for name in _PARTS
        if isinstance(value.get(name), list | dict)
        and (new := _replaced(value[name], f"{path}.{name}", places)) is not value[name]
    }
    return {**value, **changed} if changed else value


def _is_text(part: Json) -> bool:
    """Return True for a document of text."""
    source = part.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def _kept(part: Json) -> Json:
    """Return the fields of a part that stay with its text: cache controls."""
    return {name: part[name] for name in ("cache_control", "prompt_cache_breakpoint") if name in part}


def _shown(kind: str, part: Json, path: str) -> str:
    content = next(_contents(part), None)
    if content is None:
        raise ParamError(f"{path}: a part of type {part['type']!r} needs its content.", path)
    title = part.get("title")
    text = placeholder(kind, content)
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _contents(part: Json) -> Iterator[str]:
    """Return names of a part's content, the best first."""
    for place in (part, *(part[name] for name in _NESTED if isinstance(part.get(name), dict))):
        yield from (place[name] for name in _CONTENT if isinstance(place.get(name), str) and place[name])
