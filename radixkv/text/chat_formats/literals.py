# SPDX-License-Identifier: Apache-2.0
"""Arguments as literals: Python's in the parentheses of a call, and Gemma's in braces.

    get_weather(city='Paris', days=2)          PYTHON
    {city:<|"|>Paris<|"|>,days:2}              a mark around strings, names without quotes

Literals are read, never evaluated: a name, an operator or a call among them makes a text no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from radixkv.text.chat_formats.argument_types import ArgumentSchema, string_json, value_json
from radixkv.text.chat_formats.arguments import MAX_DEPTH, Emit, object_of, respelled
from radixkv.text.chat_formats.cursor import Cursor, NotACall, RanOut, Steps

_ESCAPES = {
    **{letter: f"\\{letter}" for letter in "nrtbf"},
    '"': '\\"',
    "\\": "\\\\",
    "'": "'",
    "/": "/",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\n": "",
}
_ESCAPE = regex.compile(r"\\(?s:.)")
_DIGITS = {kind: regex.compile(f"[0-9a-fA-F]{{{size}}}") for kind, size in (("x", 2), ("u", 4), ("U", 8))}
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_QUOTES = ("'''", '"""', "'", '"')
_WORD = regex.compile(r"[\w.+\-]{1,256}")
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class LiteralArguments:
    """Arguments as literals of a language.

    Args:
        opens, closes: around all arguments.
        assigns: between a name and its value.
        mark: stands around strings instead of quotes; empty: Python's quotes, which are read anyway.
        quote: around strings as they are written, where there is no mark.
        constants: how true, false and null are written.
        separator: between arguments as they are written.
    """

    opens: str = "("
    closes: str = ")"
    assigns: str = "="
    mark: str = ""
    quote: str = '"'
    constants: tuple[str, str, str] = ("True", "False", "None")
    separator: str = ", "

    @cached_property
    def _key(self) -> regex.Pattern[str]:
        name = r"[^\W\d]\w{0,127}" if not self.mark else r"[^\s:{}\[\],\"'<>]{1,128}"
        return regex.compile(rf"(?P<key>{name})\s{{0,16}}{regex.escape(self.assigns)}")

    @cached_property
    def _bare(self) -> regex.Pattern[str]:
        """Return the pattern of a value without quotes, where names need none either."""
        return regex.compile(r"[^,\[\]{}<>\n]{1,256}")

    # ------------------------------------------------------------------ reading

    def read(
        self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, tail: regex.Pattern[str]
    ) -> Steps[None]:
        yield from cursor.match(regex.compile(regex.escape(self.opens)))
        yield from self._members(cursor, emit, schema, self.closes, 0)

    def _members(
        self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, closes: str, depth: int
    ) -> Steps[None]:
        """Read the members of an object, and what closes it."""
        if depth > MAX_DEPTH:
            raise NotACall
        emit("{")
        listed = iter(schema.properties()) if depth == 0 and not self.mark else iter(())
        separator = ""
        while not (yield from self._closes(cursor, closes)):
            name = yield from self._name(cursor, is_key=depth > 0 and not self.mark)
            if name is None:
                name = next(listed, None)
                if name is None:
                    raise NotACall
            else:
                next(listed, None)
            yield from cursor.blanks()
            yield from self.read_value(
                cursor, emit, schema.property(name), depth, f"{separator}{string_json(name)}: "
            )
            separator = ", "
            yield from self._next(cursor, closes)
        emit("}")

    def _closes(self, cursor: Cursor, closes: str) -> Steps[bool]:
        yield from cursor.blanks()
        if (yield from cursor.char()) != closes:
            return False
        cursor.at += 1
        return True

    def _next(self, cursor: Cursor, closes: str) -> Steps[None]:
        yield from cursor.blanks()
        char = yield from cursor.char()
        if char == ",":
            cursor.at += 1
        elif char != closes:
            raise NotACall

    def _name(self, cursor: Cursor, *, is_key: bool) -> Steps[str | None]:
        """Read the name of a member; None: it has none, as arguments by position."""
        char = yield from cursor.char()
        if is_key or (self.mark and char in "\"'"):
            pieces: list[str] = []
            yield from self._quoted(cursor, pieces.append)
            yield from cursor.blanks()
            yield from cursor.match(regex.compile(":"))
            return str(json.loads(f'"{"".join(pieces)}"'))
        try:
            found = yield from cursor.match(self._key)
        except RanOut:
            raise
        except NotACall:
            if self.mark:
                raise
            return None
        return str(found["key"])

    def read_value(
        self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, depth: int = 0, prefix: str = ""
    ) -> Steps[None]:
        """Read one value, and emit its JSON after a prefix."""
        char = yield from cursor.char()
        if char == "{":
            cursor.at += 1
            emit(prefix)
            yield from self._members(cursor, emit, schema, "}", depth + 1)
        elif char in "[(":
            cursor.at += 1
            emit(prefix)
            yield from self._items(cursor, emit, schema, "]" if char == "[" else ")", depth + 1)
        elif char in "\"'" or (self.mark and char == self.mark[0]) or (char in "rR" and not self.mark):
            yield from self._string(cursor, emit, schema, prefix)
        elif self.mark:
            found = yield from cursor.match(self._bare)
            emit(prefix + value_json(found[0].strip(), schema))
        else:
            found = yield from cursor.match(_WORD)
            try:
                emit(prefix + _word_json(found[0], schema))
            except NotACall:
                raise _missing(cursor) from None  # cut off, it may be the beginning of a constant

    def _items(
        self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, closes: str, depth: int
    ) -> Steps[None]:
        if depth > MAX_DEPTH:
            raise NotACall
        emit("[")
        separator = ""
        while not (yield from self._closes(cursor, closes)):
            yield from self.read_value(cursor, emit, schema.items(), depth, separator)
            separator = ", "
            yield from self._next(cursor, closes)
        emit("]")

    def _string(self, cursor: Cursor, emit: Emit, schema: ArgumentSchema, prefix: str) -> Steps[None]:
        if "string" in schema.types():
            emit(prefix + '"')
            yield from self._quoted(cursor, emit)
            emit('"')
            return
        pieces: list[str] = []
        yield from self._quoted(cursor, pieces.append)
        emit(prefix + value_json(str(json.loads(f'"{"".join(pieces)}"')), schema))

    def _quoted(self, cursor: Cursor, emit: Emit) -> Steps[None]:
        """Read a string with its quotes or marks, and emit the inside of its JSON."""
        if self.mark and (yield from cursor.take((self.mark,))):
            yield from cursor.until(self.mark, lambda text: emit(string_json(text)[1:-1]))
            return
        if self.mark and cursor.ended and self.mark.startswith(cursor.text[cursor.at :]):
            raise RanOut
        is_raw = bool((yield from cursor.take(("r", "R"))))
        quote = yield from cursor.take(_QUOTES)
        if not quote:
            raise _missing(cursor)
        plain = _PLAIN[quote[0]]
        while True:
            char = yield from cursor.char()
            if char == quote[0]:
                if (yield from cursor.take((quote,))):
                    return
                cursor.at += 1
                emit(string_json(char)[1:-1])
            elif char == "\\":
                written = yield from self._escape(cursor)
                emit(string_json(written)[1:-1] if is_raw else _escape_json(written))
            else:
                found: Any = plain.match(cursor.text, cursor.at)
                cursor.at = found.end()
                emit(string_json(found[0])[1:-1])

    def _escape(self, cursor: Cursor) -> Steps[str]:
        """Read an escape sequence, and return it with its backslash."""
        written = str((yield from cursor.match(_ESCAPE))[0])
        digits = _DIGITS.get(written[1])
        if digits is not None:
            with cursor.hold() as back:
                try:
                    return written + str((yield from cursor.match(digits))[0])
                except RanOut:
                    raise
                except NotACall:
                    back()
        return written

    # ------------------------------------------------------------------ writing

    def literals(self) -> tuple[str, ...]:
        return (self.mark,)

    def respelled(self, change: Callable[[str], str]) -> LiteralArguments:
        return respelled(self, change, ("mark",))

    def write(self, arguments: str, schema: ArgumentSchema) -> str:
        members = object_of(arguments) or {}
        written = (f"{name}{self.assigns}{self.write_value(value)}" for name, value in members.items())
        return self.opens + self.separator.join(written) + self.closes

    def write_value(self, value: Any) -> str:
        """Write one value."""
        if value is None or isinstance(value, bool):
            return self.constants[(True, False, None).index(value)]
        if isinstance(value, str):
            if self.mark:
                return self.mark + value + self.mark
            return string_json(value) if self.quote == '"' else repr(value)
        if isinstance(value, dict):
            if not self.mark:
                return repr(value) if self.quote == "'" else json.dumps(value, ensure_ascii=False)
            inner = (f"{name}{self.assigns}{self.write_value(item)}" for name, item in sorted(value.items()))
            return "{" + self.separator.join(inner) + "}"
        if isinstance(value, list):
            return "[" + self.separator.join(map(self.write_value, value)) + "]"
        return json.dumps(value)


