# SPDX-License-Identifier: Apache-2.0
"""Declarations of fields, for the check of bodies, the documentation and the tests.

supported        an ordinary field of a body's model
without effect   `Annotated[Any, WithoutEffect()]`: real clients send it, and it changes nothing here; the
                 answer's `warning` header names it
refused          `Annotated[Any, Refused("...")]`: ignoring it would change the meaning of the answer
unknown          any other: refused, or with `unknown_fields = "warn"` dropped and named in the header

A known field whose value asks for nothing (null, false, an empty list, an object of nothing else) is never
refused and never named.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from radixkv_server.chats.image_marks import ImageSource

Json = dict[str, Any]
State = Literal["supported", "without effect", "refused"]

MAX_HEADER = 1000


@dataclass(frozen=True, slots=True, eq=False)
class WithoutEffect:
    """Marks an accepted field without effect.

    Args:
        why: reason, for the documentation.
        usual: values that ask for the default behaviour: no warning names them.
    """

    why: str = ""
    usual: tuple[Any, ...] = ()
    state: ClassVar[State] = "without effect"


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """Marks a field that is refused unless it asks for nothing.

    Args:
        what: the unsupported feature, for the error and the documentation.
        usual: values that ask for the default behaviour: they are accepted.
    """

    what: str = "this field"
    usual: tuple[Any, ...] = ()
    state: ClassVar[State] = "refused"

    @property
    def why(self) -> str:
        return self.what


NoOp = Annotated[Any, WithoutEffect()]


def asks_for_nothing(value: Any) -> bool:
    """Return whether a value is null, false, empty, or an object of such values. O(its parts)."""
    if isinstance(value, dict):
        return all(asks_for_nothing(item) for item in value.values())
    return value is None or value is False or value == []


@dataclass(slots=True)
class Ignored:
    """Ignored parts of one body, and its images, as its models find them.

    Args:
        takes_unknown: unknown fields are dropped, not refused.
        images: see `ServerSettings.images`; `auto` for a model that doesn't see.
        image_urls: see `ServerSettings.image_urls`.

    Attributes:
        sources: the images that are to be shown, by their keys.
    """

    takes_unknown: bool = False
    images: str = "auto"
    image_urls: bool = False
    sources: dict[str, ImageSource] = field(default_factory=dict)
    _noted: list[tuple[Json, str, str]] = field(default_factory=list)
    _said: list[str] = field(default_factory=list)

    def note(self, owner: Json, name: str, *, is_unknown: bool = False) -> None:
        """Note an ignored field of the object `owner`, which is part of the body."""
        self._noted.append((owner, name, " (unknown)" if is_unknown else ""))

    def note_part(self, what: str) -> None:
        """Note another part of the body without effect."""
        self._said.append(what)

    def describe(self, body: Json) -> list[str]:
        """Return the paths of the ignored fields, each once, without list positions. O(parts of the body)."""
        if not self._noted:
            return list(dict.fromkeys(self._said))
        places = {id(owner): "" for owner, _, _ in self._noted}
        for path, part in _objects(body, ""):
            if id(part) in places:
                places[id(part)] = path
        paths = (f"{_under(places[id(owner)], name)}{end}" for owner, name, end in self._noted)
        return list(dict.fromkeys([*paths, *self._said]))


def _objects(value: Any, path: str) -> Iterator[tuple[str, Json]]:
    """Iterate over the objects within a value, with their paths."""
    if isinstance(value, dict):
        yield path, value
        for name, item in value.items():
            if isinstance(item, dict | list):
                yield from _objects(item, _under(path, name))
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item, path + "[]")


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def warning_header(words: list[str], notes: list[str]) -> str:
    """Return the value of a `warning` header with ignored fields and notes, in printable ASCII."""
    text = "; ".join([*(["without effect: " + ", ".join(words)] if words else ()), *notes])
    plain = "".join(char if " " <= char <= "~" and char not in '"\\' else "?" for char in text)
    shown = plain if len(plain) <= MAX_HEADER else plain[: MAX_HEADER - 3] + "..."
    return f'299 radixkv "{shown}"'


class EmptyCounts:
    """Marks an object that asks for something even when empty or all null."""


# ---------------------------------------------------------------------- rules


@dataclass(frozen=True, slots=True)
class Rule:
    """Check of one field before the check of its type.

    Args:
        marker: its declaration, if it is not supported.
        drops: types of values that ask for nothing and that the field's own type does not know (a `false`
            where a number belongs): the field counts as not given.
    """

    marker: WithoutEffect | Refused | None = None
    drops: frozenset[type] = frozenset()


@functools.cache
def rules_of(model: type[BaseModel]) -> Mapping[str, Rule]:
    """Return the rules of a model's declared fields, by their names in bodies."""
    rules = {}
    for name, info in model.model_fields.items():
        marker = next((item for item in info.metadata if isinstance(item, WithoutEffect | Refused)), None)
        marker = marker or _marker(info.annotation)
        drops: set[type] = set()
        if marker is None and not info.is_required() and info.default is None:
            drops = {bool, list, dict} - _emptiable(info.annotation, _has_least(info.metadata))
        rules[info.alias or name] = Rule(marker, frozenset(drops))
    return rules


