# SPDX-License-Identifier: Apache-2.0
"""Calls that are JSON objects, with members for the function's name and for its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import regex

from radixkv.text.chat_formats.argument_types import ArgumentSchema
from radixkv.text.chat_formats.arguments import Arguments, JsonArguments, object_of, respelled
from radixkv.text.chat_formats.calls import ID, INDEX, NAME, CallSink
from radixkv.text.chat_formats.cursor import Cursor, NotACall, RanOut, Steps

_JSON = JsonArguments()
_NO_SCHEMA = ArgumentSchema({})


@dataclass(frozen=True)
class JsonCalls:
    """Calls as JSON objects, alone, one after the other, or in a list.

    Args:
        head, tail, begin, between, end: as `CallForm` has them.
        opens: marks that open calls.
        closes: marks after them, which may be missing at the end of an answer.
        name_keys, arguments_keys: members for the function's name and for its arguments.
        id_key: the member for the call's id; None: the models' ids are not used.
        is_named: the only member of a call has the function's name for its key, and the arguments as value.
        ignored: members without further information.
        bare: marks that open calls only at the beginning of an answer, to offered functions.
    """

    head: str
    tail: str
    opens: tuple[str, ...]
    begin: str = ""
    between: str = "\n"
    end: str = ""
    closes: tuple[str, ...] = ()
    name_keys: frozenset[str] = frozenset({"name", "tool_name", "function"})
    arguments_keys: frozenset[str] = frozenset({"arguments", "parameters"})
    id_key: str | None = "id"
    is_named: bool = False
    ignored: frozenset[str] = frozenset({"type", "tool_call_id", "index", "id"})
    bare: tuple[str, ...] = ()
    arguments: Arguments = _JSON
    id_pattern: str = "[a-zA-Z0-9]{9}"
    first_index: int | None = 0

    @cached_property
    def tail_marks(self) -> tuple[str, ...]:
        """The marks after arguments."""
        return tuple(self.tail.split())

    @cached_property
    def key_pattern(self) -> regex.Pattern[str]:
        """Return the pattern of a member's name, with the colon after it."""
        known = {*self.name_keys, *self.arguments_keys, *self.ignored, "function"}
        name = r"[^\"\\]{1,200}" if self.is_named else "|".join(sorted(known))
        return regex.compile(rf'"({name})"\s{{0,64}}:')

    def read(self, cursor: Cursor, sink: CallSink) -> Steps[None]:
        opened = yield from cursor.take(
            (*self.opens, *(mark for mark in self.bare if mark not in ("{", "[")))
        )
        yield from cursor.blanks()
        is_list = (yield from cursor.char()) == "["
        cursor.at += is_list
        while True:
            yield from cursor.blanks()
            yield from _JsonCall(self, cursor, sink, is_bare=opened not in self.opens).read()
            if is_list:
                yield from cursor.blanks()
                char = yield from cursor.char()
                cursor.at += 1
                if char == "]":
                    break
                if char != ",":
                    raise NotACall
            elif not (yield from self._goes_on(cursor)):
                break
        yield from self._close(cursor, opened)

    def _goes_on(self, cursor: Cursor) -> Steps[bool]:
        """Read the separator of two objects; return whether there is a second."""
        with cursor.hold() as back:
            yield from cursor.blanks()
            yield from cursor.take((",", ";"))
            yield from cursor.blanks()
            is_over = cursor.ended and cursor.at >= len(cursor.text)
            if is_over or (yield from cursor.char()) == "{":
                return not is_over
            back()
        return False

    def _close(self, cursor: Cursor, opened: str) -> Steps[None]:
        """Read what closes calls. After an opening mark nothing else may follow."""
        with cursor.hold() as back:
            yield from cursor.blanks()
            if (yield from cursor.take(self.closes)):
                return
            rest = cursor.text[cursor.at :]
            if self.closes and opened and rest:
                raise RanOut if any(mark.startswith(rest) for mark in self.closes) else NotACall
            back()

    def literals(self) -> tuple[str, ...]:
        return (self.begin, self.between, self.end, self.head, self.tail)

    def respelled(self, change: Callable[[str], str]) -> JsonCalls:
        return respelled(
            replace(self, arguments=self.arguments.respelled(change)),
            change,
            ("begin", "between", "end", "head", "tail"),
        )

    def write(
        self,
        calls: Iterable[tuple[str, str]],
        schemas: Mapping[str, Any] | None = None,
        numbers: Sequence[int] = (),
    ) -> str:
        written = [
            self.head.replace(INDEX, str(numbers[i] if numbers else i)).replace(NAME, name)
            + arguments
            + self.tail.replace(ID, f"abcdefgh{i % 10}")
            for i, (name, arguments) in enumerate(calls)
        ]
        return self.begin + self.between.join(written) + self.end


