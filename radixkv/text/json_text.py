# SPDX-License-Identifier: Apache-2.0
"""Objects that are printed as the JSON text they were read from.

A chat template prints the arguments of a tool call as JSON in its own spacing. The model's own text, which
the cache holds, may be spaced otherwise; a `JsonText` in a message is printed unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import from_json

#: Draws a name that no text can know.
_NAME_BYTES = 12


class JsonText(dict[str, Any]):
    """A JSON object with the text it was read from; to a template it is a mapping like any other.

    Attributes:
        text: the JSON text.
    """

    __slots__ = ("text",)

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


def read_json_text(text: str, *, may_be_cut: bool = False) -> Any:
    """Return the value of a JSON text; an object remembers its text unless all templates print the same.

    >>> read_json_text('{"a": 1}'), type(read_json_text('{"a":1}')).__name__
    ({'a': 1}, 'JsonText')

    Args:
        may_be_cut: the text may also be the beginning of an object, more than its brace: a call's arguments
            of an answer that reached its longest.

    Raises:
        ValueError, RecursionError: not JSON, or nested too deep.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = from_json(text, allow_partial="trailing-strings") if may_be_cut else None
        if not isinstance(value, dict) or text.strip() == "{":
            raise
    if isinstance(value, dict) and not (text.isascii() and json.dumps(value, ensure_ascii=False) == text):
        return JsonText({**value, **_member_texts(value, text)}, text)
    return value


def _member_texts(value: Mapping[str, Any], text: str) -> dict[str, JsonText]:
    """Return the members that are objects with the texts they were read from. O(text)."""
    found: dict[str, JsonText] = {}
    if not any(isinstance(member, dict) for member in value.values()):
        return found
    decoder = json.JSONDecoder()
    at = text.index("{") + 1
    try:
        while True:
            key, at = decoder.raw_decode(text, _skip(text, at, ","))
            start = _skip(text, at, ":")
            member, at = decoder.raw_decode(text, start)
            if isinstance(member, dict):
                found[key] = JsonText(member, text[start:at])
    except (ValueError, RecursionError):  # at its end, which may be cut off
        return {key: member for key, member in found.items() if value.get(key) == member}


_BLANKS = re.compile(r"\s*")


def _skip(text: str, at: int, separator: str) -> int:
    """Return the place after white space with a separator in it."""
    at = _BLANKS.match(text, at).end()  # type: ignore[union-attr]
    return _BLANKS.match(text, at + text.startswith(separator, at)).end()  # type: ignore[union-attr]


def render_json_texts(value: Any, render: Callable[[Any], str]) -> str:
    """Render data so that each JsonText in it is printed as its text, where it is printed as JSON at all.

    Args:
        value: JSON-like data.
        render: called with data of plain mappings. Where it takes one apart instead of printing it as JSON,
            it is called again, and its own result stands. O(data + result).
    """
    name = f"json-{secrets.token_hex(_NAME_BYTES)}-"
    texts: list[str] = []
    named = _with_names(value, name, texts)
    if texts:
        rendered = _with_texts(render(named), name, texts)
        if rendered is not None:
            return rendered
        texts.clear()
        inner = _with_names(value, name, texts, is_inner=True)
        rendered = _with_texts(render(inner), name, texts) if texts else None
        if rendered is not None:
            return rendered
    return render(value)


def _with_names(value: Any, name: str, texts: list[str], *, is_inner: bool = False) -> Any:
    """Copy data so that each JsonText begins with a member of its own name.

    Args:
        is_inner: only one within another has a name.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (dict, Mapping)):
        has_name = isinstance(value, JsonText) and not is_inner
        inside = is_inner and not isinstance(value, JsonText)
        members = {key: _with_names(item, name, texts, is_inner=inside) for key, item in value.items()}
        if not isinstance(value, JsonText) or not has_name:
            return members
        texts.append(value.text)
        return {f"{name}{len(texts) - 1}.": 0, **members}
    if isinstance(value, list | tuple):
        return [_with_names(item, name, texts, is_inner=is_inner) for item in value]
    return value


def _with_texts(rendered: str, name: str, texts: list[str]) -> str | None:
    """Replace each named object by its text; None: a name stands outside of a JSON object."""
    decoder = json.JSONDecoder()
    pieces = []
    last = 0
    while (at := rendered.find(name, last)) >= 0:
        start = rendered.rfind("{", last, at)
        try:
            value, end = decoder.raw_decode(rendered, start if start >= 0 else len(rendered))
        except (ValueError, RecursionError):
            return None
        number = rendered[at + len(name) : rendered.index(".", at)]
        if next(iter(value), None) != f"{name}{number}." or not number.isdecimal():
            return None
        pieces += [rendered[last:start], texts[int(number)]]
        last = end
    return "".join([*pieces, rendered[last:]])
