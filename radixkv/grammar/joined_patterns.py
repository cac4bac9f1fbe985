# SPDX-License-Identifier: Apache-2.0
"""Count the patterns of a JSON Schema that one string has to match at once.

llguidance asks whether such an intersection is empty, and that takes a time exponential in their number: a
dozen can take seconds, two dozen hours. Where a short text matches all of them it answers at once, and a mask
in a longer one does not end, which a trial does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from radixkv.text.closed_objects import follow_pointer

_BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")
_ELSEWHERE = ("items", "prefixItems", "additionalProperties", "unevaluatedProperties", "additionalItems")


#: Weight of a keyword, `pattern` or `format`, by its value.
Counted = Callable[[str, str], float]


def joined_patterns(schema: Any, counted: Counted) -> float:
    """Return an upper bound of the weight of patterns and formats for one string. O(size of the schema).

    Alternatives do not add up; members of `allOf` and siblings of a `$ref` do, wherever their patterns are.

    Raises:
        RecursionError: references lead too deep.
    """
    return _Schema(schema, counted).weight(schema)


class _Schema:
    """Schema whose parts are each weighed once."""

    def __init__(self, root: Any, counted: Counted) -> None:
        self._root = root
        self._counted = counted
        self._known: dict[int, float] = {}
        self._named: dict[str, list[Any]] | None = None

    def weight(self, schema: Any) -> float:
        if not isinstance(schema, Mapping):
            return 0.0
        known = self._known.get(id(schema))
        if known is None:
            self._known[id(schema)] = 0.0  # where a reference leads back here, this is being counted already
            known = self._known[id(schema)] = self._weight(schema)
        return known

    def _weight(self, schema: Mapping[str, Any]) -> float:
        own = sum(
            self._counted(name, schema[name])
            for name in ("pattern", "format")
            if isinstance(schema.get(name), str)
        )
        inside = self._heaviest(_inside(schema))
        patterns = schema.get("patternProperties")
        if isinstance(patterns, Mapping):
            inside += self._heaviest(patterns.values())
        together = schema.get("allOf")
        met = sum(map(self.weight, together)) if isinstance(together, list) else 0
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                met += self._heaviest(schema[name])
        for name in ("$ref", "$dynamicRef"):
            if isinstance(schema.get(name), str):
                met += sum(map(self.weight, self._referenced(schema[name])))
        return max(own, inside) + met

    def _heaviest(self, schemas: Iterable[Any]) -> float:
        return max(map(self.weight, schemas), default=0.0)

    def _referenced(self, reference: str) -> list[Any]:
        """Return the target of a reference, or all possible ones if it is a name."""
        if reference != "#" and not reference.startswith("#/"):
            if self._named is None:
                self._named = _by_name(self._root)
            return self._named.get(reference.rpartition("#")[2], [])
        return [follow_pointer(self._root, reference)]


def _inside(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of a value's parts, one for each part, and definitions."""
    for name in _BY_NAME:
        if isinstance(schema.get(name), Mapping):
            yield from schema[name].values()
    for name in _ELSEWHERE:
        value = schema.get(name)
        yield from value if isinstance(value, list) else (value,)


def _by_name(root: Any) -> dict[str, list[Any]]:
    """Return the schemas with an anchor or an id, by that name."""
    found: dict[str, list[Any]] = {}
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            for name in ("$anchor", "$dynamicAnchor", "$id"):
                if isinstance(value.get(name), str):
                    found.setdefault(value[name].rpartition("#")[2], []).append(value)
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return found