_STRING = regex.compile(r'"(?:[^"\\]|\\.){0,400}"')
_SCALAR = regex.compile(r"[\w.+\-]{1,64}")


class _JsonCall:
    """The reading of one call that is a JSON object."""

    def __init__(self, form: JsonCalls, cursor: Cursor, sink: CallSink, *, is_bare: bool) -> None:
        self._form = form
        self._is_bare = is_bare
        self._cursor = cursor
        self._sink = sink
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: list[str] | None = None
        self._has_begun = False

    def read(self) -> Steps[None]:
        yield from self._members()
        if self._name is None:
            raise NotACall
        if not self._has_begun:
            self._begin()
            for piece in self._arguments or ["{}"]:
                self._sink.add(piece)
        self._sink.end(self._id)
        yield

    def _members(self) -> Steps[None]:
        cursor = self._cursor
        yield from cursor.match(regex.compile(r"\{"))
        while True:
            yield from cursor.blanks()
            key = str((yield from cursor.match(self._form.key_pattern))[1])
            yield from cursor.blanks()
            yield from self._member(key)
            yield from cursor.blanks()
            char = yield from cursor.char()
            cursor.at += 1
            if char == "}":
                return
            if char != ",":
                raise NotACall

    def _member(self, key: str) -> Steps[None]:
        form, char = self._form, (yield from self._cursor.char())
        if form.is_named:
            if self._name is not None:
                raise NotACall
            self._name = key
            yield from self._read_arguments(char)
        elif key in form.name_keys and char == '"' and self._name is None:
            self._name = yield from self._function()
        elif key == "function" and char == "{":
            yield from self._members()
        elif key in form.arguments_keys and self._arguments is None:
            self._arguments = []
            yield from self._read_arguments(char)
        elif key in form.ignored:
            value = (
                (yield from self._string()) if char == '"' else (yield from self._cursor.match(_SCALAR))[0]
            )
            if key == form.id_key and char == '"':
                self._id = value
        else:
            raise NotACall

    def _string(self) -> Steps[str]:
        value = json.loads((yield from self._cursor.match(_STRING))[0])
        if not value:
            raise NotACall
        return str(value)

    def _function(self) -> Steps[str]:
        names = "|".join(map(regex.escape, self._sink.names)) if self._is_bare else ""
        if names:
            return str((yield from self._cursor.match(regex.compile(rf'"({names})"')))[1])
        return (yield from self._string())

    def _begin(self) -> None:
        assert self._name is not None
        self._sink.begin(self._name, self._id)
        self._has_begun = True

    def _read_arguments(self, char: str) -> Steps[None]:
        """Read the arguments; where the name is known, they are told as they come."""
        kept = self._arguments = []
        if self._name is None and not self._is_bare:
            self._sink.delay()
        if char == "{":
            if self._name is not None:
                self._begin()
            emit = self._sink.add if self._has_begun else kept.append
            yield from JsonArguments().read(self._cursor, emit, _NO_SCHEMA, regex.compile(r"\}"))
        elif char == '"':  # some write their JSON as a string
            pieces: list[str] = []
            yield from self._long_string(pieces)
            text = json.loads("".join(pieces))
            if object_of(text) is None:
                raise NotACall
            kept.append(text)
        elif (yield from self._cursor.match(_SCALAR))[0] == "null":
            kept.append("{}")
        else:
            raise NotACall

    def _long_string(self, pieces: list[str]) -> Steps[None]:
        cursor = self._cursor
        pieces.append('"')
        cursor.at += 1
        while True:
            char = yield from cursor.char()
            found: Any = re.compile(r'[^"\\]+').match(cursor.text, cursor.at)
            if found is not None:
                pieces.append(found[0])
                cursor.at = found.end()
            elif char == '"':
                cursor.at += 1
                pieces.append(char)
                return
            else:
                pieces.append((yield from cursor.match(regex.compile(r"\\(?s:.)")))[0])
