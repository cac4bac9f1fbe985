# SPDX-License-Identifier: Apache-2.0
"""The types that a tool's schema gives its arguments, and the JSON of a value that was written as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_ALL = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"([+-]?)0*(\d+)(?:\.0*)?")
_FLOAT = re.compile(r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,3})?")
_MAX_REFERENCES = 16


@dataclass(frozen=True)
class ArgumentSchema:
    """A JSON Schema in the document that its references mean.

    Args:
        schema: an object; anything else allows everything.
        root: the document; None: the schema itself.
    """

    schema: Any
    root: Any = None

    @cached_property
    def _properties(self) -> Mapping[str, Any]:
        schema = self.resolved()
        listed = dict(schema.get("properties") or {}) if isinstance(schema.get("properties"), Mapping) else {}
        for part in _parts(schema, "allOf"):
            if isinstance(part, Mapping) and part.keys() & {"properties", "$ref"}:
                listed = {**self.of(part).properties(), **listed}
        return listed

    @cached_property
    def _types(self) -> frozenset[str]:
        return self._find_types(8)

    @cached_property
    def _items(self) -> ArgumentSchema:
        return self.of(self.resolved().get("items"))

    @cached_property
    def _others(self) -> ArgumentSchema:
        return self._other_than(None if self._properties else {})

    @cached_property
    def _known(self) -> dict[str, ArgumentSchema]:
        return {}

    def resolved(self) -> Mapping[str, Any]:
        """Return the schema that its references within the document lead to."""
        schema, root = self.schema, self.schema if self.root is None else self.root
        for _ in range(_MAX_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                break
            schema = root
            for name in reference[1:].strip("/").split("/") if reference != "#" else ():
                name = name.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def of(self, part: Any) -> ArgumentSchema:
        """Return a part of the schema in the same document."""
        return ArgumentSchema(part, self.schema if self.root is None else self.root)

    def properties(self) -> Mapping[str, Any]:
        """Return the properties that the schema lists, also in the alternatives of an `allOf`."""
        return self._properties

    def property(self, name: str, unlisted: Any = None) -> ArgumentSchema:
        """Return the schema of a property.

        Args:
            unlisted: the schema of one that is not among those listed, where nothing is said of others.
        """
        listed = self._properties
        if name not in listed:
            return self._others if unlisted is None or not listed else self._other_than(unlisted)
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self.of(listed[name])
        return found

    def _other_than(self, unlisted: Any) -> ArgumentSchema:
        others = self.resolved().get("additionalProperties")
        return self.of(others if isinstance(others, Mapping) else unlisted)

    def items(self) -> ArgumentSchema:
        """Return the schema of a list's items."""
        return self._items

    def types(self) -> frozenset[str]:
        """Return the names of the types that a value may have."""
        return self._types

    def _find_types(self, depth: int) -> frozenset[str]:
        schema = self.resolved()
        given = schema.get("type")
        found = {given} if isinstance(given, str) else set(given if isinstance(given, list) else ())
        values = [*_parts(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        if not found:
            found |= {_type_of(value) for value in values}
        if not found and depth:
            for keyword in ("anyOf", "oneOf", "allOf"):
                for part in _parts(schema, keyword):
                    found |= self.of(part)._find_types(depth - 1)
        if schema.get("nullable") is True and found:
            found.add("null")
        if not found and "properties" in schema:
            found.add("object")
        return frozenset(found & _ALL) or _ALL

    def is_text(self) -> bool:
        """Return whether nothing but a string is allowed."""
        return self.types() == {"string"}


def _parts(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    parts = schema.get(keyword)
    return parts if isinstance(parts, list) else []


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = ((str, "string"), (int, "integer"), (float, "number"), (dict, "object"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def string_json(text: str) -> str:
    """Return the JSON of a string."""
    return json.dumps(text, ensure_ascii=False)


def refuse_constant(name: str) -> Any:
    """Refuse NaN and the infinities, which `json` takes for numbers."""
    raise ValueError(f"{name} is not JSON")


def value_json(
    text: str, schema: ArgumentSchema, read_literal: Callable[[str], str | None] = lambda text: None
) -> str:
    """Return the JSON of a value that was written as text, by its schema; what fits none of it is a string.

    Args:
        read_literal: the JSON of a text in another notation of objects and lists; None: it is none.
    """
    types = schema.types()
    if types == {"string"}:
        return string_json(text)
    written = text.strip()
    word = written.lower()
    if "null" in types and word in ("null", "none"):
        return "null"
    if "boolean" in types and word in ("true", "false"):
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
    return string_json(text)


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
