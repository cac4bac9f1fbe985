# SPDX-License-Identifier: Apache-2.0
"""Cause of a break in the tools of two prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from radixkv.observe.causes import Breaker, make_breaker
from radixkv.observe.embedded_json import canonical_schema
from radixkv.observe.text_difference import differences
from radixkv.observe.volatile_text import volatile_text

Tool = Mapping[str, Any]

_WARNS = re.compile(
    r"warn|caution|deprecat|rate.?limit|quota|remaining|unavailable|attention|achtung|advertencia|"
    r"avertissement|"
    r"avviso|aviso|atenção|внимание|предупрежд|注意|警告|경고|outdated|degraded|do not use|disabled|"
    r"notice|important|"
    r"\bnote\b|hinweis",
    re.I,
)


def tools_breaker(old: Sequence[Tool], new: Sequence[Tool]) -> Breaker | None:
    """Find the cause of a break in the tools; None: they are written alike. O(their size)."""
    if list(map(repr, old)) == list(map(repr, new)):  # tells orders of keys apart, and is quicker than JSON
        return None
    names = [[str(tool.get("name")) for tool in tools] for tools in (old, new)]
    if sorted(names[0]) != sorted(names[1]):
        added, removed = (
            ", ".join(name for name in some if name not in others) for some, others in (names[::-1], names)
        )
        first = next((one for one, other in zip(names[1], names[0], strict=False) if one != other), None)
        return make_breaker(
            "tools_changed", old=removed, new=added, tool=first or names[1][-1] if names[1] else ""
        )
    if names[0] != names[1]:
        at = next(i for i, (one, other) in enumerate(zip(*names, strict=True)) if one != other)
        return make_breaker("tools_reordered", old=names[0][at], new=names[1][at], tool=names[1][at])
    one, other = next(pair for pair in zip(old, new, strict=True) if _written(pair[0]) != _written(pair[1]))
    return _tool_breaker(one, other, str(other.get("name")))


def _written(tool: Tool) -> str:
    return json.dumps(tool, ensure_ascii=False, default=str)


def _tool_breaker(old: Tool, new: Tool, name: str) -> Breaker:
    if canonical_schema(old) == canonical_schema(new):
        return make_breaker("schema_keys_reordered", old=_written(old), new=_written(new), tool=name)
    for path, one, other in _leaves(old, new):
        return _leaf_breaker(path, one, other, name)
    return make_breaker("tools_changed", "a tool that is declared otherwise", tool=name)


def _leaves(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the places in two values where their texts differ: the keys that lead there, and both texts."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in new:
            if key in old:
                yield from _leaves(old[key], new[key], (*path, str(key)))
        if set(old) != set(new):
            changed = sorted(map(str, set(old) ^ set(new)))
            gone, come = (", ".join(key for key in changed if key in some) for some in (old, new))
            yield path, gone, come
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            yield from _leaves(one, other, path)
    elif old != new:
        texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in (old, new)]
        yield path, texts[0], texts[1]


def _leaf_breaker(path: tuple[str, ...], old: str, new: str, name: str) -> Breaker:
    if "".join(old.split()) == "".join(new.split()):
        return make_breaker("whitespace", old=old, new=new, tool=name)
    label = " ".join(path[-2:]) + ": "  # the keys say what a value is
    found = differences(label + old, label + new)
    known = volatile_text(found[0])
    if known is not None:
        return make_breaker(known.kind, known.what, found[0].old_part, found[0].new_part, name)
    if any("example" in key.lower() for key in path):
        return make_breaker("examples", old=old, new=new, tool=name)
    if path[-1:] == ("description",):
        one_way = all(not place.old_part.strip() for place in found) or all(
            not place.new_part.strip() for place in found
        )
        parts = " ".join(place.old_part + place.label + place.new_part for place in found)
        if one_way or _WARNS.search(parts):
            return make_breaker("tool_warning", old=found[0].old_part, new=found[0].new_part, tool=name)
    return make_breaker("unknown", old=found[0].old_part, new=found[0].new_part, tool=name)
