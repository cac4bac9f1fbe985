# SPDX-License-Identifier: Apache-2.0
"""Arguments that are a member of a JSON object, in which another member holds the function's name.

    {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}

The members may stand in any order; arguments before their name wait for it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from radixkv.text.chat_formats.argument_types import ArgumentSchema
from radixkv.text.chat_formats.arguments import CallSink, JsonArguments, object_of
from radixkv.text.chat_formats.cursor import Cursor, NotACall, RanOut, Steps

_NO_SCHEMA = ArgumentSchema({})


@dataclass(frozen=True)
class MemberArguments(JsonArguments):
    """A JSON object beside the function's name. A call is the object that holds both.

    Calls stand alone, one after the other, or in a list.

    Args:
        name_keys, arguments_keys: members for the function's name and for its arguments.
        id_key: the member for the call's id; None: the models' ids are not used.
        is_named: the only member of a call has the function's name for its key, and the arguments as value.
        ignored: members without further information.
    """

    name_keys: frozenset[str] = frozenset({"name", "tool_name", "function"})
    arguments_keys: frozenset[str] = frozenset({"arguments", "parameters"})
    id_key: str | None = "id"
    is_named: bool = False
    ignored: frozenset[str] = frozenset({"type", "tool_call_id", "index", "id"})

    @cached_property
    def key_pattern(self) -> regex.Pattern[str]:
        """Return the pattern of a member's name, with the colon after it."""
        known = {*self.name_keys, *self.arguments_keys, *self.ignored, "function"}
        name = r"[^\"\\]{1,200}" if self.is_named else "|".join(sorted(known))
        return regex.compile(rf'"({name})"\s{{0,64}}:')

    def read_calls(
        self,
        cursor: Cursor,
        sink: CallSink,
        opens: tuple[str, ...],
        bare: tuple[str, ...],
        closes: tuple[str, ...],
    ) -> Steps[None]:
        """Read all calls from the mark on that opens them, and what closes them.

        Args:
            opens, bare, closes: as `CallForm` has them; without one of `opens`, only calls to offered
                functions are read.
        """
        opened = yield from cursor.take((*opens, *(mark for mark in bare if mark not in ("{", "["))))
        yield from cursor.blanks()
        is_list = (yield from cursor.char()) == "["
        cursor.at += is_list
        while True:
            yield from cursor.blanks()
            yield from _ObjectReader(self, cursor, sink, is_bare=opened not in opens).read()
            if is_list:
                yield from cursor.blanks()
                char = yield from cursor.char()
                cursor.at += 1
                if char == "]":
                    break
                if char != ",":
                    raise NotACall
            elif not (yield from _goes_on(cursor)):
                break
        yield from _close(cursor, opened, closes)


def _goes_on(cursor: Cursor) -> Steps[bool]:
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


def _close(cursor: Cursor, opened: str, closes: tuple[str, ...]) -> Steps[None]:
    """Read what closes calls. After an opening mark nothing else may follow."""
    with cursor.hold() as back:
        yield from cursor.blanks()
        if (yield from cursor.take(closes)):
            return
        rest = cursor.text[cursor.at :]
        if closes and opened and rest:
            raise RanOut if any(mark.startswith(rest) for mark in closes) else NotACall
        back()


_STRING = regex.compile(r'"(?:[^"\\]|\\.){0,400}"')
_SCALAR = regex.compile(r"[\w.+\-]{1,64}")


class _ObjectReader:
    """The reading of one call that is a JSON object."""

    def __init__(self, notation: MemberArguments, cursor: Cursor, sink: CallSink, *, is_bare: bool) -> None:
        self._notation = notation
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
            key = str((yield from cursor.match(self._notation.key_pattern))[1])
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
        notation, char = self._notation, (yield from self._cursor.char())
        if notation.is_named:
            if self._name is not None:
                raise NotACall
            self._name = key
            yield from self._read_arguments(char)
        elif key in notation.name_keys and char == '"' and self._name is None:
            self._name = yield from self._function()
        elif key == "function" and char == "{":
            yield from self._members()
        elif key in notation.arguments_keys and self._arguments is None:
            self._arguments = []
            yield from self._read_arguments(char)
        elif key in notation.ignored:
            value = (
                (yield from self._string()) if char == '"' else (yield from self._cursor.match(_SCALAR))[0]
            )
            if key == notation.id_key and char == '"':
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
        """Read the arguments; where the name is known, they are emitted as they come."""
        kept = self._arguments = []
        if self._name is None and not self._is_bare:
            self._sink.delay()
        if char == "{":
            if self._name is not None:
                self._begin()
            emit = self._sink.add if self._has_begun else kept.append
            yield from self._notation.read(self._cursor, emit, _NO_SCHEMA, regex.compile(r"\}"))
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