def _marker(kind: Any) -> WithoutEffect | Refused | None:
    found = (_marker_of(leaf) for leaf in _branches(kind))
    return next((marker for marker in found if marker is not None), None)


def _marker_of(kind: Any) -> WithoutEffect | Refused | None:
    metadata = getattr(kind, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, WithoutEffect | Refused)), None)


def _branches(kind: Any) -> Iterator[Any]:
    """Iterate over the members of a union, or the type itself."""
    if get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from _branches(member)
    elif get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) in (Union, types.UnionType):
        yield from _branches(get_args(kind)[0])
    else:
        yield kind


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _emptiable(kind: Any, least: bool) -> set[type]:
    """Return the types among bool, list and dict whose empty value means something to a type."""
    found: set[type] = set()
    for branch in _branches(kind):
        plain = _plain(branch)
        least_here = least or _has_least(getattr(branch, "__metadata__", ()))
        if plain is Any:
            return {bool, list, dict}
        if plain is bool:
            found.add(bool)
        elif EmptyCounts in getattr(branch, "__metadata__", ()):
            found.add(dict)
        elif get_origin(plain) in (list, dict) or plain in (list, dict):
            found |= set() if least_here else {get_origin(plain) or plain}
    return found


def _has_least(metadata: Iterable[Any]) -> bool:
    """Return whether a list must have items."""
    nested = (inner for item in metadata for inner in (item, *getattr(item, "metadata", ())))
    return any(getattr(item, "min_length", None) for item in nested)


# ---------------------------------------------------------------------- where the fields of a body are


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A row about a field, for the documentation and the tests.

    Attributes:
        path: for example `messages[].content[].text`.
        why: reason of a field that is not supported.
        is_open: its content is free: data, a schema, or fields that a template reads.
        kinds: the literals of its type; empty: its type is no literal.
    """

    path: str
    state: State
    why: str
    is_open: bool
    kinds: tuple[Any, ...]


def field_rows(root: type[BaseModel]) -> list[FieldRow]:
    """Return all fields of a body, nested ones after their parent, each path once."""
    rows: dict[str, FieldRow] = {}
    for path, row in _walk(root, "", ()):
        known = rows.get(path)
        if known is None or (known.state != "supported" and row.state == "supported"):
            rows[path] = row
        elif row.state == known.state == "supported":
            kinds = (*known.kinds, *(kind for kind in row.kinds if kind not in known.kinds))
            rows[path] = FieldRow(path, "supported", "", known.is_open or row.is_open, kinds)
    return list(rows.values())


def _walk(model: type[BaseModel], before: str, outer: tuple[type, ...]) -> Iterator[tuple[str, FieldRow]]:
    for name, rule in rules_of(model).items():
        path = _under(before, name)
        info = next(info for key, info in model.model_fields.items() if (info.alias or key) == name)
        marker = rule.marker
        nested = [] if marker is not None else list(_nested(info.annotation, path))
        kinds = tuple(kind for branch in _branches(info.annotation) for kind in _literals(branch))
        is_open = marker is not None or not nested
        row = FieldRow(
            path, marker.state if marker else "supported", marker.why if marker else "", is_open, kinds
        )
        yield path, row
        for place, kind in nested:
            if kind not in outer:
                yield from _walk(kind, place, (*outer, kind))
    others = passed_on(model)
    for name in sorted(getattr(model, "FOR_TEMPLATES", ()) if others is None else others):
        path = _under(before, name)
        yield path, FieldRow(path, "supported", "", True, ())


def _literals(kind: Any) -> tuple[Any, ...]:
    plain = _plain(kind)
    return get_args(plain) if get_origin(plain) is Literal else ()


def _nested(kind: Any, path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Iterate over the models within a type, with their paths."""
    for branch in _branches(kind):
        plain = _plain(branch)
        if isinstance(plain, type) and issubclass(plain, BaseModel):
            yield path, plain
        elif get_origin(plain) is list:
            yield from _nested(get_args(plain)[0], path + "[]")


def passed_on(model: type[BaseModel]) -> frozenset[str] | None:
    """Return the undeclared names that a model accepts unchecked; None: any.

    A model lists them in `PASSED_ON`; a model that accepts any may list examples in `FOR_TEMPLATES`.
    """
    if model.model_config.get("extra") != "allow":
        return frozenset()
    names: frozenset[str] | None = getattr(model, "PASSED_ON", None)
    return names
