# SPDX-License-Identifier: Apache-2.0
"""JSON inside of texts: the same values written otherwise, and the tools that a prompt shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from radixkv.text.safe_text import without_surrogates

_DECODER = json.JSONDecoder()
_MAX_VALUES = 2000
#: Lists in schemas whose order says nothing.
_SETS = ("required", "enum", "type")


def values_in(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the outermost JSON objects and lists of a text: begin, end, value.

    O(text), or some thousand times that if much of it only looks like JSON.
    """
    at = count = 0
    while count < _MAX_VALUES:
        starts = [found for found in (text.find("{", at), text.find("[", at)) if found >= 0]
        if not starts:
            return
        start = min(starts)
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            at = start + 1
        else:
            yield start, end, without_surrogates(value) if "\\" in text[start:end] else value
            at = end
        count += 1


def canonical_text(text: str) -> str:
    """Return a text with its JSON objects written in one way: keys sorted, no blanks, no escapes."""
    pieces, at = [], 0
    for start, end, value in values_in(text):
        if value:
            pieces += [text[at:start], canonical(value)]
            at = end
    return "".join([*pieces, text[at:]])


def canonical(value: Any) -> str:
    """Return a value as JSON, written in one way: keys sorted, no blanks."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def canonical_schema(value: Any) -> str:
    """Return a schema as JSON, written in one way: keys and lists of names sorted."""
    return canonical(_without_order(value, ""))


def _without_order(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_order(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_without_order(item, "") for item in value]
        return sorted(items, key=canonical) if name in _SETS else items
    return value


def tools_in(text: str) -> list[Mapping[str, Any]]:
    """Return the tools that a prompt shows as JSON, in order: name, description and parameters of each."""
    found = []
    for _, _, value in values_in(text):
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function", one) if isinstance(one, Mapping) else None
            if (
                isinstance(function, Mapping)
                and isinstance(function.get("name"), str)
                and ("parameters" in function or "input_schema" in function)
            ):
                found.append(function)
    return found
