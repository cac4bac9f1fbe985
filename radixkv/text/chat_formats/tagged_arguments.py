# SPDX-License-Identifier: Apache-2.0
"""Arguments as text between marks: a pair of marks for each value, or a tag for each member at any depth."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import regex

from radixkv.text.chat_formats.argument_types import JSON_WORDS, ArgumentSchema, string_json, value_json
from radixkv.text.chat_formats.arguments import MAX_DEPTH, Emit, object_of, pattern_of, respelled
from radixkv.text.chat_formats.cursor import Cursor, NotACall, RanOut, Steps
from radixkv.text.chat_formats.literals import PYTHON, literal_json

#: Stands for an argument's name, and for the type that some notations tell, in declarations.
KEY, KIND = "KEY", "KIND"


class _TextValue:
    """A value between marks, as JSON: a string as it comes, anything else once it is whole.

    Args:
        padded: a line break after the first mark, and one before the last, are no part of it.
        prefix: JSON before the value.
        is_text: a string whatever it looks like; None: by its schema.
    """

    def __init__(
        self,
        emit: Emit,
        prefix: str,
        schema: ArgumentSchema,
        *,
        padded: bool = False,
        is_text: bool | None = None,
    ) -> None:
        self._emit = emit
        self._schema = schema
        self._prefix = prefix
        self._padded = padded
        self._has_begun = False
        self._break = ""
        self._kept: list[str] | None = (
            [] if is_text is False or (is_text is None and not schema.is_text()) else None
        )
        if self._kept is None:
            emit(prefix + '"')

    def add(self, text: str) -> None:
        """Add text of the value."""
        if self._padded and text:
            text = self._break + (text if self._has_begun else text.removeprefix("\n"))
            self._has_begun = True
            self._break = "\n" if text.endswith("\n") else ""
            text = text[: len(text) - len(self._break)]
        if self._kept is not None:
            self._kept.append(text)
        elif text:
            self._emit(string_json(text)[1:-1])

    def end(self, read: Callable[[str, ArgumentSchema], str] = value_json) -> None:
        """End the value.

        Args:
            read: returns the JSON of a text that is no string by itself.
        """
        if self._kept is not None:
            self._emit(self._prefix + read("".join(self._kept), self._schema))
        else:
            self._emit('"')


@dataclass(frozen=True)
class TaggedArguments:
    """A pair of marks around each value.

    Args:
        key: before a value, with `KEY` for its name and perhaps `KIND` for its type.
        end: after it.
        between: from one to the next.
        padded: a line break after `key`, and one before `end`, are no part of a value.
        kinds: JSON type -> word that `KIND` stands for; "string" alone means a string.
        is_cdata: values with markup in them are written as `<![CDATA[...]]>`.
        constants: how true, false and null are written.
    """

    key: str
    end: str
    between: str = "\n"
    padded: bool = False
    kinds: Mapping[str, str] = field(default_factory=dict)
    is_cdata: bool = False
    constants: tuple[str, str, str] = ("true", "false", "null")

    @cached_property
    def _key(self) -> regex.Pattern[str]:
        words = "|".join(sorted(set(self.kinds.values()), key=len, reverse=True))
        written = self.key.strip().replace("><", "> <")  # white space between tags says nothing
        return pattern_of(written, KEY=r"(?P<key>[^<>\"\n]{1,200}?)", KIND=f"(?P<kind>{words})")

    @cached_property
    def _begin(self) -> str:
        return self.key.strip().partition(KEY)[0].split()[0]

    def read(
        self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, tail: regex.Pattern[str]
    ) -> Steps[None]:
        emit("{")
        follows = regex.compile(rf"\s{{0,64}}(?:{regex.escape(self._begin)}|{tail.pattern})")
        separator = ""
        while True:
            yield from cursor.blanks()
            if not (yield from self._begins(cursor)):
                break
            found = yield from cursor.match(self._key)
            inner = schema.property(found["key"].strip(), {"type": "string"})
            yield from self._read_value(cursor, emit, found, inner, separator, follows)
            separator = ", "
        emit("}")

    def _begins(self, cursor: Cursor) -> Steps[bool]:
        with cursor.hold() as back:
            found = yield from cursor.take((self._begin,))
            if not found and cursor.ended and self._begin.startswith(cursor.text[cursor.at :]):
                yield from cursor.more()  # raises: it could be one
            back()
        return bool(found)

    def _read_value(
        self,
        cursor: Cursor,
        emit: Emit,
        found: Any,
        schema: ArgumentSchema,
        separator: str,
        follows: regex.Pattern[str],
    ) -> Steps[None]:
        groups = found.groupdict()
        kind = groups.get("kind")
        value = _TextValue(
            emit,
            f"{separator}{string_json(found['key'].strip())}: ",
            schema,
            padded=self.padded,
            is_text=None if kind is None else kind == self.kinds["string"],
        )
        end = self.end.strip()
        if self.is_cdata and (yield from cursor.take(("<![CDATA[",))):
            yield from cursor.until("]]>", value.add, regex.compile(rf"\s{{0,64}}{regex.escape(end)}"))
            yield from cursor.match(regex.compile(rf"\s{{0,64}}{regex.escape(end)}"))
        else:
            yield from cursor.until(end, value.add, follows)
        value.end(_any_json if kind is not None else self._json)

    def _json(self, text: str, schema: ArgumentSchema) -> str:
        return _typed_json(text, schema, self.constants)

    def literals(self) -> tuple[str, ...]:
        return (self.key, self.end, self.between)

    def respelled(self, change: Callable[[str], str]) -> TaggedArguments:
        return respelled(self, change, ("key", "end", "between"))

    def write(self, arguments: str, schema: ArgumentSchema) -> str:
        members = object_of(arguments) or {}
        return self.between.join(self._write(name, value, schema) for name, value in members.items())

    def _write(self, name: str, value: Any, schema: ArgumentSchema) -> str:
        kinds = (
            (str, "string"),
            (bool, "boolean"),
            ((int, float), "number"),
            (dict, "object"),
            (list, "array"),
        )
        kind = next((word for types, word in kinds if isinstance(value, types)), "null")
        text = json.dumps(value, ensure_ascii=False)
        if value is None or isinstance(value, bool):
            text = self.constants[(True, False, None).index(value)]
        if isinstance(value, str):
            text = self.write_text(value)
        return self.key.replace(KIND, self.kinds.get(kind, "")).replace(KEY, name) + text + self.end

    def write_text(self, value: str) -> str:
        """Write the value of a string."""
        return f"<![CDATA[{value}]]>" if self.is_cdata and re.search(r"[<&\n]", value) else value


def _typed_json(text: str, schema: ArgumentSchema, words: tuple[str, str, str] = JSON_WORDS) -> str:
    return value_json(text, schema, lambda written: literal_json(written, PYTHON), words)


def _element_json(text: str, schema: ArgumentSchema) -> str:
    """Return the JSON of an element without others in it, which may be an empty list or object."""
    if not text.strip() and not schema.allows(text):
        for kind, empty in (("array", "[]"), ("object", "{}")):
            if kind in schema.types() and schema.allows(json.loads(empty)):
                return empty
    return _typed_json(text, schema)


def _any_json(text: str, schema: ArgumentSchema) -> str:
    """Return the JSON of a value that is said to be no string."""
    return value_json(text, ArgumentSchema({}), lambda written: None)


@dataclass(frozen=True)
class ElementArguments:
    """A tag for each member, and tags within it for members of members; `item` for members of lists.

    Args:
        mark: stands before each tag.
    """

    mark: str = ""

    @cached_property
    def _open(self) -> regex.Pattern[str]:
        return regex.compile(rf"{regex.escape(self.mark)}<(?P<key>[^<>/\s\"][^<>\"\n]{{0,200}})>")

    @cached_property
    def _leaf(self) -> regex.Pattern[str]:
        """Return the pattern of an element that holds no other, and of the text that makes it certain."""
        mark = regex.escape(self.mark)
        inside = f"[^{regex.escape(self.mark[0])}]" if self.mark else "[^<]"
        key = r"(?P<key>[^<>/\s\"][^<>\"\n]{0,200})"
        return regex.compile(rf"\s{{0,64}}{mark}<{key}>(?P<value>{inside}{{0,512}}+){mark}</(?P=key)>(?=\S)")

    def read(
        self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, tail: regex.Pattern[str]
    ) -> Steps[None]:
        yield from self._members(cursor, emit, schema, 0)

    def _members(self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, depth: int) -> Steps[None]:
        """Read tags up to the closing one of their parent."""
        if depth > MAX_DEPTH:
            raise NotACall
        types = schema.types()
        is_list = False
        is_first = True
        while True:
            leaf: Any = self._leaf.match(cursor.text, cursor.at)
            if leaf is None:
                yield from cursor.blanks()
                found = yield from self._try_open(cursor)
                if found is None:
                    break
            else:
                found = leaf
                cursor.at = leaf.end()
            name = found["key"].strip()
            if is_first:
                is_list = name == "item" and "array" in types and "item" not in schema.properties()
                emit("[" if is_list else "{")
            prefix = "" if is_first else ", "
            inner = schema.items() if is_list else schema.property(name)
            if not is_list:
                prefix += string_json(name) + ": "
            is_first = False
            if leaf is None:
                yield from self._value(cursor, emit, prefix, name, inner, depth)
            else:
                value = leaf["value"]
                emit(prefix + (string_json(value) if inner.is_text() else _element_json(value, inner)))
        if is_first:
            emit("[]" if types == {"array"} else "{}")
        else:
            emit("]" if is_list else "}")

    def _value(
        self, cursor: Cursor, emit: Emit, prefix: str, name: str, schema: ArgumentSchema, depth: int
    ) -> Steps[None]:
        end = f"{self.mark}</{name}>"
        if not schema.is_text() and schema.types() & {"object", "array"}:
            with cursor.hold() as back:
                yield from cursor.blanks()
                is_nested = (yield from self._try_open(cursor, consume=False)) is not None
                if not is_nested:
                    back()
            if is_nested:
                emit(prefix)
                yield from self._members(cursor, emit, schema, depth + 1)
                yield from cursor.expect(end)
                return
        value = _TextValue(emit, prefix, schema)
        yield from cursor.until(end, value.add)
        value.end(_element_json)

    def _try_open(self, cursor: Cursor, *, consume: bool = True) -> Steps[Any]:
        with cursor.hold() as back:
            try:
                found = yield from cursor.match(self._open)
            except NotACall as error:
                if isinstance(error, RanOut) and cursor.at < len(cursor.text):
                    raise
                return None
            if not consume:
                back()
        return found

    def literals(self) -> tuple[str, ...]:
        return (self.mark,)

    def respelled(self, change: Callable[[str], str]) -> ElementArguments:
        return respelled(self, change, ("mark",))

    def write(self, arguments: str, schema: ArgumentSchema) -> str:
        return self._write(object_of(arguments) or {})

    def _write(self, value: Any) -> str:
        if isinstance(value, dict):
            return "".join(self._element(name, inner) for name, inner in value.items() if inner is not None)
        if isinstance(value, list):
            return "".join(self._element("item", inner) for inner in value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _element(self, name: str, value: Any) -> str:
        return f"{self.mark}<{name}>{self._write(value)}{self.mark}</{name}>"
