# SPDX-License-Identifier: Apache-2.0
"""A JSON Schema in which objects have the properties that are listed, and no others.

A schema that does not say whether an object may have further properties allows them. People who list
properties seldom mean that, and small models then go on to invent keys until they are cut off. Explicit
keywords stay: `additionalProperties`, `patternProperties` and `unevaluatedProperties` as they are, objects
without a list of properties open.

Schemas that are applied to the same object, by `allOf`, `anyOf` or a `$ref` beside others, know each other's
properties, so that closing them leaves something to write. Closing only ever narrows, but for `oneOf`: its
alternatives could begin to exclude each other, and an answer would match several of the original. They are
closed where they exclude each other already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

#: What says that further properties are thought of; or what closing would not go together with.
_EXPLICIT = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "propertyNames",
        "dependentSchemas",
        "dependencies",
        "if",
        "not",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_IN_PLACE = ("allOf", "anyOf", "oneOf")
#: Keywords under which a value's parts are described: one schema, a list of them, or schemas by names.
_PART = ("items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties")
_NAMED_PARTS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
#: Parts of the original that may be written again where they are combined.
_MAX_COPIES = 1_000

Schema = Mapping[str, Any]


def close_objects(schema: Any, *, is_closed: bool = False) -> Any:
    """Return a copy of the schema with closed objects. O(size), besides copies of combined parts.

    Args:
        schema: JSON data.
        is_closed: the outermost object is closed even if it lists no properties.
    """
    if not isinstance(schema, Mapping):
        return schema
    if is_closed and not schema.get("properties") and not _is_composed(schema) and "$ref" not in schema:
        schema = {**schema, "properties": {}} if not _EXPLICIT & set(schema) else schema
    try:
        return _Closing(schema).result()
    except RecursionError:  # deeper than any grammar may be
        return schema


def follow_pointer(root: Any, pointer: str) -> Any:
    """Return the target of a JSON pointer within a schema (`#`, `#/$defs/a`); None: there is none."""
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    found = root
    for part in unquote(pointer[2:]).split("/") if pointer != "#" else ():
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found


def follow_reference(root: Any, reference: Any) -> Any:
    """Return the target of a `$ref` within a schema, by a pointer or an anchor; None: there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    if reference == "#" or reference.startswith("#/"):
        return follow_pointer(root, reference)
    return next((one for one in _objects(root) if one.get("$anchor") == reference[1:]), None)


class _TooMany(Exception):
    """More copies than are worth it."""


