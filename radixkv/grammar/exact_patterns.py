# SPDX-License-Identifier: Apache-2.0
r"""Patterns of a JSON Schema in a form that llguidance enforces exactly.

A pattern is compiled over unescaped text and then quoted for JSON, class by class. A class with all control
characters, or with all but the newline, gets all escapes, `\"` and `\\` among them, even where it excludes
`"` or `\`: `^[^"]+$` would accept `a"`. No class has all control characters once NUL is taken out of it, nor
has what llguidance makes of several classes. Only classes that lack one of the two marks need that. These
patterns never write NUL itself then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from radixkv.grammar.escaped_regex import Atom, rewrite_atoms
from radixkv.text.closed_objects import follow_pointer

_NUL = "\0"
_MARKS = frozenset('"\\')
#: Keywords whose values are data if they have the form of data.
_DATA: dict[str, type] = {"const": object, "enum": list, "default": object, "examples": list}
#: Keywords whose values are schemas by name.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def exact_pattern(pattern: str) -> str:
    r"""Return the same regular expression, without NUL where a class lacks `"` or `\`. O(length).

    >>> print(exact_pattern('^[^"]+[a-z].$'))
    ^[[^"]&&[^\x00]]+[a-z].$

    Raises:
        ValueError: a flag or a class that is not understood.
    """
    if not _may_need_it(pattern):
        return pattern
    return rewrite_atoms(pattern, "", _without_nul)


def _may_need_it(pattern: str) -> bool:
    """Return False for a pattern of letters, digits and plain classes."""
    return any(sign in pattern for sign in ("\\", "[", _NUL))


def _without_nul(source: str, atom: Atom) -> str:
    if atom.members is None or _NUL not in atom.members or atom.members >= _MARKS:
        return source
    return f"[{source if source.startswith('[') else f'[{source}]'}&&[^\\x00]]"


def exact_patterns(schema: str) -> str:
    """Return the text of a JSON Schema with all its patterns in their exact form. O(size).

    Text that is no JSON object stays as it is.

    Raises:
        ValueError: a pattern that is not understood, or a $ref to data that has patterns; names the keyword.
    """
    if "attern" not in schema and "\\u" not in schema:
        return schema
    try:
        root = json.loads(schema)
    except (ValueError, RecursionError):
        return schema
    patterns = _SchemaPatterns(root)
    return json.dumps(patterns.root) if patterns.rewrite() else schema


class _SchemaPatterns:
    def __init__(self, root: Any) -> None:
        self.root = root
        self._seen: set[int] = set()
        self._references: list[str] = []
        self._has_changed = False

    def rewrite(self) -> bool:
        """Rewrite all patterns in place; return whether one has changed."""
        self._walk(self.root)
        for reference in self._references:
            target = follow_pointer(self.root, "#" + reference.rpartition("#")[2])
            if isinstance(target, dict) and id(target) not in self._seen and _has_pattern(target):
                raise ValueError(f"$ref: {reference:.80} leads to data, which is no schema")
        return self._has_changed

    def _walk(self, schema: Any) -> None:
        stack = [schema]
        while stack:
            value = stack.pop()
            if isinstance(value, list):
                stack.extend(value)
            elif isinstance(value, dict):
                self._seen.add(id(value))
                self._rewrite(value)
                stack.extend(_inside(value))

    def _rewrite(self, schema: dict[str, Any]) -> None:
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = self._exact("pattern", schema["pattern"])
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict):
            exact = {self._exact("patternProperties", name): value for name, value in patterns.items()}
            if len(exact) < len(patterns):
                raise ValueError("patternProperties: two of its patterns match the same names")
            schema["patternProperties"] = exact
        for name in ("$ref", "$dynamicRef"):
            if isinstance(schema.get(name), str):
                self._references.append(schema[name])

    def _exact(self, keyword: str, pattern: str) -> str:
        try:
            exact = exact_pattern(pattern)
        except ValueError as error:
            raise ValueError(f"{keyword}: {error}") from None
        self._has_changed |= exact != pattern
        return exact


def _inside(schema: dict[str, Any]) -> Iterator[Any]:
    """Values of a schema that may be schemas or hold some."""
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            yield from value.values()
        elif not (name in _DATA and isinstance(value, _DATA[name])):
            yield value


def _has_pattern(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if "pattern" in item or "patternProperties" in item:
                return True
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return False
