# SPDX-License-Identifier: Apache-2.0
"""Types of arguments by a tool's schema, and the JSON of values that were written as text.

A schema is a list of alternatives, each of them keywords that hold together, with references followed:

    {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/mode"}]}     type: integer  |  enum: [fast, slow]

The readers of arguments and the rules of their grammar ask the same alternatives.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from radixkv.text.closed_objects import follow_reference

_ALL = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"([+-]?)0*(\d+)(?:\.0*)?")
_FLOAT = re.compile(r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,3})?")
_MAX_NESTED = 16
_MAX_ALTERNATIVES = 128
#: Alternatives where several lists of them are combined.
_MAX_COMBINED = 32
#: Schemas that are looked at for the alternatives of one.
_MAX_LOOKED_AT = 1_000
#: Time for a pattern of `patternProperties` to be found in a name: patterns come from outside.
_MAX_PATTERN_S = 0.005
#: Keywords of bounds by type: how a value, or its size, is compared with the bound.
_BOUNDS: Mapping[str, Mapping[str, Callable[[Any, Any], bool]]] = {
    "number": {
        "minimum": operator.ge,
        "maximum": operator.le,
        "exclusiveMinimum": operator.gt,
        "exclusiveMaximum": operator.lt,
        "multipleOf": lambda value, step: step > 0 and value % step == 0,
    },
    "string": {"minLength": operator.ge, "maxLength": operator.le},
    "array": {"minItems": operator.ge, "maxItems": operator.le},
}
#: How true, false and null are written.
JSON_WORDS = ("true", "false", "null")

Keywords = Mapping[str, Any]


@dataclass(frozen=True)
class Alternative:
    """Schemas that hold together, without references and combinations.

    Args:
        parts: JSON Schemas; a `$ref` that is left in one leads nowhere.
    """

    parts: tuple[Keywords, ...]

    @cached_property
    def types(self) -> frozenset[str]:
        """Return the names of the types that all parts allow; a number may be an integer."""
        found = _ALL
        for part in self.parts:
            given = part.get("type")
            names = {given} if isinstance(given, str) else set(given if isinstance(given, list) else _ALL)
            if "number" in names:
                names.add("integer")
            if part.get("nullable") is True:
                names.add("null")
            values = _listed(part)
            if values is not None:
                names &= {_type_of(value) for value in values}
            found &= names & _ALL or (frozenset() if values is not None else _ALL)
        if found == _ALL and self.gather("properties"):
            return frozenset({"object"})
        return found

    @cached_property
    def values(self) -> list[Any] | None:
        """Return the only values that the parts allow; None: they list none."""
        lists = [values for part in self.parts if (values := _listed(part)) is not None]
        if not lists:
            return None
        return [value for value in lists[0] if all(_is_in(value, others) for others in lists[1:])]

    def gather(self, keyword: str) -> list[Any]:
        """Return the values of a keyword in all parts."""
        return [part[keyword] for part in self.parts if keyword in part]

    def names(self) -> list[str]:
        """Return the names of the listed properties, in their order."""
        listed = (part for part in self.gather("properties") if isinstance(part, Mapping))
        return list(dict.fromkeys(name for part in listed for name in part))

    def member(self, name: str) -> list[Any]:
        """Return the schemas that together describe a property; none: nothing is said of it."""
        found: list[Any] = []
        for part in self.parts:
            listed, patterns = part.get("properties"), part.get("patternProperties")
            own = [listed[name]] if isinstance(listed, Mapping) and name in listed else []
            if isinstance(patterns, Mapping):
                own += [value for pattern, value in patterns.items() if _is_found(pattern, name)]
            if not own and "additionalProperties" in part:
                own = [part["additionalProperties"]]
            found += own
        return found


@dataclass(frozen=True)
class ArgumentSchema:
    """A JSON Schema in the document that its references mean.

    Args:
        schema: an object; anything else but `false` allows everything.
        root: the document; None: the schema itself.
    """

    schema: Any
    root: Any = None

    @cached_property
    def _found(self) -> tuple[list[Alternative], bool]:
        document = self.schema if self.root is None else self.root
        try:
            return _Alternatives(document).of(self.schema, _MAX_NESTED)
        except _TooManyAlternatives:
            return [Alternative(())], True

    @property
    def alternatives(self) -> list[Alternative]:
        """Return the ways to fulfil the schema; none: nothing does. At most `_MAX_ALTERNATIVES`."""
        return self._found[0]

    @property
    def is_ambiguous(self) -> bool:
        """Return whether a value may match several alternatives of a `oneOf`, or there are too many."""
        return self._found[1]

    @cached_property
    def _types(self) -> frozenset[str]:
        return frozenset().union(*(way.types for way in self.alternatives)) or _ALL

    @cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(name for way in self.alternatives for name in way.names())

    @cached_property
    def _items(self) -> ArgumentSchema:
        found = [item for way in self.alternatives for item in way.gather("items")]
        found += [item for way in self.alternatives for items in way.gather("prefixItems") for item in items]
        return self.of(_any_of(found) if found else None)

    @cached_property
    def _known(self) -> dict[str, ArgumentSchema]:
        return {}

    def of(self, part: Any) -> ArgumentSchema:
        """Return a part of the schema in the same document."""
        return ArgumentSchema(part, self.schema if self.root is None else self.root)

    def properties(self) -> Iterable[str]:
        """Return the names of the properties that the schema lists, also in its alternatives."""
        return self._names

    def property(self, name: str, unlisted: Any = None) -> ArgumentSchema:
        """Return the schema of a property.

        Args:
            unlisted: the schema of a property that is not listed, where others are.
        """
        found = self._known.get(name)
        if found is None:
            members = (way.member(name) for way in self.alternatives)
            known = [_all_of(parts) for parts in members if parts and False not in parts]
            found = self.of(_any_of(known) if known else unlisted if self._names else None)
            self._known[name] = found
        return found

    def items(self) -> ArgumentSchema:
        """Return the schema of a list's items."""
        return self._items

    def types(self) -> frozenset[str]:
        """Return the names of the types that a value may have; a number may be an integer."""
        return self._types

    def is_text(self) -> bool:
        """Return whether nothing but a string is allowed."""
        return self._types == {"string"}

    def lists(self, text: str) -> bool:
        """Return whether a string is one of the values that the schema lists."""
        return any(
            "string" in way.types and way.values is not None and text in way.values
            for way in self.alternatives
        )

    def allows(self, value: Any) -> bool:
        """Return whether a value matches, as far as types, bounds, lists of values and members tell."""
        return any(self._fits(way, value) for way in self.alternatives)

    def _fits(self, way: Alternative, value: Any) -> bool:
        kind = _type_of(value)
        if kind not in way.types or not (way.values is None or _is_in(value, way.values)):
            return False
        size = len(value) if isinstance(value, str | list) else value
        for keyword, holds in _BOUNDS.get("number" if kind == "integer" else kind, {}).items():
            if not all(holds(size, bound) for bound in way.gather(keyword) if isinstance(bound, int | float)):
                return False
        if isinstance(value, list):
            return all(self.of(items).allows(item) for items in way.gather("items") for item in value)
        if isinstance(value, dict):
            required = (name for names in way.gather("required") for name in names)
            return all(name in value for name in required) and all(
                self.of(part).allows(item) for name, item in value.items() for part in way.member(name)
            )
        return True

    def standalone(self, schema: Any) -> Any:
        """Return a copy of a part of the document, with the targets of its references as definitions."""
        root = self.schema if self.root is None else self.root
        names: dict[str, str] = {}
        definitions: dict[str, Any] = {}

        def copied(part: Any) -> Any:
            if isinstance(part, list):
                return [copied(item) for item in part]
            if not isinstance(part, Mapping):
                return part
            written: dict[str, Any] = {}
            for keyword, value in part.items():
                if keyword in ("properties", "patternProperties") and isinstance(value, Mapping):
                    written[keyword] = {name: copied(item) for name, item in value.items()}
                elif keyword == "$ref" and follow_reference(root, value) is not None:
                    if value not in names:
                        names[value] = f"ref_{len(names)}"
                        definitions[names[value]] = copied(follow_reference(root, value))
                    written[keyword] = f"#/$defs/{names[value]}"
                elif keyword in ("const", "enum", "default", "examples"):
                    written[keyword] = value
                elif keyword not in ("$defs", "definitions", "$anchor"):
                    written[keyword] = copied(value)
            return written

        found = copied(schema)
        if isinstance(root, Mapping) and "$schema" in root:
            found["$schema"] = root["$schema"]
        return {**found, "$defs": definitions} if definitions else found