class _Closing:
    """A schema being closed: closed variants of definitions are made when something refers to them."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._variants: dict[str, str] = {}  # pointer -> name of its closed variant
        self._definitions: dict[str, Any] = {}
        self._num_copies = 0
        # Below an $id of its own a pointer means something else.
        self._follows = not any("$id" in one and one is not root for one in _objects(root))

    def result(self) -> dict[str, Any]:
        closed = self._value(self._root)
        for keyword in _DEFINITIONS:
            if keyword in closed:
                closed[keyword] = dict(closed[keyword])
        if self._definitions:
            closed["$defs"] = {**closed.get("$defs", {}), **self._definitions}
        self._drop_unused(closed)
        return closed

    # ------------------------------------------------------------------ one value

    def _value(self, schema: Any) -> Any:
        """Close a schema that alone describes its value."""
        if not isinstance(schema, Mapping):
            return schema
        if not _is_composed(schema):
            return self._closed(schema, frozenset())
        alone = self._only(schema)
        if alone == "$ref":
            return {**schema, "$ref": self._closed_reference(schema["$ref"])}
        if alone == "oneOf" and not self._exclude_each_other(schema["oneOf"]):
            return self._parts(schema)
        if alone is not None:
            return {**self._parts(schema), alone: [self._value(one) for one in schema[alone]]}
        try:
            members = list(self._members(schema, 0))
            if self._follows and all(isinstance(one, Mapping) and not _is_open(one) for one in members):
                names = frozenset(name for one in members for name in _listed(one))
                return self._together(schema, names, 0)
        except _TooMany:
            pass
        return self._open(schema)

    def _open(self, schema: Any) -> Any:
        """Close the parts of the value; the value and its combinations stay unchanged."""
        if not isinstance(schema, Mapping):
            return schema
        result = self._parts(schema)
        for name in ("allOf", "anyOf"):
            if isinstance(schema.get(name), list):
                result[name] = [self._open(one) for one in schema[name]]
        return result

    def _only(self, schema: Schema) -> str | None:
        """Return the keyword that lists an object's properties, if it and its parts' stand alone."""
        given = [name for name in (*_IN_PLACE, "$ref", "properties") if name in schema]
        if len(given) != 1 or _EXPLICIT & set(schema):
            return None
        if given[0] == "allOf" and len(schema["allOf"]) != 1:
            return None
        if schema.get("required") and given[0] != "$ref":
            return None
        return given[0]

    def _closed(self, schema: Schema, others: frozenset[str]) -> dict[str, Any]:
        """Close a schema to its own properties and the properties combined with it."""
        closed = self._parts(schema)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or _EXPLICIT & set(schema):
            return closed
        names = set(properties) | others
        required, least = schema.get("required"), schema.get("minProperties")
        if isinstance(required, Sequence) and not names.issuperset(map(str, required)):
            return closed
        if isinstance(least, int) and least > len(names):
            return closed
        missing = sorted(others - set(properties))
        closed["properties"] = {**closed["properties"], **dict.fromkeys(missing, True)}
        closed["additionalProperties"] = False
        return closed

    def _parts(self, schema: Schema) -> dict[str, Any]:
        """Close the parts of the value, but not the value."""
        result = dict(schema)
        for name in _PART:
            if isinstance(schema.get(name), Mapping):
                result[name] = self._value(schema[name])
        for name in _NAMED_PARTS:
            if isinstance(schema.get(name), Mapping):
                result[name] = {key: self._value(value) for key, value in schema[name].items()}
        for name in ("prefixItems", "items"):
            if isinstance(schema.get(name), list):
                result[name] = [self._value(value) for value in schema[name]]
        return result

    # ------------------------------------------------------------------ several schemas of one value

    def _members(self, schema: Any, depth: int) -> Iterator[Any]:
        """Yield all schemas applied to the same value: itself and its combinations, references followed."""
        self._count(depth)
        yield schema
        if not isinstance(schema, Mapping):
            return
        for name in _IN_PLACE:
            for one in schema.get(name, ()):
                yield from self._members(one, depth + 1)
        if "$ref" in schema:
            yield from self._members(self._referenced(schema["$ref"]), depth + 1)

    def _together(self, schema: Schema, names: frozenset[str], depth: int) -> dict[str, Any]:
        """Close each member to the properties of all; the target of a reference replaces it."""
        self._count(depth)
        closed = self._closed(schema, names)
        for name in ("allOf", "anyOf"):
            if name in schema:
                closed[name] = [self._together(one, names, depth + 1) for one in schema[name]]
        if "$ref" in schema:
            target = self._together(self._referenced(closed.pop("$ref")), names, depth + 1)
            if target.keys().isdisjoint(closed):
                return {**target, **closed}
            closed["allOf"] = [*closed.get("allOf", ()), target]
        return closed

    def _count(self, depth: int) -> None:
        self._num_copies += 1
        if self._num_copies > _MAX_COPIES or depth > 50:
            raise _TooMany

    def _exclude_each_other(self, alternatives: Any) -> bool:
        """Return True if no object can match two of them, by a required property with different constants."""
        tagged = [self._tags(one) for one in alternatives if isinstance(one, Mapping)]
        if len(tagged) < len(alternatives):
            return False
        objects = [tags for tags in tagged if tags is not None]
        shared = set.intersection(*(set(tags) for tags in objects)) if objects else set()
        for name in shared:
            values = [value for tags in objects for value in tags[name]]
            if len(set(values)) == len(values):
                return True
        return len(objects) <= 1

    def _tags(self, schema: Schema) -> dict[str, list[str]] | None:
        """Return required properties with the constants that they may have; None: no object's schema."""
        if "$ref" in schema:
            target = self._referenced(schema["$ref"])
            schema = target if isinstance(target, Mapping) else {}
        kind = schema.get("type")
        if isinstance(kind, str) and kind != "object":
            return None
        tags: dict[str, list[str]] = {}
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return tags
        for name in schema.get("required", ()):
            values = properties.get(name)
            if isinstance(values, Mapping) and ("const" in values or isinstance(values.get("enum"), list)):
                tags[name] = [repr(one) for one in values.get("enum", [values.get("const")])]
        return tags

    # ------------------------------------------------------------------ references

    def _closed_reference(self, pointer: Any) -> Any:
        """Return a pointer to the closed variant of a reference's target; unchanged if there is none."""
        if pointer == "#" or not isinstance(pointer, str) or not self._follows:
            return pointer
        target = self._referenced(pointer)
        if not isinstance(target, Mapping):
            return pointer
        name = self._variants.get(pointer)
        if name is None:
            name = self._variants[pointer] = self._name(pointer)
            self._definitions[name] = None  # where it leads back here, it has its name already
            self._definitions[name] = self._value(target)
        return f"#/$defs/{name}"

    def _name(self, pointer: str) -> str:
        base = "closed_" + "".join(
            c if c.isascii() and c.isalnum() else "_" for c in pointer.rpartition("/")[2]
        )
        known = {*self._definitions, *self._root.get("$defs", ())}
        return next(n for n in (base, *(f"{base}_{i}" for i in range(len(known) + 1))) if n not in known)

    def _referenced(self, pointer: Any) -> Any:
        """Return the target of a pointer within the schema; None: there is none."""
        return follow_pointer(self._root, pointer) if isinstance(pointer, str) else None

    def _drop_unused(self, closed: dict[str, Any]) -> None:
        """Leave out the definitions that only their closed variants were made of."""
        body = {name: value for name, value in closed.items() if name not in _DEFINITIONS}
        used, stack = set[tuple[str, str]](), [body]
        while stack:
            for one in _objects(stack.pop()):
                if any(name in one for name in ("$anchor", "$dynamicAnchor", "$dynamicRef")):
                    return
                keyword, name = _definition(one.get("$ref"))
                if name in closed.get(keyword, {}) and (keyword, name) not in used:
                    used.add((keyword, name))
                    stack.append(closed[keyword][name])
        for pointer in self._variants:
            keyword, name = _definition(pointer)
            if (keyword, name) not in used and name in closed.get(keyword, {}):
                del closed[keyword][name]


def _definition(pointer: Any) -> tuple[str, str]:
    """Return the keyword and the name of the definition that a pointer leads into; empty: into none."""
    parts = unquote(pointer).split("/") if isinstance(pointer, str) else []
    if len(parts) < 3 or parts[0] != "#" or parts[1] not in _DEFINITIONS:
        return "", ""
    return parts[1], parts[2].replace("~1", "/").replace("~0", "~")


def _is_composed(schema: Schema) -> bool:
    return any(isinstance(schema.get(name), list) for name in _IN_PLACE) or "$ref" in schema


def _is_open(schema: Schema) -> bool:
    """Return whether it tells of further properties, or closed alternatives might exclude each other."""
    return bool(_EXPLICIT & set(schema)) or "oneOf" in schema


def _listed(schema: Schema) -> Iterator[str]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        yield from properties


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            yield value
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
