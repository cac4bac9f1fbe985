# SPDX-License-Identifier: Apache-2.0
"""Refuse the parts of a JSON Schema that llguidance would enforce only nearly, or refuse without a name.

It calculates with floats of 64 bits, knows the bound 0 < x <= 0.5 only as 0 <= x <= 0.5, and does not notice
that an answer has the same key twice. O(size of the schema).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, TypeGuard

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: Keywords whose values are data, no schemas.
_DATA = frozenset({"const", "enum", "default", "examples"})
#: Keywords whose values are schemas by name.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
#: Keywords whose values are lists of schemas.
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_LARGEST_INTEGER = 2**63 - 1


def check_exactness(schema: Any) -> None:
    """Refuse a schema that would be enforced only nearly.

    Args:
        schema: JSON data; its decimal numbers may be Fractions.

    Raises:
        ValueError: names the keyword.
    """
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            _check_object(value)
            stack.extend(_schemas_in(value))
        elif isinstance(value, list):
            stack.extend(value)


def _schemas_in(schema: dict[str, Any]) -> Iterator[Any]:
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            _check_schemas(name, value.values())
            yield from value.values()
        elif name in _LISTED and isinstance(value, list):
            _check_schemas(name, value)
            yield value
        elif name not in _DATA:
            yield value


def _check_schemas(keyword: str, schemas: Iterable[Any]) -> None:
    for schema in schemas:
        if not isinstance(schema, dict | bool):
            raise ValueError(f"{keyword}: a schema is an object, true or false, not {schema!r:.40}")


def _check_object(schema: dict[str, Any]) -> None:
    for name in _BOUNDS:
        _check_number(name, schema.get(name))
    if schema.get("enum") == []:
        raise ValueError("enum: there is no value to choose")
    multiple = schema.get("multipleOf")
    if _is_number(multiple) and multiple <= 0:
        raise ValueError("multipleOf: it must be more than 0")
    for name in ("const", "enum"):
        stack = [schema.get(name)]
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                stack.extend(value.values())
            elif isinstance(value, list):
                stack.extend(value)
            else:
                _check_number(name, value)
    if schema.get("type") != "integer":
        _check_open_interval(schema)
    _check_num_properties(schema)


def _is_number(value: Any) -> TypeGuard[int | float | Fraction]:
    return isinstance(value, int | float | Fraction) and not isinstance(value, bool)


def _check_number(keyword: str, value: Any) -> None:
    if not _is_number(value) or isinstance(value, float):
        return
    if isinstance(value, Fraction):
        is_exact = Fraction(repr(float(value))) == value
    else:
        is_exact = abs(value) <= 2**64 and min(int(float(value)), _LARGEST_INTEGER) == value
    if not is_exact:
        raise ValueError(f"{keyword}: {float(value)!r} is as near as a 64-bit float comes to this number")


def _check_open_interval(schema: dict[str, Any]) -> None:
    """Refuse an excluded integer with another bound less than 1 away."""
    for excluded, others in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        edge = schema.get(excluded)
        if not _is_number(edge) or edge != int(edge):
            continue
        if any(_is_number(schema.get(other)) and abs(schema[other] - edge) < 1 for other in others):
            raise ValueError(
                f"{excluded}: {int(edge)} can't be excluded from so small an interval of numbers; use a "
                "bound that is no integer"
            )


def _check_num_properties(schema: dict[str, Any]) -> None:
    """Refuse a `minProperties` beyond the listed keys and one more: unlisted keys may be equal."""
    least, required = schema.get("minProperties"), schema.get("required")
    sure = 1 + (len(required) if isinstance(required, list) else 0)
    if _is_number(least) and least > sure:
        raise ValueError(
            f"minProperties: {int(least)} different keys can't be enforced, only {sure}: list them in "
            "properties and required"
        )