PYTHON = LiteralArguments()


def gemma_literals(mark: str) -> LiteralArguments:
    """Return the literals of a family of Gemma's, with its mark around strings."""
    return LiteralArguments("{", "}", ":", mark, constants=("true", "false", "null"), separator=",")


def literal_json(text: str, language: LiteralArguments) -> str | None:
    """Return the JSON of a text that is one literal; None: it is none. O(text)."""
    cursor = Cursor()
    cursor.feed(text)
    cursor.ended = True
    pieces: list[str] = []
    reader = language.read_value(cursor, pieces.append, ArgumentSchema({}))
    try:
        for _ in reader:
            pass
    except NotACall:
        return None
    return "".join(pieces) if not text[cursor.at :].strip() else None


def _missing(cursor: Cursor) -> NotACall:
    """Return the error of a text that does not fit, or that ends before it could."""
    return RanOut() if cursor.ended and cursor.at >= len(cursor.text) else NotACall()


def _escape_json(written: str) -> str:
    """Return the JSON of an escape sequence of Python's; one that it does not know stays as it is."""
    kind, digits = written[1], written[2:]
    if kind in "xuU" and digits:
        number = int(digits, 16)
        if kind == "u":
            return f"\\u{digits}"
        return string_json(chr(number))[1:-1] if number < 0x110000 else string_json(written)[1:-1]
    known = _ESCAPES.get(kind)
    return string_json(written)[1:-1] if known is None else known


def _number(text: str) -> Any:
    """Return the number that a JSON text is; None: it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _word_json(word: str, schema: ArgumentSchema) -> str:
    """Return the JSON of a number or a constant, by its schema."""
    constant = _CONSTANTS.get(word)
    if constant is not None and schema.lists(word) and not schema.allows(json.loads(constant)):
        return string_json(word)
    if constant == "null":
        return constant
    if schema.is_text() and (constant is not None or _NUMBER.fullmatch(word)):
        return string_json(word)
    if constant is not None:
        return constant
    if not _NUMBER.fullmatch(word):
        raise NotACall
    number = word.replace("_", "")
    return number if schema.lists(word) and schema.allows(_number(number)) else value_json(number, schema)
