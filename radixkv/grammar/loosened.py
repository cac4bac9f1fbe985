# SPDX-License-Identifier: Apache-2.0
"""Leave free the parts that can't be compiled in schemas that are enforced only as far as possible.

Such schemas, of tools that are not strict, carry llguidance's option `lenient`. That drops unknown keywords;
a pattern with a look-around, a broken `$ref` or a `maximum` without digits still fails the whole grammar, and
with it the schemas of all other tools. `find_drops` builds each lenient schema that fails up again, from the
empty one: halves that compile are kept whole, single keywords that do not are dropped.

A place is the number of a schema in the grammar and a path in it. What stands in place of a dropped part
never forbids what the schema allows: no keyword, or the schema that allows everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.grammar.limits import json_parts_of_lark

#: Number of a schema in a grammar, and keys and indices that lead to a part of it.
Place = Sequence[str | int]
#: Tries for all schemas of a grammar; after that, the rest of a schema is dropped whole.
MAX_TRIES = 400

#: Keywords whose values are schemas by name; a dropped name would become an unlisted one.
_NAMED = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_ONE = frozenset({"items", "additionalProperties", "additionalItems", "unevaluatedItems", "then", "else"})
#: Keywords that forbid unlisted parts, and the keywords that list parts: if one of these is dropped, so are
#: the former.
_UNLISTED = ("additionalProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems")
_LISTING = frozenset(
    {"properties", "patternProperties", "prefixItems", "items", "$ref", "$dynamicRef"} | (_LISTED - {"oneOf"})
)


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A JSON Schema in a Lark grammar: its number there, its place in the text, and its content."""

    number: int
    begin: int
    end: int
    schema: Any


def schemas_of_lark(grammar: str, *, lenient: bool) -> list[SchemaPart]:
    """Return the schemas in a Lark grammar that are enforced as far as possible, or those enforced in full.

    None of a grammar that is no Lark.
    """
    try:
        return [
            SchemaPart(number, begin, end, schema)
            for number, (begin, end) in enumerate(json_parts_of_lark(grammar))
            if _is_lenient(schema := json.loads(grammar[begin:end])) == lenient
        ]
    except (ValueError, RecursionError):
        return []


def _is_lenient(schema: Any) -> bool:
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and bool(options.get("lenient"))


def without(grammar: str, drops: Iterable[Place]) -> str:
    """Return a Lark grammar with some parts of its schemas left free. O(size).

    Lines keep their numbers where each schema is in one line.
    """
    by_number: dict[int, list[Place]] = {}
    for drop in drops:
        by_number.setdefault(int(drop[0]), []).append(drop[1:])
    written, done = [], 0
    for part in schemas_of_lark(grammar, lenient=True):
        if part.number in by_number:
            schema = part.schema
            for path in by_number[part.number]:
                schema = _without(schema, path)
            written += [grammar[done : part.begin], json.dumps(schema)]
            done = part.end
    return "".join([*written, grammar[done:]])


def _without(schema: Any, path: Place) -> Any:
    """Return a schema with one part left free."""
    if not path:
        kept = (
            {name: value for name, value in schema.items() if _is_kept(name, value)}
            if _is_lenient(schema)
            else {}
        )
        return kept
    name, rest = path[0], path[1:]
    if name not in schema:
        return schema  # dropped beside another one
    if name in _NAMED and rest:
        named = {**schema[name], rest[0]: _without(schema[name][rest[0]], rest[1:])}
        return {**schema, name: named}
    if name in _LISTED and rest:
        listed = list(schema[name])
        listed[int(rest[0])] = _without(listed[int(rest[0])], rest[1:])
        return {**schema, name: listed}
    if rest:
        return {**schema, name: _without(schema[name], rest)}
    dropped = {name, *(_UNLISTED if name in _LISTING else ())}
    return {key: value for key, value in schema.items() if key not in dropped}


def _is_kept(name: str, value: Any) -> bool:
    """Return whether a keyword of a whole schema always stays: arguments are an object."""
    return name == "x-guidance" or (name == "type" and value == "object")


def find_drops(grammar: str, compiles: Callable[[str], bool]) -> list[Place]:
    """Return the places in the lenient schemas of a Lark grammar that keep it from being compiled.

    Args:
        compiles: tells whether a grammar can be compiled; called `MAX_TRIES` times at most.
    """
    tries = _Tries(compiles)
    return [
        [part.number, *path]
        for part in schemas_of_lark(grammar, lenient=True)
        for path in tries.drops(part.schema)
    ]


def find_fault(grammar: str, compiles: Callable[[str], bool]) -> tuple[SchemaPart, Place] | None:
    """Return the first schema enforced in full that can't be compiled, and the path to its first fault."""
    for part in schemas_of_lark(grammar, lenient=False):
        drops = _Tries(compiles).drops(part.schema)
        if drops:
            return part, drops[0]
    return None


class _Tries:
    """Search for the parts of schemas that can't be compiled."""

    def __init__(self, compiles: Callable[[str], bool]) -> None:
        self._compiles = compiles
        self._num_left = MAX_TRIES

    def drops(self, schema: Any) -> list[Place]:
        if self._works(schema, []):
            return []
        parts = list(_parts(schema, []))
        wrong = self._wrong(schema, parts, [])
        return wrong if wrong is not None and self._works(schema, wrong) else [[]]

    def _works(self, schema: Any, drops: Sequence[Place]) -> bool:
        self._num_left -= 1
        if self._num_left < 0:
            return False
        for path in drops:
            schema = _without(schema, path)
        return self._compiles(f"start: %json {json.dumps(schema)}")

    def _wrong(self, schema: Any, parts: list[Place], others: list[Place]) -> list[Place] | None:
        """Return which of the parts to drop, while the others are dropped; None: that does not suffice."""
        if self._works(schema, others):
            return []
        if not self._works(schema, [*parts, *others]):
            return None
        if len(parts) == 1:
            inside = list(_parts(_at(schema, parts[0]), parts[0]))
            wrong = self._wrong(schema, inside, others) if inside else None
            return wrong if wrong is not None else parts
        half = len(parts) // 2
        first = self._wrong(schema, parts[:half], [*parts[half:], *others])
        if first is None:
            return parts
        second = self._wrong(schema, parts[half:], [*first, *others])
        return [*first, *second] if second is not None else parts


def _at(schema: Any, path: Place) -> Any:
    for key in path:
        schema = schema[key]
    return schema


def _parts(value: Any, path: Place) -> Iterator[Place]:
    """Yield the places just inside a place; each can be left free by itself."""
    if path and path[-1] in _NAMED and isinstance(value, dict):
        yield from ([*path, name] for name in value)
    elif path and path[-1] in _LISTED and isinstance(value, list):
        yield from ([*path, i] for i in range(len(value)))
    elif isinstance(value, dict) and _is_schema(path):
        # `required` first: of it and a property that nothing matches, the property is left free.
        names = sorted(value, key=lambda name: name != "required")
        yield from ([*path, name] for name in names if path or not _is_kept(name, value[name]))


def _is_schema(path: Place) -> bool:
    """Return whether the schema's part at a place is a schema."""
    at = 0
    while at < len(path):
        name = path[at]
        if name in _NAMED or name in _LISTED:
            at += 2
        elif name in _ONE:
            at += 1
        else:
            return False
    return at == len(path)