class _TooManyAlternatives(Exception):
    """More alternatives than are worth it."""


class _Alternatives:
    """Finds the alternatives of a schema in a document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_looked_at = 0

    def of(self, schema: Any, depth: int) -> tuple[list[Alternative], bool]:
        """Return the alternatives, and whether alternatives of a `oneOf` may overlap.

        Raises:
            _TooManyAlternatives: there are too many, or a reference leads back to itself.
        """
        if schema is False:
            return [], False
        if not isinstance(schema, Mapping):
            return [Alternative(())], False
        self._num_looked_at += 1
        if not depth or self._num_looked_at > _MAX_LOOKED_AT:
            raise _TooManyAlternatives
        own = dict(schema)
        together = own.pop("allOf") if isinstance(own.get("allOf"), list) else []
        target = follow_reference(self._root, own.get("$ref"))
        if target is not None:
            own.pop("$ref")
            together = [target, *together]
        found = [self.of(part, depth - 1) for part in together]
        found += [
            self._of_any(own.pop(keyword), depth - 1, excludes=keyword == "oneOf")
            for keyword in ("anyOf", "oneOf")
            if isinstance(own.get(keyword), list)
        ]
        factors = [[Alternative((own,) if own else ())], *(ways for ways, _ in found)]
        sizes = [len(ways) for ways in factors]
        if math.prod(sizes) > max(_MAX_COMBINED, *sizes):
            raise _TooManyAlternatives
        joined = (
            Alternative(tuple(part for way in ways for part in way.parts))
            for ways in itertools.product(*factors)
        )
        kept = [way for way in joined if way.types and way.values != []]
        return kept, any(is_ambiguous for _, is_ambiguous in found)

    def _of_any(self, parts: list[Any], depth: int, *, excludes: bool) -> tuple[list[Alternative], bool]:
        branches = [self.of(part, depth) for part in parts]
        ways = [way for branch, _ in branches for way in branch]
        if len(ways) > _MAX_ALTERNATIVES:
            raise _TooManyAlternatives
        is_ambiguous = any(overlap for _, overlap in branches) or (
            excludes
            and not all(
                _are_apart(one, other, self._root)
                for (some, _), (others, _) in itertools.combinations(branches, 2)
                for one, other in itertools.product(some, others)
            )
        )
        return ways, is_ambiguous


def _are_apart(one: Alternative, other: Alternative, root: Any) -> bool:
    """Return whether no value can match both: their types, their values or a required property tell."""
    if not one.types & other.types:
        return True
    if one.values is not None and other.values is not None:
        return not any(_is_in(value, other.values) for value in one.values)
    if one.types & other.types != {"object"}:
        return False
    needed = [{name for names in way.gather("required") for name in names} for way in (one, other)]
    for name in needed[0] & needed[1]:
        some, others = (ArgumentSchema(_all_of(way.member(name)), root).alternatives for way in (one, other))
        pairs = [(a.values, b.values) for a in some for b in others]
        if all(a is not None and b is not None and not any(_is_in(v, b) for v in a) for a, b in pairs):
            return True
    return False


def _all_of(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else {"allOf": parts}


def _any_of(parts: list[Any]) -> Any:
    kept = [part for i, part in enumerate(parts) if part not in parts[:i]]
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def _is_found(pattern: str, name: str) -> bool:
    """Return whether a pattern of property names is found in one."""
    try:
        return regex.search(pattern, name, timeout=_MAX_PATTERN_S) is not None
    except (regex.error, TimeoutError, RecursionError, OverflowError):
        return False


def _listed(part: Keywords) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    values = part.get("enum")
    return values if isinstance(values, list) else None


def _is_in(value: Any, values: list[Any]) -> bool:
    """Return whether a list has a value; True is not 1."""
    return any(value == other and isinstance(value, bool) is isinstance(other, bool) for other in values)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = ((str, "string"), (int, "integer"), (float, "number"), (dict, "object"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def string_json(text: str) -> str:
    """Return the JSON of a string."""
    return json.dumps(text, ensure_ascii=False)


def refuse_constant(name: str) -> Any:
    """Refuse NaN and the infinities, which `json` takes for numbers."""
    raise ValueError(f"{name} is not JSON")


def value_json(
    text: str,
    schema: ArgumentSchema,
    read_literal: Callable[[str], str | None] = lambda text: None,
    words: tuple[str, str, str] = JSON_WORDS,
) -> str:
    """Return the JSON of a value that was written as text, by its schema; what fits none of it is a string.

    Where the schema also allows strings, a text that it lists is a string, and so is one whose value it does
    not allow.

    Args:
        read_literal: the JSON of a text in another notation of objects and lists; None: it is none.
        words: how true, false and null are written, beside JSON's.
    """
    types = schema.types()
    if types == {"string"} or schema.lists(text):
        return string_json(text)
    found = _typed_json(text, types, read_literal, words)
    if found is None or ("string" in types and not schema.allows(json.loads(found))):
        return string_json(text)
    return found


def _typed_json(
    text: str,
    types: frozenset[str],
    read_literal: Callable[[str], str | None],
    words: tuple[str, str, str],
) -> str | None:
    """Return the JSON of a value that is no string; None: it has none of the types."""
    written = text.strip()
    for kind, word, own in zip(("boolean", "boolean", "null"), JSON_WORDS, words, strict=True):
        # In any case only where it can't be text.
        spelled = {word, own, "None"} if kind == "null" else {word, own}
        is_word = written in (word, own) if "string" in types else written.lower() in map(str.lower, spelled)
        if kind in types and is_word:
            return word
    number = _number_json(written, types)
    if number is not None:
        return number
    if types & {"object", "array"} and written[:1] in ("{", "["):
        if _is_json(written, types):
            return written
        value = read_literal(written)
        if value is not None and _is_json(value, types):
            return value
    return None


def _number_json(written: str, types: frozenset[str]) -> str | None:
    if _NUMBER.fullmatch(written) and (
        "number" in types or ("integer" in types and written.lstrip("-").isdigit())
    ):
        return written
    if "string" in types:
        return None  # as `007`
    integer = _INTEGER.fullmatch(written) if "integer" in types else None
    if integer is not None:
        return integer[1].replace("+", "") + integer[2]
    if "number" in types and _FLOAT.fullmatch(written):
        value = float(written)
        return repr(value) if value - value == 0 else None
    return None


def _is_json(text: str, types: frozenset[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return _type_of(value) in types
